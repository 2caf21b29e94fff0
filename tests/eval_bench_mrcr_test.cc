// SPDX-License-Identifier: Apache-2.0
// MRCR: the ratio against Python's difflib, the grader, the data file's shapes.
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <random>

#include "benchmarks/benchmark.h"
#include "benchmarks/mrcr/mrcr.h"
#include "benchmarks/mrcr/sequence_matcher.h"
#include "benchmarks/text/unicode.h"
#include "eval_bench_files.h"
#include "eval_bench_python.h"

namespace bitdecoding::eval {
namespace {

// A text and one that is made of it: by changes, cuts, moves; or another text.
std::pair<std::u32string, std::u32string> random_pair(std::mt19937& random) {
  const auto below = [&](std::size_t n) { return random() % n; };
  static constexpr std::size_t kLengths[] = {3, 20, 90, 199, 200, 201, 450, 1500};
  static const std::u32string alphabet = U"ab \ncdefgh\u00e9\u4e2d\u6587\U0001F600ijklmnop.,";
  const std::size_t letters = 1 + below(alphabet.size());
  std::u32string a;
  const std::size_t length = below(kLengths[below(8)] + 1);
  for (std::size_t i = 0; i < length; ++i) a.push_back(alphabet[below(letters)]);
  std::u32string b = a;
  const std::size_t changes = below(4) == 0 ? a.size() : below(12);
  for (std::size_t i = 0; i < changes; ++i) {
    const std::size_t at = below(b.size() + 1);
    switch (below(3)) {
      case 0:
        b.insert(at, 1, alphabet[below(letters)]);
        break;
      case 1:
        b.erase(at, below(20));
        break;
      default:
        b = b.substr(at) + b.substr(0, at);
    }
  }
  return {a, b};
}

TEST(SequenceMatcher, EqualsDifflibToTheLastDigit) {
  std::mt19937 random(20261203);
  std::vector<std::pair<std::u32string, std::u32string>> pairs;
  nlohmann::json cases = nlohmann::json::array();
  for (int i = 0; i < 4000; ++i) {
    pairs.push_back(random_pair(random));
    cases.push_back({encode_utf8(pairs.back().first), encode_utf8(pairs.back().second)});
  }
  const TemporaryFolder folder;
  const std::string file = folder.write("cases.json", cases.dump());
  const auto answers = python_lines(R"(
import difflib, json, sys
for a, b in json.load(open(sys.argv[1], encoding='utf-8')):
    print(difflib.SequenceMatcher(None, a, b).ratio().hex(),
          difflib.SequenceMatcher(None, a, b, autojunk=False).ratio().hex())
)",
                                    file);
  if (answers.empty()) GTEST_SKIP() << "python3 is not there";
  ASSERT_EQ(answers.size(), pairs.size());
  int junk_counts = 0;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    const auto& [a, b] = pairs[i];
    char* end = nullptr;
    const double automatic = std::strtod(answers[i].c_str(), &end);
    const double plain = std::strtod(end, nullptr);
    junk_counts += automatic != plain ? 1 : 0;
    EXPECT_EQ(sequence_ratio(a, b), automatic) << i;
    EXPECT_EQ(sequence_ratio(a, b, false), plain) << i;
  }
  EXPECT_GT(junk_counts, 100);  // the test means something
}

TEST(SequenceMatcher, Edges) {
  EXPECT_EQ(sequence_ratio(U"", U""), 1.0);
  EXPECT_EQ(sequence_ratio(U"a", U""), 0.0);
  EXPECT_EQ(sequence_ratio(U"abcd", U"bcde"), 0.75);
  // Autojunk: 200 times the same letter never starts a match, so nearly equal texts come to 0.
  const std::u32string letters(200, U'x');
  EXPECT_EQ(sequence_ratio(letters, U"y" + letters), 0.0);
  EXPECT_EQ(sequence_ratio(letters.substr(1), letters.substr(1)), 1.0);
  EXPECT_GT(sequence_ratio(letters, U"y" + letters, false), 0.99);
}

TEST(Mrcr, GradesAsTheCard) {
  EXPECT_EQ(mrcr_grade("abc123poem", "abc123poem", "abc123"), 1.0);
  EXPECT_EQ(mrcr_grade("poem", "abc123poem", "abc123"), 0.0);
  EXPECT_EQ(mrcr_grade(" abc123poem", "abc123poem", "abc123"), 0.0);
  EXPECT_EQ(mrcr_grade("abc123", "abc123", "abc123"), 1.0);
  EXPECT_EQ(mrcr_grade("abc123po", "abc123poem", "abc123"), 2.0 * 2 / 6);
}

