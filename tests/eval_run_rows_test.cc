// SPDX-License-Identifier: Apache-2.0
// Records that survive whatever ends a run, and the plan of which rows are asked.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include "engine/folder_lock.h"
#include "eval_run_fakes.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

RowRecord example(const std::string& key) {
  RowRecord r;
  r.key = key;
  r.mode = "bf16";
  r.benchmark = "fake";
  r.row = "r1";
  r.reply = "a \"reply\"\nof two lines";
  r.score = 0.1;
  r.labels = {{"task", "x"}};
  return r;
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream out;
  out << file.rdbuf();
  return out.str();
}

TEST(RowLog, ARecordComesBackAsItWas) {
  const std::string path = fresh_folder("row-log") + "/a.jsonl";
  Result<std::unique_ptr<RowLog>> log = RowLog::open(path);
  ASSERT_TRUE(log.ok()) << log.status().message();
  ASSERT_TRUE(log.value()->append(example("k")).ok());
  const Result<std::unique_ptr<RowLog>> again = RowLog::open(path);
  ASSERT_TRUE(again.ok());
  ASSERT_EQ(again.value()->rows().size(), 1U);
  EXPECT_EQ(to_json(again.value()->rows()[0]), to_json(example("k")));
  EXPECT_TRUE(again.value()->finished("k"));
  EXPECT_FALSE(again.value()->finished("other"));
}

TEST(RowLog, ATornLastLineIsDroppedAndTheNextOneIsWhole) {
  const std::string path = fresh_folder("row-torn") + "/a.jsonl";
  {
    const Result<std::unique_ptr<RowLog>> log = RowLog::open(path);
    ASSERT_TRUE(log.value()->append(example("one")).ok());
    ASSERT_TRUE(log.value()->append(example("two")).ok());
  }
  const std::string whole = content(path);
  const std::size_t first = whole.find('\n') + 1;
  for (std::size_t cut = first; cut < whole.size(); cut += 7) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole.substr(0, cut);
    const Result<std::unique_ptr<RowLog>> log = RowLog::open(path);
    ASSERT_TRUE(log.ok());
    EXPECT_EQ(log.value()->rows().size(), 1U) << cut;
    EXPECT_EQ(log.value()->dropped_lines(), cut == first ? 0 : 1) << cut;
    ASSERT_TRUE(log.value()->append(example("two")).ok());
    EXPECT_EQ(content(path), whole) << cut;
  }
}

TEST(RowLog, ADamagedLineIsDroppedAndARepeatedKeyCountsOnce) {
  const std::string path = fresh_folder("row-damaged") + "/a.jsonl";
  const Result<std::unique_ptr<RowLog>> log = RowLog::open(path);
  ASSERT_TRUE(log.value()->append(example("one")).ok());
  std::string text = content(path);
  text[text.find("lines")] = 'X';
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text << "garbage\n[1]\n";
  ASSERT_TRUE(log.value()->append(example("two")).ok());
  RowRecord newer = example("two");
  newer.score = 1.0;
  ASSERT_TRUE(log.value()->append(newer).ok());
  const Result<std::unique_ptr<RowLog>> again = RowLog::open(path);
  ASSERT_EQ(again.value()->rows().size(), 1U);
  EXPECT_EQ(again.value()->rows()[0].score, 1.0);
  EXPECT_EQ(again.value()->dropped_lines(), 3);
}

TEST(RowLog, ARowInWhichTheEngineFailedIsNotFinished) {
  const Result<std::unique_ptr<RowLog>> log = RowLog::open(fresh_folder("row-error") + "/a.jsonl");
  RowRecord failed = example("k");
  failed.error = "The engine ended.";
  ASSERT_TRUE(log.value()->append(failed).ok());
  EXPECT_FALSE(log.value()->finished("k"));
}

TEST(RowLog, BytesThatAreNoUtf8AreKeptAsReplacements) {
  const std::string path = fresh_folder("row-utf8") + "/a.jsonl";
  const Result<std::unique_ptr<RowLog>> log = RowLog::open(path);
  RowRecord row = example("k");
  row.reply = "a\xff\xed\xa0\x80z";
  ASSERT_TRUE(log.value()->append(row).ok());
  const Result<std::unique_ptr<RowLog>> again = RowLog::open(path);
  ASSERT_EQ(again.value()->rows().size(), 1U);
  EXPECT_EQ(again.value()->rows()[0].reply.front(), 'a');
  EXPECT_EQ(again.value()->rows()[0].reply.back(), 'z');
}

// A file-size limit stands for a full disk: a part of the line is written, then nothing more.
TEST(RowLog, AFullDiskIsASentenceAndLeavesNoHalfLine) {
  const std::string path = fresh_folder("row-full") + "/a.jsonl";
  const Result<std::unique_ptr<RowLog>> log = RowLog::open(path);
  ASSERT_TRUE(log.value()->append(example("one")).ok());
  const std::string before = content(path);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  signal(SIGXFSZ, SIG_IGN);
  const rlimit tight{before.size() + 40, old.rlim_max};
  setrlimit(RLIMIT_FSIZE, &tight);
  const Status failed = log.value()->append(example("two"));
  setrlimit(RLIMIT_FSIZE, &old);
  EXPECT_EQ(failed.code(), StatusCode::kIo);
  EXPECT_NE(failed.message().find(path), std::string::npos) << failed.message();
  EXPECT_EQ(content(path), before);
  ASSERT_TRUE(log.value()->append(example("two")).ok());
  EXPECT_EQ(RowLog::open(path).value()->rows().size(), 2U);
}

