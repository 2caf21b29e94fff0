// SPDX-License-Identifier: Apache-2.0
// The protocol's table, the list of benchmarks, thinking parts, and data files with their traps.
#include <gtest/gtest.h>

#include "benchmarks/benchmark.h"
#include "benchmarks/data_file.h"
#include "eval_bench_files.h"

namespace bitdecoding::eval {
namespace {

const Benchmark& benchmark(std::string_view name) { return *find_benchmark(name).value(); }

TEST(Protocol, NamesInTheOrderOfTheTable) {
  std::vector<std::string> names;
  for (const auto& each : all_benchmarks()) names.emplace_back(each->name());
  EXPECT_EQ(names, (std::vector<std::string>{"longbench_pro", "mrcr", "aime", "aime25", "lcb",
                                             "ruler_niah", "gpqa"}));
  const Status status = find_benchmark("ruler").status();
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  EXPECT_NE(status.message().find("ruler_niah"), std::string::npos);
}

TEST(Protocol, BudgetsFollowTheWindow) {
  const ModelTraits narrow{Family::kQwen, true, 40960};
  const ModelTraits wide{Family::kQwen, true, 131072};
  EXPECT_EQ(benchmark("aime").budget(narrow).max_new_tokens, 38912U);
  EXPECT_EQ(benchmark("aime25").budget(wide).max_new_tokens, 81920U);
  EXPECT_EQ(benchmark("lcb").budget(narrow).max_new_tokens, 39168U);
  EXPECT_EQ(benchmark("lcb").budget(wide).max_new_tokens, 81920U);
  EXPECT_EQ(benchmark("gpqa").budget(narrow).max_new_tokens, 81920U);
  EXPECT_EQ(benchmark("ruler_niah").budget(wide).max_new_tokens, 8192U);
  for (const auto& each : all_benchmarks()) {
    const bool long_prompts = each->name() == "mrcr" || each->name() == "longbench_pro";
    EXPECT_EQ(each->budget(wide).fill_window, long_prompts) << each->name();
    EXPECT_FALSE(each->budget({Family::kQwen, false, 131072}).fill_window) << each->name();
  }
  EXPECT_EQ(benchmark("mrcr").budget({Family::kQwen, false, 131072}).max_new_tokens, 4096U);
}

TEST(Protocol, GreedyOrSampled) {
  const ModelTraits plain{Family::kQwen, false, 131072};
  const ModelTraits thinks{Family::kQwen, true, 131072};
  EXPECT_EQ(benchmark("mrcr").sampling(plain).temperature, 0.0);
  EXPECT_EQ(benchmark("mrcr").sampling(plain).top_p, 1.0);
  EXPECT_EQ(benchmark("longbench_pro").sampling(thinks).temperature, 0.6);
  for (const char* name : {"aime", "aime25", "lcb", "ruler_niah", "gpqa"}) {
    const Sampling qwen = benchmark(name).sampling(plain);
    EXPECT_EQ(qwen.temperature, 0.6) << name;
    EXPECT_EQ(qwen.top_p, 0.95) << name;
    EXPECT_EQ(qwen.top_k, 20) << name;
    EXPECT_EQ(qwen.min_p, 0.0) << name;
    const Sampling glm = benchmark(name).sampling({Family::kGlm, true, 131072});
    EXPECT_EQ(glm.temperature, 1.0) << name;
    EXPECT_EQ(glm.top_p, 0.95) << name;
    EXPECT_EQ(glm.top_k, 0) << name;
  }
}

TEST(Protocol, TheFamilyIsTheConfigsWord) {
  EXPECT_EQ(family_of(R"({"model_type": "glm4_moe"})", "whatever"), Family::kGlm);
  EXPECT_EQ(family_of(R"({"model_type": "qwen3"})", "zai-org/GLM-4.5"), Family::kQwen);
  EXPECT_EQ(family_of("", "zai-org/GLM-4.5"), Family::kGlm);
  EXPECT_EQ(family_of("", "Qwen/Qwen3-4B"), Family::kQwen);
}

TEST(Thinking, IsRemoved) {
  EXPECT_EQ(without_thinking("<think>A</think> Answer: C"), " Answer: C");
  EXPECT_EQ(without_thinking("A</think>C"), "C");  // the template opened it
  EXPECT_EQ(without_thinking("<think>A never ends"), "");
  EXPECT_EQ(without_thinking("plain"), "plain");
  EXPECT_EQ(without_thinking("a</think>b<think>c"), "b");
  EXPECT_EQ(without_thinking("<think>a</think>b</think>c"), "c");
  const ModelTraits thinks{Family::kQwen, true, 0};
  EXPECT_EQ(answer_of("the box is \\boxed{3} but wait", thinks), "");
  EXPECT_EQ(answer_of("hm</think>3", thinks), "3");
  EXPECT_EQ(answer_of("3", {}), "3");
}

TEST(DataFile, LinesAndTheirProblems) {
  const TemporaryFolder folder;
  const std::string path = folder.write("rows.jsonl",
                                        "\xef\xbb\xbf{\"a\": 1}\r\n"
                                        "\r\n"
                                        "{\"a\": 2}\n"
                                        "{\"a\": \n"
                                        "[1]\n"
                                        "{\"a\": \"\\ud800\"}\n"
                                        "{\"a\": \"\xff\"}\n"
                                        "{\"a\": 3}");
  Problems problems;
  std::vector<int> values;
  std::vector<DataLine> lines;
  ASSERT_TRUE(read_lines(path, problems, [&](DataLine& line) { lines.push_back(line); }).ok());
  for (const DataLine& line : lines) values.push_back(line.value["a"].get<int>());
  EXPECT_EQ(values, (std::vector<int>{1, 2, 3}));
  ASSERT_EQ(problems.size(), 4U);
  EXPECT_EQ(problems[0].where, path + " line 4");
  EXPECT_EQ(problems[1].what, "is a list, not an object {...}");
  EXPECT_NE(problems[2].what.find("surrogate"), std::string::npos) << problems[2].what;
  EXPECT_NE(problems[3].what.find("UTF-8"), std::string::npos) << problems[3].what;
  for (const DataLine& line : lines) {
    EXPECT_EQ(read_line_at(path, line.offset, line.bytes).value(), line.value);
  }
  EXPECT_EQ(read_line_at(path, 1000, 10).status().code(), StatusCode::kIo);
  EXPECT_EQ(read_lines(path + "x", problems, [](DataLine&) {}).code(), StatusCode::kNotFound);
}

TEST(DataFile, FieldsUnderSeveralNames) {
  DataLine line;
  line.where = "f line 1";
  line.value = {{"Problem", "p"}, {"Answer", 42.0}, {"n", 2}, {"empty", ""}, {"list", {1}}};
  Fields good(line);
  EXPECT_EQ(good.text({"problem", "Problem"}), "p");
  EXPECT_EQ(good.scalar({"answer", "Answer"}), "42");
  EXPECT_EQ(good.integer({"n"}), 2);
  EXPECT_EQ(good.optional_text({"absent"}), "");
  EXPECT_TRUE(good.ok());
  Fields absent(line);
  absent.text({"question", "query"});
  EXPECT_EQ(absent.problem().what, "has no field 'question' or 'query'");
  Fields empty(line);
  empty.text({"empty"});
  EXPECT_EQ(empty.problem().what, "'empty' is empty");
  Fields kind(line);
  kind.text({"list"});
  kind.integer({"Problem"});
  EXPECT_EQ(kind.problem().what, "'list' is a list, not a string");
}

TEST(DataFile, IdsAreUnique) {
  const TemporaryFolder folder;
  const std::string path =
      folder.write("rows.jsonl", "{\"id\":\"a\"}\n{\"id\":\"a\"}\n{}\n{\"id\":\"b\"}\n");
  LoadedRows loaded;
  const auto row = [](const DataLine&, Fields& fields) {
    BenchmarkRow out;
    out.id = fields.text({"id"});
    return out;
  };
  ASSERT_TRUE(read_rows(path, loaded, row).ok());
  ASSERT_EQ(loaded.rows.size(), 2U);
  ASSERT_EQ(loaded.problems.size(), 2U);
  EXPECT_EQ(loaded.problems[0].what, "has the id 'a' of " + path + " line 1");
  EXPECT_EQ(loaded.problems[1].what, "has no field 'id'");
  LoadedRows none;
  const Status status = read_rows(folder.write("none.jsonl", "{}\n"), none, row);
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_NE(status.message().find("line 1 has no field 'id'"), std::string::npos);
}

}  // namespace
}  // namespace bitdecoding::eval
