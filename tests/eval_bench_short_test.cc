// SPDX-License-Identifier: Apache-2.0
// The benchmarks with short answers: AIME's boxed integers and GPQA's letters, with the traps of
// their data files and of replies.
#include <gtest/gtest.h>

#include <map>
#include <regex>

#include "benchmarks/benchmark.h"
#include "benchmarks/gpqa/gpqa.h"
#include "benchmarks/text/boxed.h"
#include "eval_bench_files.h"

namespace bitdecoding::eval {
namespace {

LoadOptions data(const TemporaryFolder& folder) {
  LoadOptions options;
  options.data_folder = folder.path();
  return options;
}

TEST(Boxes, NestedBrokenAndSpaced) {
  EXPECT_EQ(boxes("a \\boxed{1} b \\boxed{\\text{2}} \\boxed {3}"),
            (std::vector<std::string>{"1", "\\text{2}", "3"}));
  EXPECT_EQ(boxes("\\boxed{\\boxed{5}}"), (std::vector<std::string>{"\\boxed{5}"}));
  EXPECT_EQ(boxes("\\boxed{x \\} y}"), (std::vector<std::string>{"x \\} y"}));
  EXPECT_EQ(boxes("\\boxed{1} then \\boxed{2"), (std::vector<std::string>{"1"}));
  EXPECT_TRUE(boxes("\\boxed 5, \\boxed").empty());
}

TEST(Boxes, Integers) {
  const std::map<std::string, std::int64_t> good = {
      {"42", 42},         {"042", 42},        {"000", 0},        {" 7 ", 7},
      {"$33$", 33},       {"\\text{12}", 12}, {"60^\\circ", 60}, {"60^{\\circ}", 60},
      {"m+n = 104", 104}, {"42.", 42},        {"42.0", 42},      {"\\mathbf{113}", 113},
      {"-5", -5},         {"\\, 8", 8}};
  for (const auto& [text, value] : good) EXPECT_EQ(boxed_integer(text), value) << text;
  for (const char* text :
       {"", "x", "4 or 5", "1/2", "42.5", "12345678901234567890", "\\frac{1}{2}"}) {
    EXPECT_FALSE(boxed_integer(text).has_value()) << text;
  }
}

TEST(Aime, FieldNamesOfTheReleases) {
  const TemporaryFolder folder;
  folder.write(
      "aime24/aime24.jsonl",
      R"({"id":60,"problem":"p","solution":"so \\boxed{1}, no \\boxed{204}","answer":"204"})"
      "\n"
      R"({"ID":"2024-II-4","Problem":"p","Solution":"..","Answer":33})"
      "\r\n"
      R"({"question":"p","answer":"033"})"
      "\n"
      R"({"problem":"p","solution":"hence \\boxed{025}."})"
      "\n"
      R"({"problem":"p","answer":"$\\boxed{70}$"})"
      "\n");
  const Benchmark& benchmark = *find_benchmark("aime").value();
  const auto loaded = benchmark.load(data(folder));
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  ASSERT_TRUE(loaded.value().problems.empty()) << loaded.value().problems[0].what;
  std::vector<std::int64_t> answers;
  for (const auto& row : loaded.value().rows) answers.push_back(row.reference.get<std::int64_t>());
  EXPECT_EQ(answers, (std::vector<std::int64_t>{204, 33, 33, 25, 70}));
  EXPECT_EQ(loaded.value().rows[0].id, "60");
  EXPECT_EQ(loaded.value().rows[1].id, "2024-II-4");
  EXPECT_EQ(loaded.value().rows[2].id, "2");
  EXPECT_TRUE(loaded.value().rows[0].messages[0].content.ends_with("within \\boxed{}."));
}

TEST(Aime, WhatIsWrongIsNamed) {
  const TemporaryFolder folder;
  const Benchmark& benchmark = *find_benchmark("aime25").value();
  EXPECT_NE(benchmark.missing(data(folder))[0].how.find("math-ai/aime25"), std::string::npos);
  folder.write("aime25/aime25.parquet", "PAR1");
  EXPECT_NE(benchmark.missing(data(folder))[0].how.find("parquet_to_jsonl.py"), std::string::npos);
  EXPECT_EQ(benchmark.load(data(folder)).status().code(), StatusCode::kNotFound);
  folder.write("aime25/aime25.jsonl",
               "{\"problem\":\"p\",\"answer\":\"1000\"}\n{\"problem\":\"p\",\"answer\":\"n/a\"}\n"
               "{\"problem\":\"p\"}\n{\"answer\":\"1\"}\n{\"problem\":\"p\",\"answer\":\"7\"}\n");
  const auto loaded = benchmark.load(data(folder));
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ(loaded.value().rows.size(), 1U);
  ASSERT_EQ(loaded.value().problems.size(), 4U);
  EXPECT_EQ(loaded.value().problems[0].what, "its answer '1000' is no whole number from 0 to 999");
  EXPECT_EQ(loaded.value().problems[2].what, "has no field 'answer' or 'solution'");
}

TEST(Aime, TheLastBoxOutsideTheThinkingPart) {
  const Benchmark& benchmark = *find_benchmark("aime").value();
  BenchmarkRow row;
  row.reference = 42;
  const auto score = [&](const std::string& reply, bool thinking = false) {
    LoadOptions options;
    options.model.thinking = thinking;
    return benchmark.score(row, reply, options).value();
  };
  EXPECT_EQ(score("It is \\boxed{042}.").value, 1.0);
  EXPECT_EQ(score("\\boxed{42}, no, \\boxed{43}").value, 0.0);
  EXPECT_EQ(score("\\boxed{43}, no, $\\boxed{42}$").value, 1.0);
  EXPECT_EQ(score("<think>\\boxed{42}</think> It is 42.").value, 0.0);
  EXPECT_EQ(score("<think>\\boxed{42}</think> It is 42.").why, "no box outside the thinking part");
  EXPECT_EQ(score("\\boxed{42} and on and on", true).value, 0.0);
  EXPECT_EQ(score("\\boxed{7}</think>\\boxed{42}", true).value, 1.0);
  const Score words = score("\\boxed{forty-two}");
  EXPECT_EQ(words.extracted, "");
  EXPECT_EQ(words.why, "the last box holds no whole number: forty-two");
  EXPECT_EQ(score("").value, 0.0);
}

TEST(Gpqa, Letters) {
  const std::map<std::string, char> cases = {
      {"Answer: C", 'C'},
      {"answer: c", 'C'},
      {"**Answer:** C", 'C'},
      {"**Answer: C**", 'C'},
      {"Answer: **(C)**", 'C'},
      {"Answer: [C]", 'C'},
      {"Answer: $\\boxed{C}$", 'C'},
      {"Answer: \\text{C}", 'C'},
      {"Answer\uff1aC", 'C'},
      {"The correct answer is (C) because", 'C'},
      {"The answer is: C.", 'C'},
      {"Answer:\n\nC", 'C'},
      {"Answer: A\nNo.\nAnswer: C", 'C'},
      {"Answer: A. But \\boxed{C}", 'C'},
      {"\\boxed{\\text{(C) 5 eV}}", 'C'},
      {"\\boxed{C} is it; \\boxed{42}", 'C'},
      {"Answer: C) 5 eV", 'C'},
      {"Answer: a common mistake. Answer: D", 'D'},
      {"Answer: Carbon", 0},
      {"Answer: E", 0},
      {"The answer is a common one", 0},
      {"Answers vary; C", 0},
      {"C", 0},
      {"", 0},
  };
  for (const auto& [text, letter] : cases) EXPECT_EQ(choice_letter(text), letter) << text;
}

TEST(Gpqa, SimpleEvalsIsItsOwnExpression) {
  const std::regex expression("Answer[ \\t]*:[ \\t]*\\$?([A-D])\\$?", std::regex::icase);
  for (const char* text :
       {"Answer: C", "answer: c", "**Answer:** C", "Answer: **C**", "Answer: (C)", "Answer: $C$",
        "Answer: A\nAnswer: C", "Answer : B", "Answer:Carbon", "The answer is C", "answerAnswer:D",
        "Answer:\nC", "Answer: $$C", ""}) {
    std::cmatch match;
    const char expected = std::regex_search(text, match, expression) ? *match[1].first : '\0';
    EXPECT_EQ(simple_evals_letter(text), expected) << text;
  }
}

TEST(Gpqa, ThePermutationIsFixed) {
  const TemporaryFolder folder;
  std::string file;
  for (int i = 0; i < 400; ++i) {
    file += R"({"Question":"q)" + std::to_string(i) +
            R"(","Correct Answer":" right\n","Incorrect Answer 1":"w1","Incorrect Answer 2":"w2",)"
            R"("Incorrect Answer 3":3,"Record ID":"r)" +
            std::to_string(i) + R"(","High-level domain":"Physics"})" + "\n";
  }
  folder.write("gpqa/gpqa_diamond.jsonl", file);
  const Benchmark& benchmark = *find_benchmark("gpqa").value();
  const auto loaded = benchmark.load(data(folder));
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  ASSERT_EQ(loaded.value().rows.size(), 400U);
  std::map<std::string, int> letters;
  for (const auto& row : loaded.value().rows) {
    const auto letter = row.reference.get<std::string>();
    ++letters[letter];
    EXPECT_NE(row.messages[0].content.find("\n" + letter + ") right"), std::string::npos);
    EXPECT_EQ(benchmark.score(row, "Answer: " + letter, {}).value().value, 1.0);
  }
  for (const char* letter : {"A", "B", "C", "D"}) EXPECT_NEAR(letters[letter], 100, 40) << letter;
  // Values of this very program: a change would make all earlier runs incomparable.
  EXPECT_EQ(loaded.value().rows[0].labels.at("domain"), "Physics");
  std::string first;
  for (int i = 0; i < 12; ++i) {
    first += loaded.value().rows[static_cast<std::size_t>(i)].reference.get<std::string>();
  }
  EXPECT_EQ(first, "ABCBACADDADD");
}