TEST(RowLog, TwoRunsInOneFolderAreRefused) {
  const std::string folder = fresh_folder("row-lock");
  const Result<FolderLock> first = FolderLock::take(folder);
  ASSERT_TRUE(first.ok());
  const Result<FolderLock> second = FolderLock::take(folder);
  ASSERT_FALSE(second.ok());
  EXPECT_NE(second.status().message().find("another process is at work"), std::string::npos);
}

TEST(RowKey, EverythingThatDecidesAReplyIsInIt) {
  const Sampling greedy;
  const Json sampling = sampling_json(greedy, 1, 16);
  std::set<std::string> keys = {row_key("p", sampling, "e", 0),
                                row_key("q", sampling, "e", 0),
                                row_key("p", sampling, "f", 0),
                                row_key("p", sampling, "e", 1),
                                row_key("p", sampling_json(greedy, 2, 16), "e", 0),
                                row_key("p", sampling_json({0.6, 0.95, 20, 0.0}, 1, 16), "e", 0),
                                row_key("p", sampling_json(greedy, 1, 17), "e", 0)};
  EXPECT_EQ(keys.size(), 7U);
}

TEST(RowKey, SeedsDifferByRowAndRepeatOnly) {
  std::set<std::uint64_t> seeds;
  for (int repeat = 0; repeat < 10; ++repeat) {
    for (int row = 0; row < 100; ++row) {
      const std::uint64_t seed = row_seed(42, "aime", fmt::format("{}", row), repeat);
      EXPECT_LT(seed, std::uint64_t{1} << 31);
      seeds.insert(seed);
    }
  }
  EXPECT_EQ(seeds.size(), 1000U);
  EXPECT_NE(row_seed(42, "aime", "1", 0), row_seed(42, "aime25", "1", 0));
  EXPECT_NE(row_seed(42, "aime", "1", 0), row_seed(43, "aime", "1", 0));
}

TEST(Plan, AFewRowsAreSpreadOverTheGroups) {
  const FakeBenchmark benchmark(100);
  RowChoice choice;
  choice.rows = 6;
  choice.repeats = 2;
  const std::vector<PlannedBenchmark> plan = fake_plan(benchmark, choice);
  ASSERT_EQ(plan.size(), 1U);
  ASSERT_EQ(plan[0].rows.size(), 12U);
  int even = 0;
  std::set<std::uint64_t> seeds;
  for (const PlannedRow& row : plan[0].rows) {
    even += row.row.labels.at("task") == "even" ? 1 : 0;
    seeds.insert(row.seed);
  }
  EXPECT_EQ(even, 6);
  EXPECT_EQ(seeds.size(), 12U);
}

TEST(Plan, RowsWithProblemsStopAStrictRunOnly) {
  FakeBenchmark benchmark(3);
  benchmark.problems = {{"f.jsonl line 7", "has no prompt"}};
  EXPECT_EQ(fake_plan(benchmark)[0].problems.size(), 1U);
  RowChoice strict;
  strict.strict = true;
  const auto refused = plan_rows({&benchmark}, {}, strict);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("f.jsonl line 7: has no prompt"), std::string::npos);
  const FakeBenchmark empty(0);
  EXPECT_FALSE(plan_rows({&empty}, {}, {}).ok());
}

// What a run is, in a process of its own that the test kills.
constexpr const char* kFolderVariable = "BITDECODING_TEST_RUN_FOLDER";

TEST(KilledRun, DISABLED_Child) {
  const char* folder = std::getenv(kFolderVariable);
  ASSERT_NE(folder, nullptr);
  FakeEngine engine;
  const FakeBenchmark benchmark(40);
  const std::vector<PlannedBenchmark> plan = fake_plan(benchmark);
  ModeSettings settings = fake_settings(folder);
  settings.concurrency = 3;
  ModeRun run(settings, &engine, &plan);
  ASSERT_TRUE(run.prepare().ok());
  ASSERT_TRUE(run.run({}).ok());
}

pid_t start_child(const std::string& folder) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  setenv(kFolderVariable, folder.c_str(), 1);
  execl("/proc/self/exe", "child", "--gtest_also_run_disabled_tests",
        "--gtest_filter=KilledRun.DISABLED_Child", "--gtest_brief=1", nullptr);
  _exit(1);
}

TEST(KilledRun, LosesAtMostTheRowsInFlightAndEndsWithTheSameScores) {
  const std::string folder = fresh_folder("killed-run");
  std::mt19937 random(7);
  std::size_t before = 0;
  int status = -1;
  int kills = 0;
  for (int i = 0; i < 200 && status != 0; ++i) {
    const pid_t child = start_child(folder);
    // Killed at some moment after it has recorded a few more rows than there were.
    const std::size_t wanted = before + 1 + random() % 3;
    while (recorded(folder).size() < wanted && waitpid(child, &status, WNOHANG) == 0) {
      usleep(200 + random() % 1500);
    }
    if (kill(child, SIGKILL) == 0 && waitpid(child, &status, 0) == child) ++kills;
    const std::vector<RowRecord> rows = recorded(folder);
    ASSERT_GE(rows.size(), before);  // nothing that was recorded is lost
    before = rows.size();
  }
  EXPECT_EQ(status, 0);
  EXPECT_GE(kills, 8);
  const std::vector<RowRecord> rows = recorded(folder);
  ASSERT_EQ(rows.size(), 40U);
  EXPECT_EQ(total_score(rows), 40.0);
  std::set<std::string> keys;
  for (const RowRecord& row : rows) keys.insert(row.key);
  EXPECT_EQ(keys.size(), 40U);
}

}  // namespace
}  // namespace bitdecoding::eval
