// SPDX-License-Identifier: Apache-2.0
// LiveCodeBench: code in replies, comparison of outputs, packed tests, the data file.
#include <gtest/gtest.h>

#include <random>

#include "benchmarks/benchmark.h"
#include "benchmarks/lcb/compare.h"
#include "benchmarks/lcb/sandbox.h"
#include "benchmarks/lcb/test_cases.h"
#include "eval_bench_data.h"
#include "eval_bench_files.h"
#include "eval_bench_python.h"

namespace bitdecoding::eval {
namespace {

TEST(LcbCode, BetweenTheLastTwoFences) {
  EXPECT_EQ(extract_code("a\n```python\nx = 1\ny\n```\nb"), "x = 1\ny");
  EXPECT_EQ(extract_code("```\nold\n```\n```py\nnew\n```"), "new");
  EXPECT_EQ(extract_code("```python\nx\n```\nuse ``` here"), "");  // an inline fence moves the pair
  EXPECT_EQ(extract_code("```python\nx"), "");
  EXPECT_EQ(extract_code("no code"), "");
  EXPECT_EQ(extract_code("```python\n```"), "");
}

TEST(LcbCompare, Outputs) {
  EXPECT_TRUE(same_output("1\n2\n", "1\n2"));
  EXPECT_TRUE(same_output(" 1 \n 2\t\n\n", "1\n2"));
  EXPECT_FALSE(same_output("1\n\n2", "1\n2"));
  EXPECT_TRUE(same_output("1.0 2e1", "1 20"));
  EXPECT_TRUE(same_output("-0", "0.00"));
  EXPECT_FALSE(same_output("0.1", "0.10000001"));  // no tolerance
  EXPECT_FALSE(same_output("50000000000000000", "50000000000000001"));
  EXPECT_FALSE(same_output("nan", "NaN"));
  EXPECT_TRUE(same_output("nan", "nan"));  // the same text
  EXPECT_TRUE(same_output("1  2", "1 2"));
  EXPECT_FALSE(same_output("a  b", "a b"));
  EXPECT_FALSE(same_output("Yes", "YES"));
  EXPECT_TRUE(same_output("", "\n"));
}

TEST(LcbCompare, DecimalsAsPythonReadsThem) {
  static const std::vector<std::string> words = {"1",
                                                 "1.0",
                                                 "01",
                                                 "-1",
                                                 "+1",
                                                 "1e0",
                                                 "10e-1",
                                                 "0.1e1",
                                                 "1_0",
                                                 "10",
                                                 ".5",
                                                 "5e-1",
                                                 "0.50",
                                                 "5.",
                                                 ".",
                                                 "e1",
                                                 "1e",
                                                 "1e+",
                                                 "1e5",
                                                 "100000",
                                                 "inf",
                                                 "Infinity",
                                                 "-inf",
                                                 "nan",
                                                 "nan1",
                                                 "0",
                                                 "-0.0",
                                                 "0e99",
                                                 "1x",
                                                 "",
                                                 "--1",
                                                 "1e400",
                                                 "1e0400",
                                                 "_1",
                                                 "1__0",
                                                 "sNaN5x",
                                                 "infinit",
                                                 "12345678901234567890123",
                                                 "12345678901234567890123.0"};
  nlohmann::json cases = nlohmann::json::array();
  for (const auto& a : words) {
    for (const auto& b : words) cases.push_back(nlohmann::json::array({a, b}));
  }
  const TemporaryFolder folder;
  const auto answers = python_lines(R"(
import json, sys
from decimal import Decimal
def read(line):
    try: return True, [Decimal(x) for x in line.split()]
    except Exception: return False, []
for a, b in json.load(open(sys.argv[1])):
    a, b = a.strip(), b.strip()
    (x, p), (y, q) = read(a), read(b)
    print(int(a == b or (x and y and p == q)))
)",
                                    folder.write("cases.json", cases.dump()));
  if (answers.empty()) GTEST_SKIP() << "python3 is not there";
  ASSERT_EQ(answers.size(), cases.size());
  for (std::size_t i = 0; i < answers.size(); ++i) {
    EXPECT_EQ(same_output(cases[i][0].get<std::string>(), cases[i][1].get<std::string>()),
              answers[i] == "1")
        << cases[i];
  }
}

bool same(const char* given, const char* expected) {
  return same_value(nlohmann::json::parse(given), expected).value();
}

TEST(LcbCompare, ReturnedValues) {
  EXPECT_TRUE(same(R"({"i":"1"})", "1"));
  EXPECT_TRUE(same(R"({"f":"1.0"})", "1"));
  EXPECT_TRUE(same(R"({"b":true})", "1"));
  EXPECT_TRUE(same(R"({"i":"0"})", "false"));
  EXPECT_FALSE(same(R"({"f":"1.5"})", "1"));
  EXPECT_TRUE(same(R"({"f":"0.1"})", "0.1"));
  EXPECT_TRUE(same(R"({"f":"1e+22"})", "10000000000000000000000"));
  EXPECT_TRUE(same(R"({"i":"123456789012345678901234567890"})", "123456789012345678901234567890"));
  EXPECT_FALSE(same(R"({"i":"123456789012345678901234567891"})", "123456789012345678901234567890"));
  EXPECT_FALSE(same(R"({"s":"1"})", "1"));
  EXPECT_FALSE(same(R"({"n":0})", "0"));
  EXPECT_TRUE(same(R"({"n":0})", "null"));
  EXPECT_TRUE(same(R"({"l":[{"i":"1"},{"l":[]}]})", "[1,[]]"));
  EXPECT_FALSE(same(R"({"l":[{"i":"1"},{"x":"tuple"}]})", "[1,[]]"));
  EXPECT_FALSE(same(R"({"l":[{"i":"2"},{"i":"1"}]})", "[1,2]"));
  EXPECT_TRUE(same(R"({"d":[[{"s":"b"},{"i":"2"}],[{"s":"a"},{"i":"1"}]]})", R"({"a":1,"b":2})"));
  EXPECT_FALSE(same(R"({"d":[[{"s":"a"},{"i":"1"}]]})", R"({"a":1,"b":2})"));
  EXPECT_FALSE(same(R"({"f":"nan"})", "0"));
  EXPECT_FALSE(same(R"([])", "[]"));  // not the tool's writing
  EXPECT_FALSE(same(R"({"i":5})", "5"));
  EXPECT_FALSE(same_value(nlohmann::json::object(), "not JSON").ok());
}

TEST(LcbTests, PickledStringsOfEveryProtocol) {
  const auto lines = python_lines(R"(
import base64, json, pickle, zlib
for text in ('[]', json.dumps([{'input': 'x' * 70000, 'output': '\u00e9', 'testtype': 'stdin'}])):
    for protocol in (2, 3, 4, 5):
        print(base64.b64encode(zlib.compress(pickle.dumps(text, protocol))).decode())
)");
  if (lines.empty()) GTEST_SKIP() << "python3 is not there";
  ASSERT_EQ(lines.size(), 8U);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    const auto bytes = inflate(decode_base64(lines[i]).value(), 1 << 20);
    ASSERT_TRUE(bytes.ok());
    const auto text = pickled_string(bytes.value());
    ASSERT_TRUE(text.ok()) << text.status().message();
    EXPECT_EQ(text.value().size() > 70000, i >= 4);
  }
  const auto cases = test_cases({{"private_test_cases", lines[7]}});
  ASSERT_TRUE(cases.ok()) << cases.status().message();
  EXPECT_EQ(cases.value()[0].output, "\u00e9");
}