TEST(Mrcr, BinsAndTheAreaUnderTheCurve) {
  EXPECT_EQ(length_bin(1), "8192");
  EXPECT_EQ(length_bin(8192), "8192");
  EXPECT_EQ(length_bin(8193), "16384");
  EXPECT_EQ(length_bin(98048), "131072");
  EXPECT_TRUE(std::isnan(area_under_curve({})));
  EXPECT_EQ(area_under_curve({{8192, 0.25}}), 0.25);
  EXPECT_EQ(area_under_curve({{16384, 0.0}, {8192, 1.0}}), 0.5);
  // The second bin is twice as wide as the first.
  EXPECT_NEAR(area_under_curve({{8192, 1.0}, {16384, 1.0}, {65536, 0.0}}), 2.0 / 3.0, 1e-15);
}

constexpr const char* kRow =
    R"({"prompt":"[{\"role\":\"user\",\"content\":\"a poem\"},{\"role\":\"assistant\",)"
    R"(\"content\":\"p\"},{\"role\":\"user\",\"content\":\"again\"}]","answer":"Xyp","random_string_)"
    R"(to_prepend":"Xy","n_needles":2,"desired_msg_index":1,"total_messages":3,"n_chars":12})";

TEST(Mrcr, LoadsTheCardsShape) {
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = folder.path();
  const Benchmark& benchmark = *find_benchmark("mrcr").value();
  ASSERT_EQ(benchmark.missing(options).size(), 1U);
  EXPECT_EQ(benchmark.missing(options)[0].licence, "MIT");
  const std::string path = folder.write(
      "mrcr/_filtered_le98048.jsonl",
      std::string(kRow) + "\r\n" +
          R"({"prompt":[{"role":"user","content":"q"}],"answer":"Qz","random_string_to_prepend":"Q","n_needles":8,"n_tokens":20000})"
          "\n" +
          R"({"prompt":"[broken","answer":"Qz","random_string_to_prepend":"Q","n_needles":8})"
          "\n" +
          R"({"prompt":[{"role":"user"}],"answer":"Qz","random_string_to_prepend":"Q","n_needles":8})"
          "\n" +
          R"({"prompt":[{"role":"user","content":"q"}],"answer":"z","random_string_to_prepend":"Q","n_needles":8})"
          "\n" +
          R"({"prompt":[{"role":"user","content":"q"},{"role":"assistant","content":"q"}],"answer":"Qz","random_string_to_prepend":"Q","n_needles":8})"
          "\n" +
          R"({"prompt":[{"role":"user","content":"q"}],"answer":"Qz","random_string_to_prepend":"Q"})"
          "\n");
  const auto loaded = benchmark.load(options);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  ASSERT_EQ(loaded.value().rows.size(), 2U);
  EXPECT_EQ(loaded.value().rows[0].messages.size(), 3U);
  EXPECT_EQ(loaded.value().rows[0].messages[1].role, "assistant");
  EXPECT_EQ(loaded.value().rows[0].labels.at("needles"), "2");
  EXPECT_EQ(loaded.value().rows[0].labels.at("length"), "8192");
  EXPECT_EQ(loaded.value().rows[1].labels.at("length"), "32768");
  EXPECT_EQ(loaded.value().rows[1].stated_tokens, 20000U);
  const auto& problems = loaded.value().problems;
  ASSERT_EQ(problems.size(), 5U);
  EXPECT_EQ(problems[0].where, path + " line 3");
  EXPECT_NE(problems[1].what.find("message 1"), std::string::npos);
  EXPECT_NE(problems[2].what.find("does not begin"), std::string::npos);
  EXPECT_NE(problems[3].what.find("does not end"), std::string::npos);
  EXPECT_EQ(problems[4].what, "has no field 'n_needles'");
}

TEST(Mrcr, TheThinkingPartIsRemovedFirst) {
  const Benchmark& benchmark = *find_benchmark("mrcr").value();
  BenchmarkRow row;
  row.reference = {{"answer", "Xypoem"}, {"prefix", "Xy"}};
  LoadOptions options;
  EXPECT_EQ(benchmark.score(row, "<think>Xypoem</think>\n\nXypoem", options).value().value, 1.0);
  EXPECT_EQ(benchmark.score(row, "Xypoem", options).value().extracted, "poem");
  // A space that the model itself puts first is wrong, as on the card.
  EXPECT_EQ(benchmark.score(row, " Xypoem", options).value().value, 0.0);
  options.model.thinking = true;
  const Score cut = benchmark.score(row, "Xypoem would be", options).value();
  EXPECT_EQ(cut.value, 0.0);
  EXPECT_EQ(cut.why, "nothing outside the thinking part");
}

}  // namespace
}  // namespace bitdecoding::eval
