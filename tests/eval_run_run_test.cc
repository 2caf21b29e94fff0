// SPDX-License-Identifier: Apache-2.0
// Rows asked of a server that may answer anything.
#include <gtest/gtest.h>

#include <fstream>

#include "eval_run_fakes.h"
#include "run/local_host.h"

namespace bitdecoding::eval {
namespace {

struct Outcome {
  Status status;
  ModeProgress progress;
  std::vector<RowRecord> rows;
};

Outcome run_rows(FakeEngine* engine, const Benchmark& benchmark, ModeSettings settings) {
  const std::vector<PlannedBenchmark> plan = fake_plan(benchmark);
  ModeRun run(settings, engine, &plan);
  Status status = run.prepare();
  if (status.ok()) status = run.run({});
  return {status, run.progress(), recorded(settings.folder)};
}

// One row with this answer; the others are well.
Outcome run_with(const FakeEngine::Chat& chat, const std::string& folder, int attempts = 3) {
  FakeEngine engine;
  engine.on_chat = chat;
  const FakeBenchmark benchmark(4);
  ModeSettings settings = fake_settings(fresh_folder(folder));
  settings.attempts = attempts;
  return run_rows(&engine, benchmark, settings);
}

// Of row 2, of which `sentence` must be said; the other three have their scores.
void expect_one_error(const Outcome& outcome, const std::string& sentence) {
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  ASSERT_EQ(outcome.rows.size(), 4U);
  EXPECT_EQ(outcome.progress.errors, 1U);
  EXPECT_EQ(total_score(outcome.rows), 3.0);
  for (const RowRecord& row : outcome.rows) {
    if (row.row != "r2") {
      EXPECT_TRUE(row.scored());
      continue;
    }
    EXPECT_FALSE(row.scored());  // an error is no wrong answer
    EXPECT_NE(row.error.find(sentence), std::string::npos) << row.error;
  }
}

TEST(ModeRun, RecordsWhatTheServerSaidAndHowLongItTook) {
  FakeEngine engine;
  const FakeBenchmark benchmark(10);
  ModeSettings settings = fake_settings(fresh_folder("run-plain"));
  settings.concurrency = 4;
  const Outcome outcome = run_rows(&engine, benchmark, settings);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  ASSERT_EQ(outcome.rows.size(), 10U);
  EXPECT_EQ(total_score(outcome.rows), 10.0);
  const RowRecord& row = outcome.rows[0];
  EXPECT_EQ(row.finish_reason, "stop");
  EXPECT_FALSE(row.truncated);
  EXPECT_EQ(row.prompt_tokens, 7U);
  EXPECT_EQ(row.completion_tokens, row.reply.size());
  EXPECT_GT(row.first_token, 0.0);
  EXPECT_GE(row.latency, row.first_token);
  EXPECT_EQ(row.max_tokens, 16U);
  const Json body = engine.bodies()[0];
  EXPECT_EQ(body["temperature"], 0.0);
  EXPECT_EQ(body["model"], "m");
  EXPECT_TRUE(body.contains("seed"));
  EXPECT_FALSE(body.contains("top_k"));
}

TEST(ModeRun, WhatIsRecordedIsNotAskedAgainAndErrorsAre) {
  FakeEngine engine;
  engine.on_chat = [](const std::string& prompt, int, httplib::Response& out) {
    if (prompt != "prompt 2") return false;
    out.status = 400;
    return true;
  };
  const FakeBenchmark benchmark(4);
  const ModeSettings settings = fake_settings(fresh_folder("run-resume"));
  expect_one_error(run_rows(&engine, benchmark, settings), "status 400");
  engine.on_chat = {};
  const std::size_t asked = engine.bodies().size();
  const Outcome again = run_rows(&engine, benchmark, settings);
  EXPECT_EQ(again.progress.reused, 3U);
  EXPECT_EQ(engine.bodies().size(), asked + 1);
  EXPECT_EQ(total_score(again.rows), 4.0);
  const int starts = engine.starts;
  EXPECT_EQ(run_rows(&engine, benchmark, settings).progress.reused, 4U);
  EXPECT_EQ(engine.starts, starts);  // no engine for nothing
  ModeSettings other = settings;
  other.engine = "model bf16 with another recipe";
  EXPECT_EQ(run_rows(&engine, benchmark, other).progress.reused, 0U);
}

TEST(ModeRun, ARefusalIsAnErrorWithTheServersWordsAtOnce) {
  int asked = 0;
  expect_one_error(run_with(
                       [&](const std::string& prompt, int, httplib::Response& out) {
                         if (prompt != "prompt 2") return false;
                         ++asked;
                         out.status = 422;
                         out.set_content(R"({"error": {"message": "no such thing"}})",
                                         "application/json");
                         return true;
                       },
                       "run-4xx"),
                   "no such thing");
  EXPECT_EQ(asked, 1);
}

TEST(ModeRun, AServerErrorIsTriedAgain) {
  const auto broken = [](int until) {
    return [until](const std::string& prompt, int nth, httplib::Response& out) {
      if (prompt != "prompt 2" || nth > until) return false;
      out.status = 500;
      out.set_content("Internal Server Error", "text/plain");
      return true;
    };
  };
  const Outcome mended = run_with(broken(2), "run-5xx-mended");
  EXPECT_EQ(mended.progress.errors, 0U);
  EXPECT_EQ(total_score(mended.rows), 4.0);
  expect_one_error(run_with(broken(9), "run-5xx"), "3 attempts failed");
}

TEST(ModeRun, GarbageIsAnError) {
  for (const char* garbage :
       {"<html>hello</html>", "data: {\"choices\": 7}\n\n", "data: {not\n\n",
        "data: {\"choices\": [{\"delta\": 3, \"finish_reason\": 4}]}\n\n",
        "data: {\"choices\": [7]}\n\n", "", "\n\n\n", "data: \"\\ud800\"\n\n"}) {
    const Outcome outcome = run_with(
        [&](const std::string& prompt, int, httplib::Response& out) {
          if (prompt != "prompt 2") return false;
          out.set_content(garbage, "text/event-stream");
          return true;
        },
        "run-garbage");
    expect_one_error(outcome, "The server");
  }
}

TEST(ModeRun, AStreamThatStopsInTheMiddleIsAnErrorNotAShortAnswer) {
  const std::string whole = chat_stream("reply 2");
  for (const std::size_t length : {whole.size() / 3, whole.size() - 20}) {
    expect_one_error(run_with(
                         [&](const std::string& prompt, int, httplib::Response& out) {
                           if (prompt != "prompt 2") return false;
                           out.set_content(whole.substr(0, length), "text/event-stream");
                           return true;
                         },
                         "run-cut"),
                     "stopped before its end");
  }
}

TEST(ModeRun, AnErrorInTheMiddleOfAStreamCarriesItsWords) {
  expect_one_error(run_with(
                       [&](const std::string& prompt, int, httplib::Response& out) {
                         if (prompt != "prompt 2") return false;
                         out.set_content(
                             "data: {\"choices\": [{\"delta\": {\"content\": \"re\"}}]}\n\n"
                             "data: {\"error\": {\"message\": \"out of cache\"}}\n\n",
                             "text/event-stream");
                         return true;
                       },
                       "run-stream-error"),
                   "out of cache");
}

TEST(ModeRun, AServerThatHangsIsAnErrorAfterTheTimeout) {
  std::atomic<bool> over{false};
  const Outcome outcome = run_with(
      [&](const std::string& prompt, int, httplib::Response& out) {
        if (prompt != "prompt 2") return false;
        out.set_chunked_content_provider("text/event-stream", [&](std::size_t, httplib::DataSink&) {
          for (int i = 0; i < 300 && !over; ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          }
          return false;
        });
        return true;
      },
      "run-hang", 1);
  over = true;
  expect_one_error(outcome, "sent nothing for 2 s");
}

TEST(ModeRun, AnEngineThatEndsIsStartedAgainWithTheUnfinishedRows) {
  FakeEngine engine;
  engine.on_chat = [&](const std::string& prompt, int nth, httplib::Response& out) {
    if (!engine.alive) {
      out.status = 500;
      return true;
    }
    if (prompt != "prompt 1" || nth > 1) return false;
    engine.alive = false;
    out.status = 500;
    return true;
  };
  const FakeBenchmark benchmark(6);
  ModeSettings settings = fake_settings(fresh_folder("run-crash"));
  settings.concurrency = 2;
  const Outcome outcome = run_rows(&engine, benchmark, settings);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.message();
  EXPECT_EQ(engine.starts, 2);
  EXPECT_EQ(outcome.progress.errors, 0U);
  EXPECT_EQ(total_score(outcome.rows), 6.0);
}

TEST(ModeRun, ARowThatKillsEveryEngineBecomesAnErrorAndTheOthersAreAnswered) {
  FakeEngine engine;
  engine.on_chat = [&](const std::string& prompt, int, httplib::Response& out) {
    if (prompt != "prompt 2") return false;
    engine.alive = false;
    out.status = 500;
    return true;
  };
  const Outcome outcome =
      run_rows(&engine, FakeBenchmark(4), fake_settings(fresh_folder("run-poison")));
  expect_one_error(outcome, "The fake engine ended");
  EXPECT_EQ(engine.starts, 4);
}

TEST(ModeRun, AnEndpointThatGoesAwayEndsTheRunWithASentence) {
  FakeEngine engine;
  engine.restarts = false;
  engine.on_chat = [&](const std::string& prompt, int, httplib::Response& out) {
    if (prompt != "prompt 2") return false;
    engine.alive = false;
    out.status = 500;
    return true;
  };
  const Outcome outcome =
      run_rows(&engine, FakeBenchmark(4), fake_settings(fresh_folder("run-away")));
  EXPECT_FALSE(outcome.status.ok());
  EXPECT_NE(outcome.status.message().find("2 rows are not answered"), std::string::npos)
      << outcome.status.message();
  EXPECT_EQ(outcome.rows.size(), 2U);
}

TEST(ModeRun, APromptLongerThanTheWindowIsSkippedAndListed) {
  FakeEngine engine;
  engine.prompt_tokens = [](const std::string& prompt) { return prompt == "prompt 2" ? 100 : 95; };
  const FakeBenchmark benchmark(4);
  const Outcome outcome = run_rows(&engine, benchmark, fake_settings(fresh_folder("run-long")));
  ASSERT_EQ(outcome.rows.size(), 4U);
  EXPECT_EQ(outcome.progress.skipped, 1U);
  EXPECT_EQ(outcome.progress.errors, 0U);
  for (const RowRecord& row : outcome.rows) {
    EXPECT_EQ(row.skipped.empty(), row.row != "r2");
    // What the window leaves of 16.
    EXPECT_EQ(row.max_tokens, row.row == "r2" ? 0U : 5U);
  }
}

TEST(ModeRun, TheServersOwnWordThatAPromptIsTooLongCountsAsWell) {
  const Outcome outcome = run_with(
      [](const std::string& prompt, int, httplib::Response& out) {
        if (prompt != "prompt 2") return false;
        out.status = 400;
        out.set_content(
            R"({"error": {"message": "This model's maximum context length is 100 tokens."}})",
            "application/json");
        return true;
      },
      "run-too-long");
  EXPECT_EQ(outcome.progress.skipped, 1U);
  EXPECT_EQ(outcome.progress.errors, 0U);
}

TEST(ModeRun, ABudgetThatFillsTheWindowLeavesRoomForTheTemplate) {
  FakeEngine engine;
  engine.prompt_tokens = [](const std::string& prompt) { return prompt == "prompt 1" ? 800 : 600; };
  ModeSettings settings = fake_settings(fresh_folder("run-fill"));
  settings.load.model.window = 1000;
  const Outcome outcome = run_rows(&engine, FakeBenchmark(2, {0, true}), settings);
  ASSERT_EQ(outcome.rows.size(), 2U);
  for (const RowRecord& row : outcome.rows) {
    if (row.row == "r0") {
      EXPECT_EQ(row.max_tokens, 144U);
    } else {
      EXPECT_FALSE(row.skipped.empty());
    }
  }
}

TEST(ModeRun, ReplyThatTheBudgetCutIsCounted) {
  FakeEngine engine;
  engine.on_chat = [](const std::string&, int, httplib::Response& out) {
    out.set_content(chat_stream("reply 0 and so on", "length"), "text/event-stream");
    return true;
  };
  const Outcome outcome =
      run_rows(&engine, FakeBenchmark(1), fake_settings(fresh_folder("run-truncated")));
  ASSERT_EQ(outcome.rows.size(), 1U);
  EXPECT_TRUE(outcome.rows[0].truncated);
  EXPECT_TRUE(outcome.rows[0].scored());
}

TEST(ModeRun, ADiskThatIsFullEndsTheRun) {
  FakeEngine engine;
  const std::string folder = fresh_folder("run-disk");
  const FakeBenchmark benchmark(3);
  const std::vector<PlannedBenchmark> plan = fake_plan(benchmark);
  ModeRun run(fake_settings(folder), &engine, &plan);
  ASSERT_TRUE(run.prepare().ok());
  std::filesystem::remove(row_log_path(folder, "bf16", "fake"));
  std::filesystem::create_symlink("/dev/full", row_log_path(folder, "bf16", "fake"));
  const Status failed = run.run({});
  EXPECT_EQ(failed.code(), StatusCode::kIo);
  EXPECT_NE(failed.message().find("No space left"), std::string::npos) << failed.message();
}

// A folder keeps what other settings gave; a table is of one plan.
TEST(ModeRun, RecordsOfOtherSettingsAreNotOfThePlan) {
  FakeEngine engine;
  const FakeBenchmark benchmark(4);
  const std::string folder = fresh_folder("run-settings");
  ModeSettings settings = fake_settings(folder);
  run_rows(&engine, benchmark, settings);
  ModeSettings other = settings;
  other.engine = "another engine";
  const std::vector<PlannedBenchmark> plan = fake_plan(benchmark);
  EXPECT_TRUE(planned_records(other, plan[0]).value().empty());
  run_rows(&engine, benchmark, other);
  EXPECT_EQ(recorded(folder).size(), 8U);
  EXPECT_EQ(planned_records(settings, plan[0]).value().size(), 4U);
  EXPECT_EQ(planned_records(other, plan[0]).value().size(), 4U);
}

TEST(Rescore, GivesOtherScoresWithoutAnEngine) {
  FakeEngine engine;
  const FakeBenchmark benchmark(4);
  const std::string folder = fresh_folder("rescore");
  run_rows(&engine, benchmark, fake_settings(folder));
  const std::size_t asked = engine.bodies().size();
  LoadOptions load;
  load.compat = "halves";
  std::size_t rows = 0;
  ASSERT_TRUE(rescore(folder, "bf16", fake_plan(benchmark), load, &rows).ok());
  EXPECT_EQ(rows, 4U);
  EXPECT_EQ(total_score(recorded(folder)), 2.0);
  EXPECT_EQ(engine.bodies().size(), asked);
}

TEST(Facts, AreTheFirstOfTheEnginesLine) {
  const nlohmann::json facts = facts_in_log(
      "INFO Using AttentionBackendEnum.CPU_ATTN backend\n"
      "INFO CPU KV cache size: 46,592 tokens\n"
      "INFO bitdecoding 0.1.0: mode bitdecoding-nvfp4, pages nvfp4, backend cpu, ISA AMX, 2 "
      "threads, 72 bytes a token and KV head, capacity 46592 tokens in pages of 128, BF16 pool 3 "
      "slots of 16 tokens = 9 bytes in 30 layers, key means off, value means off, outer scales "
      "off, recipe of mode bf16\nnext line\n");
  EXPECT_EQ(facts.value("mode", ""), "bitdecoding-nvfp4");
  EXPECT_EQ(facts.value("pages", ""), "nvfp4");
  EXPECT_EQ(facts.value("backend", ""), "cpu");
  EXPECT_EQ(facts.value("bytes_per_token_head", 0.0), 72.0);
  EXPECT_EQ(facts.value("capacity_tokens", 0), 46592);
  EXPECT_TRUE(facts_in_log("no such line").empty());
}

TEST(Endpoint, IsReadOrRefusedWithASentence) {
  const auto base = [](const char* url) {
    const Result<Endpoint> parsed = parse_endpoint(url);
    return parsed.ok() ? parsed.value().base + parsed.value().prefix : parsed.status().message();
  };
  EXPECT_EQ(base("http://h:8000"), "http://h:8000");
  EXPECT_EQ(base("http://h:8000/v1/"), "http://h:8000");
  EXPECT_EQ(base("http://h/api/v1"), "http://h/api");
  for (const char* bad :
       {"h:8000", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h/v1?key=1"}) {
    EXPECT_NE(base(bad).find("expected http://HOST:PORT"), std::string::npos) << bad;
  }
}

}  // namespace
}  // namespace bitdecoding::eval