TEST(LcbTests, APickleThatWouldRunCodeIsRefused) {
  const TemporaryFolder folder;
  const std::string marker = folder.path() + "/executed";
  const auto lines = python_lines(R"(
import base64, os, pickle, sys, zlib
class Attack:
    def __reduce__(self): return (os.system, ('touch ' + sys.argv[1],))
for value in (Attack(), ['[]'], ('[]', Attack()), 5, b'[]'):
    for protocol in (0, 2, 4):
        print(base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode())
)",
                                  marker);
  if (lines.empty()) GTEST_SKIP() << "python3 is not there";
  for (const std::string& line : lines) {
    const auto cases = test_cases({{"private_test_cases", line}});
    ASSERT_FALSE(cases.ok());
    EXPECT_NE(cases.status().message().find("not executed"), std::string::npos)
        << cases.status().message();
  }
  EXPECT_FALSE(std::filesystem::exists(marker));
}

TEST(LcbTests, BrokenBytes) {
  EXPECT_FALSE(decode_base64("a*b").ok());
  EXPECT_FALSE(decode_base64("abcde").ok());
  EXPECT_EQ(decode_base64("aGk=").value(), "hi");
  EXPECT_FALSE(inflate("nothing", 100).ok());
  // 10 MB of zeros in 10 kB: refused at the limit, not decompressed.
  const auto bomb = python_lines(
      "import base64, zlib\nprint(base64.b64encode(zlib.compress(bytes(10**7))).decode())");
  if (!bomb.empty()) {
    EXPECT_NE(inflate(decode_base64(bomb[0]).value(), 1 << 20).status().message().find("more than"),
              std::string::npos);
  }
  for (const std::string_view pickle :
       {std::string_view("\x80\x04X\xff\xff\xff\xff"
                         "a.",
                         9),
        std::string_view("."), std::string_view(""), std::string_view("X\x01\0\0\0a", 6),
        std::string_view("X\x01\0\0\0a.x", 8),
        std::string_view("\x8d\xff\xff\xff\xff\xff\xff\xff\xff", 9)}) {
    EXPECT_FALSE(pickled_string(pickle).ok());
  }
  EXPECT_FALSE(test_cases(nlohmann::json::object()).ok());
  EXPECT_FALSE(test_cases({{"public_test_cases", "[{\"input\":\"a\"}]"}}).ok());
  EXPECT_FALSE(test_cases({{"public_test_cases", "{}"}}).ok());
}