TEST(Gpqa, OtherShapesAndTraps) {
  const TemporaryFolder folder;
  folder.write(
      "gpqa/gpqa_diamond.jsonl",
      R"({"question":"q","choices":["w","x","y","z"],"answer":"C"})"
      "\n"
      R"({"question":"q","options":["w","x","y","z"],"answer":3})"
      "\n"
      R"({"problem":"q\nA. w\nB. x\nC. y\nD. z","solution":"\\boxed{B}"})"
      "\n"
      R"({"question":"q","choices":["w","x","y"],"answer":"C"})"
      "\n"
      R"({"question":"q","choices":["w","x","y","z"],"answer":"E"})"
      "\n"
      R"({"Question":"q","Correct Answer":"c","Incorrect Answer 1":"w"})"
      "\n"
      R"({"question":"q"})"
      "\n"
      R"({"Question":"same","Correct Answer":"5","Incorrect Answer 1":"5","Incorrect Answer 2":"6","Incorrect Answer 3":"7"})"
      "\n");
  const auto loaded = find_benchmark("gpqa").value()->load(data(folder));
  ASSERT_TRUE(loaded.ok());
  ASSERT_EQ(loaded.value().rows.size(), 4U);
  EXPECT_EQ(loaded.value().rows[0].reference, "C");
  EXPECT_NE(loaded.value().rows[0].messages[0].content.find("\nC) y"), std::string::npos);
  EXPECT_EQ(loaded.value().rows[1].reference, "D");
  EXPECT_EQ(loaded.value().rows[2].reference, "B");
  ASSERT_EQ(loaded.value().problems.size(), 4U);
  EXPECT_EQ(loaded.value().problems[0].what, "'choices' is not a list of four strings");
  EXPECT_EQ(loaded.value().problems[1].what, "its answer is no letter A to D and no number 0 to 3");
  EXPECT_NE(loaded.value().problems[2].what.find("'Incorrect Answer 2'"), std::string::npos);
}

TEST(Gpqa, CompatAndThinking) {
  const Benchmark& benchmark = *find_benchmark("gpqa").value();
  BenchmarkRow row;
  row.reference = "C";
  LoadOptions options;
  EXPECT_EQ(benchmark.score(row, "<think>Answer: A</think> Answer: C", options).value().value, 1.0);
  EXPECT_EQ(benchmark.score(row, "Answer: A\nAnswer: **C**", options).value().value, 1.0);
  const Score none = benchmark.score(row, "<think>Answer: C", options).value();
  EXPECT_EQ(none.value, 0.0);
  EXPECT_EQ(none.why, "nothing outside the thinking part");
  options.compat = "simple-evals";
  EXPECT_EQ(benchmark.score(row, "Answer: A\nAnswer: **C**", options).value().value, 0.0);
  EXPECT_EQ(benchmark.score(row, "answer: c", options).value().value, 0.0);
  EXPECT_EQ(benchmark.score(row, "Answer: $C$", options).value().value, 1.0);
  options.compat = "other";
  EXPECT_EQ(benchmark.score(row, "Answer: C", options).status().code(),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace bitdecoding::eval
