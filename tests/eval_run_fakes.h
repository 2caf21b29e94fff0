// SPDX-License-Identifier: Apache-2.0
// A benchmark of a few rows, a server that answers as a test says, and an engine that can end.
#pragma once

#include <fmt/format.h>
#include <httplib.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/client.h"
#include "run/mode_run.h"

namespace bitdecoding::eval {

// Row i asks "prompt i"; the right reply is "reply i".
class FakeBenchmark : public Benchmark {
 public:
  explicit FakeBenchmark(int rows, Budget budget = {16, false}) : rows_(rows), budget_(budget) {}
  std::string_view name() const override { return "fake"; }
  std::string_view title() const override { return "Fake"; }
  std::vector<MissingItem> missing(const LoadOptions&) const override { return {}; }
  Result<LoadedRows> load(const LoadOptions&) const override {
    LoadedRows out;
    for (int i = 0; i < rows_; ++i) {
      BenchmarkRow row;
      row.id = fmt::format("r{}", i);
      row.messages = {{"user", fmt::format("prompt {}", i)}};
      row.reference = fmt::format("reply {}", i);
      row.labels = {{"task", i % 2 == 0 ? "even" : "odd"}};
      out.rows.push_back(row);
    }
    out.problems = problems;
    return out;
  }
  Sampling sampling(const ModelTraits&) const override { return {}; }
  Budget budget(const ModelTraits&) const override { return budget_; }
  Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                      const LoadOptions& options) const override {
    Score out;
    out.value = reply == row.reference.get<std::string>() ? 1.0 : 0.0;
    if (options.compat == "halves") out.value /= 2;
    out.extracted = reply;
    return out;
  }
  std::vector<std::string> groups() const override { return {"task"}; }

  std::vector<RowProblem> problems;

 private:
  int rows_;
  Budget budget_;
};

inline std::string chat_stream(const std::string& text, const char* finish = "stop") {
  std::string out;
  for (const char c : text) {
    out += "data: " + Json{{"choices", {{{"delta", {{"content", std::string(1, c)}}}}}}}.dump() +
           "\n\n";
  }
  out += "data: " +
         Json{{"choices", {{{"delta", Json::object()}, {"finish_reason", finish}}}}}.dump() +
         "\n\n";
  out += "data: " +
         Json{{"choices", Json::array()},
              {"usage", {{"prompt_tokens", 7}, {"completion_tokens", text.size()}}}}
             .dump() +
         "\n\ndata: [DONE]\n\n";
  return out;
}

// "reply i" to "prompt i" unless `on_chat` answers first.
class FakeEngine : public EngineHost {
 public:
  using Chat = std::function<bool(const std::string& prompt, int nth, httplib::Response& out)>;

  FakeEngine() {
    port_ = server_.bind_to_any_port("127.0.0.1");
    server_.new_task_queue = [] { return new httplib::ThreadPool(16); };
    server_.Get("/v1/models", [](const httplib::Request&, httplib::Response& out) {
      out.set_content(R"({"data": [{"id": "m", "max_model_len": 100}]})", "application/json");
    });
    server_.Post("/tokenize", [this](const httplib::Request& in, httplib::Response& out) {
      const std::string prompt = Json::parse(in.body)["messages"][0]["content"];
      const std::size_t count = prompt_tokens ? prompt_tokens(prompt) : 7;
      out.set_content(Json{{"count", count}}.dump(), "application/json");
    });
    server_.Post("/v1/chat/completions",
                 [this](const httplib::Request& in, httplib::Response& out) {
                   const Json body = Json::parse(in.body);
                   const std::string prompt = body["messages"][0]["content"];
                   int nth = 0;
                   {
                     const std::lock_guard<std::mutex> lock(mutex_);
                     nth = ++asked_[prompt];
                     bodies_.push_back(body);
                   }
                   if (on_chat && on_chat(prompt, nth, out)) return;
                   out.set_content(chat_stream("reply" + prompt.substr(6)), "text/event-stream");
                 });
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ~FakeEngine() override {
    server_.stop();
    thread_.join();
  }

  Result<Endpoint> up() override {
    ++starts;
    alive = true;
    return loopback(port_);
  }
  bool running() override { return alive; }
  std::string explain_end() override { return "The fake engine ended."; }
  void down() override { alive = false; }
  bool can_restart() const override { return restarts; }
  Json facts() override { return {}; }

  int port() const { return port_; }
  std::vector<Json> bodies() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return bodies_;
  }

  Chat on_chat;
  std::function<std::size_t(const std::string&)> prompt_tokens;
  std::atomic<bool> alive{false};
  bool restarts = true;
  int starts = 0;

 private:
  httplib::Server server_;
  std::thread thread_;
  std::mutex mutex_;
  std::map<std::string, int> asked_;
  std::vector<Json> bodies_;
  int port_ = 0;
};

inline std::string fresh_folder(const std::string& name) {
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("{}-{}", name, getpid())).string();
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

inline ModeSettings fake_settings(const std::string& folder) {
  ModeSettings settings;
  settings.mode = "bf16";
  settings.engine = "model bf16";
  settings.folder = folder;
  settings.silence = std::chrono::seconds(2);
  settings.pause = std::chrono::milliseconds(1);
  return settings;
}

inline std::vector<PlannedBenchmark> fake_plan(const Benchmark& benchmark, RowChoice choice = {}) {
  Result<std::vector<PlannedBenchmark>> plan = plan_rows({&benchmark}, {}, choice);
  return plan.ok() ? plan.take() : std::vector<PlannedBenchmark>{};
}

inline std::vector<RowRecord> recorded(const std::string& folder) {
  Result<std::vector<RowRecord>> rows = RowLog::read(row_log_path(folder, "bf16", "fake"));
  return rows.ok() ? rows.take() : std::vector<RowRecord>{};
}

inline double total_score(const std::vector<RowRecord>& rows) {
  double sum = 0.0;
  for (const RowRecord& row : rows) sum += row.score;
  return sum;
}

}  // namespace bitdecoding::eval