nlohmann::json function_problem() {
  nlohmann::json out = lcb_row("f", "2025-02-01");
  out["starter_code"] = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ";
  out["public_test_cases"] = R"([{"input":"1\n[2, 3]","output":"[3, 4]","testtype":"functional"}])";
  out["private_test_cases"] = "[]";
  out["metadata"] = R"({"func_name": "add"})";
  return out;
}

TEST(Lcb, LoadsBothShapesInTheDatesAsked) {
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = folder.path();
  folder.write("lcb_v6/prompts.jsonl", lcb_row("a", "2025-01-04").dump() + "\r\n" +
                                           lcb_row("b", "2025-03-22").dump() + "\n" +
                                           function_problem().dump() + "\n");
  const Benchmark& benchmark = *find_benchmark("lcb").value();
  const auto loaded = benchmark.load(options);
  ASSERT_TRUE(loaded.ok()) << loaded.status().message();
  ASSERT_EQ(loaded.value().rows.size(), 3U);
  const BenchmarkRow& row = loaded.value().rows[0];
  EXPECT_EQ(row.messages[0].role, "system");
  EXPECT_NE(row.messages[1].content.find("# YOUR CODE HERE"), std::string::npos);
  EXPECT_NE(loaded.value().rows[2].messages[1].content.find("def add(self"), std::string::npos);
  EXPECT_EQ(row.labels.at("date"), "2025-01-04");
  EXPECT_EQ(row.labels.at("month"), "2025-01");
  options.date_from = "2025-02-01";
  options.date_to = "2025-02-28";
  EXPECT_EQ(benchmark.load(options).value().rows.size(), 1U);
  options.date_to = "2025-01-01";
  EXPECT_NE(benchmark.load(options).status().message().find("first is after the last"),
            std::string::npos);
  options.date_to = "2031-01-01";
  options.date_from = "2030-01-01";
  EXPECT_NE(benchmark.load(options).status().message().find("no problem from 2030-01-01"),
            std::string::npos);
  options.date_from = "May";
  EXPECT_NE(benchmark.load(options).status().message().find("YYYY-MM-DD"), std::string::npos);
}

