// SPDX-License-Identifier: Apache-2.0
// RULER's needles: the generator's promises, the data file's shapes, the scorer's values.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "benchmarks/benchmark.h"
#include "benchmarks/ruler_niah/generate.h"
#include "benchmarks/ruler_niah/haystack.h"
#include "benchmarks/ruler_niah/ruler_niah.h"
#include "eval_bench_files.h"

namespace bitdecoding::eval {
namespace {

// Some 4 letters a token, words and marks apart: what a real tokenizer does, roughly.
std::size_t tokens_of(const std::string& text) {
  std::size_t tokens = 0;
  std::size_t run = 0;
  for (const char c : text) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) {
      if (run++ % 4 == 0) ++tokens;
    } else {
      run = 0;
      if (c != ' ') ++tokens;
    }
  }
  return tokens;
}

struct Counter {
  int calls = 0;
  CountTokens count() {
    return [this](const std::string& text) -> Result<std::size_t> {
      ++calls;
      return tokens_of(text);
    };
  }
};

std::size_t times(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

TEST(NiahGenerator, FillsTheLengthAndNeverMore) {
  for (const std::size_t length : {512U, 1024U, 4096U, 32768U}) {
    Counter counter;
    NiahPlan plan;
    plan.length = length;
    plan.rows = 5;
    const auto rows = generate_niah(plan, counter.count());
    ASSERT_TRUE(rows.ok()) << rows.status().message();
    ASSERT_EQ(rows.value().size(), 40U);
    for (const auto& row : rows.value()) {
      const auto tokens = tokens_of(row["input"].get<std::string>());
      EXPECT_EQ(tokens, row["prompt_tokens"].get<std::size_t>());
      EXPECT_LE(tokens, length);
      EXPECT_GE(tokens + std::max<std::size_t>(120, length / 100), length) << row["variant"];
    }
    EXPECT_LE(counter.calls, 40 * 5) << length;
  }
}

TEST(NiahGenerator, EveryAnswerIsThereOnceBehindItsKey) {
  Counter counter;
  NiahPlan plan;
  plan.length = 4096;
  plan.rows = 6;
  const auto rows = generate_niah(plan, counter.count());
  ASSERT_TRUE(rows.ok());
  const std::map<std::string, std::size_t> answers = {
      {"single_1", 1},   {"single_2", 1},   {"single_3", 1},   {"multikey_1", 1},
      {"multikey_2", 1}, {"multikey_3", 1}, {"multivalue", 4}, {"multiquery", 4}};
  std::map<std::string, std::set<int>> depths;
  for (const auto& row : rows.value()) {
    const auto variant = row["variant"].get<std::string>();
    const auto text = row["input"].get<std::string>();
    EXPECT_EQ(row["outputs"].size(), answers.at(variant)) << variant;
    for (const auto& output : row["outputs"]) {
      EXPECT_EQ(times(text, "is: " + output.get<std::string>() + "."), 1U) << variant;
    }
    const std::size_t needles = times(text, "One of the special magic ");
    if (variant.starts_with("single")) {
      EXPECT_EQ(needles, 1U);
    }
    if (variant == "multikey_1" || variant == "multivalue" || variant == "multiquery") {
      EXPECT_EQ(needles, 4U);
    }
    if (variant == "multikey_2" || variant == "multikey_3") {
      EXPECT_GT(needles, 30U);
    }
    depths[variant].insert(row["depth"].get<int>());
  }
  EXPECT_EQ(depths["single_1"], (std::set<int>{8, 25, 42, 58, 75, 92}));
}

TEST(NiahGenerator, TheNeedleLiesAtItsDepth) {
  Counter counter;
  NiahPlan plan;
  plan.length = 16384;
  plan.rows = 10;
  plan.variants = {"single_2", "multikey_2", "single_1"};
  const auto rows = generate_niah(plan, counter.count());
  ASSERT_TRUE(rows.ok());
  for (const auto& row : rows.value()) {
    const auto text = row["input"].get<std::string>();
    const double at = static_cast<double>(text.find(row["outputs"][0].get<std::string>()));
    EXPECT_NEAR(at / static_cast<double>(text.size()), row["depth"].get<double>() / 100, 0.02)
        << row["variant"];
  }
}

TEST(NiahGenerator, TheSeedDecidesEveryByte) {
  Counter counter;
  NiahPlan plan;
  plan.length = 2048;
  plan.rows = 2;
  const auto a = generate_niah(plan, counter.count());
  const auto b = generate_niah(plan, counter.count());
  EXPECT_EQ(a.value(), b.value());
  plan.seed = 43;
  const auto c = generate_niah(plan, counter.count());
  EXPECT_NE(a.value(), c.value());
  std::set<std::string> inputs;
  for (const auto& row : a.value()) inputs.insert(row["input"].get<std::string>());
  EXPECT_EQ(inputs.size(), a.value().size());
  // A variant's rows do not depend on which others are made.
  plan.seed = 42;
  plan.variants = {"multivalue"};
  const auto alone = generate_niah(plan, counter.count());
  EXPECT_EQ(alone.value()[0], a.value()[12]);
}

TEST(NiahGenerator, EssaysAreTheSameFromEveryCompiler) {
  Haystack haystack({"essay", HaystackKind::kEssay, false, NeedleKind::kNumbers, 1, 1, 1}, 7, {});
  const std::vector<std::string>& sentences = haystack.at_least(300);
  EXPECT_EQ(sentences[0],
            "I had often wondered what a hash table does, and Mireia wondered with me.");
  EXPECT_EQ(sentences[299],
            "Before the rain began, Priya sold the second manuscript at the weather station, for "
            "the insurance covered only fire and hail.");
}

TEST(NiahGenerator, OneHaystackSharesWhatIsBeforeTheNeedle) {
  Counter counter;
  NiahPlan plan;
  plan.length = 4096;
  plan.rows = 4;
  plan.variants = {"single_2"};
  plan.one_haystack = true;
  const auto rows = generate_niah(plan, counter.count());
  const auto a = rows.value()[2]["input"].get<std::string>();
  const auto b = rows.value()[3]["input"].get<std::string>();
  const auto shared = static_cast<std::size_t>(
      std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
  EXPECT_GT(shared, a.size() / 2);
}

TEST(NiahGenerator, RefusesWithAReason) {
  Counter counter;
  NiahPlan plan;
  plan.length = 10;
  EXPECT_NE(generate_niah(plan, counter.count()).status().message().find("more than the 10"),
            std::string::npos);
  plan.length = 1000;
  plan.variants = {"single_4"};
  EXPECT_NE(generate_niah(plan, counter.count()).status().message().find("multikey_3"),
            std::string::npos);
  plan.variants = {};
  const CountTokens fails = [](const std::string&) -> Result<std::size_t> {
    return Status(StatusCode::kIo, "The server is gone.");
  };
  EXPECT_EQ(generate_niah(plan, fails).status().message(), "The server is gone.");
  plan.rows = 0;
  EXPECT_FALSE(generate_niah(plan, counter.count()).ok());
}

TEST(RulerNiah, LoadsWhatTheGeneratorWrites) {
  const TemporaryFolder folder;
  const Benchmark& benchmark = *find_benchmark("ruler_niah").value();
  LoadOptions options;
  options.data_folder = folder.path();
  ASSERT_EQ(benchmark.missing(options).size(), 1U);
  EXPECT_EQ(benchmark.load(options).status().code(), StatusCode::kNotFound);
  Counter counter;
  for (const std::size_t length : {2048U, 1024U}) {
    NiahPlan plan;
    plan.length = length;
    plan.rows = 2;
    ASSERT_TRUE(write_niah(plan, counter.count(),
                           folder.path() + "/ruler/niah_" + std::to_string(length) + ".jsonl")
                    .ok());
  }
  EXPECT_TRUE(benchmark.missing(options).empty());
  const auto loaded = benchmark.load(options);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  EXPECT_TRUE(loaded.value().problems.empty());
  ASSERT_EQ(loaded.value().rows.size(), 32U);
  const BenchmarkRow& row = loaded.value().rows[0];
  EXPECT_EQ(row.id, "1024/single_1/0");
  EXPECT_EQ(row.labels.at("length"), "1024");
  EXPECT_EQ(row.labels.at("variant"), "single_1");
  EXPECT_EQ(row.labels.at("depth"), "25");
  EXPECT_TRUE(row.messages[0].content.ends_with("mentioned in the provided text is"));
  for (const BenchmarkRow& each : loaded.value().rows) {
    std::string reply = "They are";
    for (const auto& value : each.reference) reply.append(" ").append(value.get<std::string>());
    EXPECT_EQ(benchmark.score(each, reply, options).value().value, 1.0);
    EXPECT_EQ(benchmark.score(each, "I forgot.", options).value().value, 0.0);
  }
  options.model.thinking = true;
  const auto thinking = benchmark.load(options);
  EXPECT_TRUE(thinking.value().rows[0].messages[0].content.ends_with("provided text?"));
}

TEST(RulerNiah, TrapsOfTheDataFile) {
  const TemporaryFolder folder;
  folder.write("ruler/notes.jsonl", "not read\n");
  const std::string path = folder.write(
      "ruler/niah_4096.jsonl",
      R"({"index":0,"task":"niah_multivalue","input":"q","outputs":["1","2"],"gen_prefix":" A"})"
      "\r\n"
      R"({"index":1,"task":"niah_single_1","input":"q","answer":7})"
      "\n"
      R"({"index":1,"task":"niah_single_1","input":"q","outputs":["1"]})"
      "\n"
      R"({"index":2,"task":"niah_single_1","input":"q","outputs":[]})"
      "\n"
      R"({"index":3,"task":"niah_single_1","outputs":["1"]})"
      "\n"
      R"({"index":4,"task":"niah_single_1","input":"q","outputs":[""]})"
      "\n");
  LoadOptions options;
  options.data_folder = folder.path();
  const auto loaded = find_benchmark("ruler_niah").value()->load(options);
  ASSERT_TRUE(loaded.ok());
  ASSERT_EQ(loaded.value().rows.size(), 2U);
  EXPECT_EQ(loaded.value().rows[0].messages[0].content, "q A");
  EXPECT_EQ(loaded.value().rows[0].labels.at("variant"), "multivalue");
  EXPECT_EQ(loaded.value().rows[0].labels.at("length"), "4096");
  EXPECT_EQ(loaded.value().rows[0].labels.count("depth"), 0U);
  EXPECT_EQ(loaded.value().rows[1].reference[0], "7");
  const auto& problems = loaded.value().problems;
  ASSERT_EQ(problems.size(), 4U);
  EXPECT_EQ(problems[0].what, "has the id '4096/single_1/1' of " + path + " line 2");
  EXPECT_EQ(problems[1].what, "'outputs' is empty");
  EXPECT_EQ(problems[2].where, path + " line 5");
}

TEST(RulerNiah, ScoresAsNvidia) {
  EXPECT_EQ(string_match_all("It is 1234567.", {"1234567"}), 1.0);
  EXPECT_EQ(string_match_all("ABCD-ef", {"abcd-EF", "x"}), 0.5);
  EXPECT_EQ(string_match_all("1 and 3", {"1", "2", "3"}), 2.0 / 3.0);
  EXPECT_EQ(string_match_all("", {"1"}), 0.0);
  EXPECT_EQ(string_match_all("12\x01"
                             "34",
                             {"1234"}),
            0.0);
  // Values of the Python functions.
  EXPECT_EQ(ruler_points({1.0, 1.0, 0.0}), 66.67);
  EXPECT_EQ(ruler_points({1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}), 6.25);
  EXPECT_EQ(ruler_points(std::vector<double>(3, 2.0 / 3.0)), 66.67);
  // 0.125 % and 0.375 % are exact: ties go to the even digit.
  std::vector<double> scores(800, 0.0);
  scores[0] = 1.0;
  EXPECT_EQ(ruler_points(scores), 0.12);
  scores[1] = scores[2] = 1.0;
  EXPECT_EQ(ruler_points(scores), 0.38);
}

TEST(RulerNiah, TheThinkingPartDoesNotCount) {
  const Benchmark& benchmark = *find_benchmark("ruler_niah").value();
  BenchmarkRow row;
  row.reference = {"42"};
  LoadOptions options;
  EXPECT_EQ(benchmark.score(row, "<think>42</think>no", options).value().value, 0.0);
  EXPECT_EQ(benchmark.score(row, "<think>?</think>42", options).value().value, 1.0);
  options.model.thinking = true;
  const Score score = benchmark.score(row, "42 perhaps, let me", options).value();
  EXPECT_EQ(score.value, 0.0);
  EXPECT_EQ(score.why, "nothing outside the thinking part");
}

}  // namespace
}  // namespace bitdecoding::eval
