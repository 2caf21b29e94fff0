// SPDX-License-Identifier: Apache-2.0
// All seven benchmarks over one made-up data folder: each loads, names its broken line and scores.
#include "eval_bench_data.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <set>

#include "benchmarks/benchmark.h"
#include "benchmarks/lcb/sandbox.h"

namespace bitdecoding::eval {
namespace {

TEST(MadeUpData, AllSevenLoadAndScore) {
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = write_made_up_data(folder);
  options.model.window = 131072;
  const std::map<std::string, std::string> right = {
      {"l1", "[Answer]\nDocument 2\nDocument 1"},
      {"l2", "[Answer]\nThe river"},
      {"60", "\\boxed{2}"},
      {"0", "\\boxed{4}"},
      {"0/Qx7", "Qx7Mill, turn."},
      {"4096/single_1/0", "1234567"},
      {"abc", "```python\nprint(sum(map(int, input().split())))\n```"}};
  for (const auto& benchmark : all_benchmarks()) {
    const auto loaded = benchmark->load(options);
    ASSERT_TRUE(loaded.ok()) << benchmark->name() << loaded.status().message();
    ASSERT_EQ(loaded.value().problems.size(), 1U) << benchmark->name();
    EXPECT_NE(loaded.value().problems[0].where.find(" line "), std::string::npos);
    ASSERT_EQ(loaded.value().files.size(), 1U);
    std::set<std::string> ids;
    for (const BenchmarkRow& row : loaded.value().rows) {
      EXPECT_TRUE(ids.insert(row.id).second);
      EXPECT_FALSE(row.messages.empty());
      EXPECT_EQ(row.messages.back().role, "user");
      if (benchmark->name() == "lcb" && !Sandbox::make("").ok()) continue;
      std::string reply = "Answer: ";
      if (benchmark->name() == "gpqa") {
        reply += row.reference.get<std::string>();
      } else if (right.count(row.id) != 0) {
        reply = right.at(row.id);
      }
      const auto score = benchmark->score(row, reply, options);
      ASSERT_TRUE(score.ok()) << score.status().message();
      EXPECT_TRUE(score.value().missing || score.value().value == 1.0)
          << benchmark->name() << " " << row.id << " " << score.value().why;
      EXPECT_EQ(benchmark->score(row, "I do not know.", options).value().value, 0.0);
    }
    EXPECT_EQ(benchmark->name() == "longbench_pro" ? 3U : 1U, loaded.value().rows.size());
  }
}

TEST(MadeUpData, AnEmptyFolderLacksEverything) {
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = folder.path();
  std::vector<const Benchmark*> all;
  for (const auto& benchmark : all_benchmarks()) {
    all.push_back(benchmark.get());
    EXPECT_EQ(benchmark->load(options).status().code(), StatusCode::kNotFound) << benchmark->name();
  }
  std::set<std::string> whats;
  std::size_t files = 0;
  for (const MissingItem& item : missing_for(all, options)) {
    EXPECT_TRUE(whats.insert(item.what).second) << item.what;
    EXPECT_FALSE(item.how.empty());
    if (item.what.starts_with("data ")) {
      ++files;
      EXPECT_FALSE(item.licence.empty()) << item.what;
      EXPECT_FALSE(item.optional);
    }
  }
  EXPECT_EQ(files, 7U);
  // Only of those that are asked for.
  EXPECT_EQ(missing_for({find_benchmark("gpqa").value()}, options).size(), 1U);
}

TEST(MadeUpData, TenThousandRowsAreScoredInASecond) {
  const TemporaryFolder folder;
  LoadOptions options;
  options.data_folder = write_made_up_data(folder);
  const std::string reply =
      "<think>" + std::string(4000, 'x') + "</think> It is \\boxed{2}. [Answer]\nDocument 1\n";
  for (const auto& benchmark : all_benchmarks()) {
    if (benchmark->name() == "lcb") continue;
    const BenchmarkRow row = benchmark->load(options).value().rows[0];
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 1000; ++i) ASSERT_TRUE(benchmark->score(row, reply, options).ok());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    RecordProperty(std::string(benchmark->name()), std::to_string(1000 / took.count()));
    // A tenth of a second for a tenth of them; four times that on a machine that is busy.
    EXPECT_LT(took.count(), 0.4) << benchmark->name();
  }
}

}  // namespace
}  // namespace bitdecoding::eval