TEST(Lcb, TrapsOfTheDataFile) {
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = folder.path();
  nlohmann::json no_function = function_problem();
  no_function["metadata"] = "{}";
  nlohmann::json bad_metadata = lcb_row("m", "2025-01-04");
  bad_metadata["metadata"] = "{";
  nlohmann::json no_tests = lcb_row("t", "2025-01-04");
  no_tests.erase("public_test_cases");
  no_tests.erase("private_test_cases");
  nlohmann::json given = lcb_row("p", "2025-01-04");
  given["prompt"] = "The whole prompt.";
  folder.write("lcb_v6/prompts.jsonl", no_function.dump() + "\n" + bad_metadata.dump() + "\n" +
                                           no_tests.dump() + "\n" + lcb_row("d", "soon").dump() +
                                           "\n" + given.dump() + "\n");
  const auto loaded = find_benchmark("lcb").value()->load(options);
  ASSERT_TRUE(loaded.ok());
  ASSERT_EQ(loaded.value().rows.size(), 1U);
  EXPECT_EQ(loaded.value().rows[0].messages[0].content, "The whole prompt.");
  ASSERT_EQ(loaded.value().problems.size(), 4U);
  EXPECT_NE(loaded.value().problems[0].what.find("names no function"), std::string::npos);
  EXPECT_EQ(loaded.value().problems[1].what, "'metadata' is not a JSON object");
}

TEST(Lcb, ScoresProgramsAndFunctions) {
  const auto sandbox = Sandbox::make("");
  if (!sandbox.ok()) GTEST_SKIP() << sandbox.status().message();
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = folder.path();
  folder.write("lcb_v6/prompts.jsonl",
               lcb_row("a", "2025-01-04").dump() + "\n" + function_problem().dump() + "\n");
  const Benchmark& benchmark = *find_benchmark("lcb").value();
  EXPECT_TRUE(benchmark.missing(options).empty());
  const auto rows = benchmark.load(options).value().rows;
  const auto score = [&](std::size_t row, const std::string& code) {
    const auto result = benchmark.score(
        rows[row], std::string("```python\n").append(code).append("\n```"), options);
    EXPECT_TRUE(result.ok()) << result.status().message();
    return result.ok() ? result.value() : Score();
  };
  const Score right = score(0, "a, b = map(int, input().split())\nprint(a + b)");
  EXPECT_EQ(right.value, 1.0) << right.why;
  EXPECT_EQ(right.detail["tests"], 2);
  // Names that lcb_runner imports, the main guard, exit.
  EXPECT_EQ(
      score(0,
            "def main():\n    print(sum(map(int, sys.stdin.buffer.read().split())))\n    exit()\n"
            "if __name__ == '__main__':\n    main()")
          .value,
      1.0);
  const Score wrong = score(0, "print(3)");
  EXPECT_EQ(wrong.value, 0.0);
  EXPECT_EQ(wrong.why, "test 2 of 2: wrong answer");
  EXPECT_EQ(wrong.detail["tests_passed"], 1);
  EXPECT_EQ(score(0, "print(1/0)").why, "test 1 of 2: failed: ZeroDivisionError: division by zero");
  // What a program says may be no text at all; it must fit into a record.
  const Score bytes = score(0, "import os\nos.write(2, b'\\xff\\xfe' * 300)\nos._exit(3)");
  EXPECT_NO_THROW((void)nlohmann::json(bytes.why).dump()) << bytes.why.size();
  EXPECT_NE(score(0, "x = (").why.find("SyntaxError"), std::string::npos);
  const Score method =
      score(1,
            "class Solution:\n    def add(self, a: int, b: List[int]) -> List[int]:\n"
            "        print('noise')\n        return tuple(a + x for x in b)");
  EXPECT_EQ(method.value, 1.0) << method.why;
  EXPECT_EQ(score(1, "def add(a, b):\n    return [a + x for x in b]").value, 1.0);
  EXPECT_EQ(score(1, "def add(a, b):\n    return None").why, "test 1 of 1: wrong answer");
  EXPECT_EQ(score(1, "class Solution:\n    pass").why,
            "test 1 of 1: failed: AttributeError: 'Solution' object has no attribute 'add'");
  EXPECT_EQ(benchmark.score(rows[0], "<think>```\nprint(3)\n```</think>", options).value().why,
            "no code between two fences outside the thinking part");
}

}  // namespace
}  // namespace bitdecoding::eval
