// SPDX-License-Identifier: Apache-2.0
// All rows of a run in one mode: asked, scored, recorded; what is recorded already is skipped.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/chat.h"
#include "run/host.h"
#include "run/plan.h"
#include "run/row_log.h"

namespace bitdecoding::eval {

struct ModeSettings {
  std::string mode;
  std::string engine;  // goes into every row's key: model and mode to the last setting
  std::string folder;  // of the run
  std::string model;   // as the server calls it; empty: the one that it serves
  LoadOptions load;
  std::size_t most_new_tokens = 0;
  int concurrency = 1;
  std::chrono::seconds silence{900};
  int attempts = 3;                       // of a row, before it is recorded as an error
  std::chrono::milliseconds pause{1000};  // before another attempt
};

struct ModeProgress {
  std::size_t done = 0, total = 0, errors = 0, skipped = 0, reused = 0;
  std::size_t tokens_out = 0, tokens_in = 0;
  double seconds = 0.0;
  std::string benchmark;
};

class ModeRun {
 public:
  ModeRun(ModeSettings settings, EngineHost* host, const std::vector<PlannedBenchmark>* plan)
      : settings_(std::move(settings)), host_(host), plan_(plan) {}

  // Opens the records and finds out what is left to do; before the engine is started.
  Status prepare();
  std::size_t rows_left() const { return queue_.size(); }
  // Asks what is left. `progress` is called about five times a second from the calling thread.
  // An interruption is no error: `interrupted()` says so. An error is the engine's that does not
  // start, or the disk's.
  Status run(const std::function<void(const ModeProgress&)>& progress);
  const ModeProgress& progress() const { return progress_; }

 private:
  struct Job {
    const PlannedBenchmark* benchmark;
    const PlannedRow* row;
    std::string key;
    int attempts = 0;
    std::string last_error;
  };
  enum class Turn { kDone, kAgain, kEngineGone, kStopped };

  void work(ChatClient* client);
  Turn take(ChatClient* client, Job* job);
  RowRecord begin_record(const Job& job) const;
  // Tokens that the reply may have; 0 and a reason when the prompt leaves no room.
  std::size_t room_for(ChatClient* client, const Job& job, const nlohmann::json& messages,
                       RowRecord* record) const;
  void score(const Job& job, RowRecord* record) const;
  void store(const Job& job, RowRecord record);
  Status run_engine(const std::function<void(const ModeProgress&)>& progress);

  ModeSettings settings_;
  EngineHost* host_;
  const std::vector<PlannedBenchmark>* plan_;
  std::map<std::string, std::unique_ptr<RowLog>> logs_;
  std::mutex mutex_;  // of all below
  std::deque<Job> queue_;
  ModeProgress progress_;
  Status failed_;
  bool gone_ = false;
  std::chrono::steady_clock::time_point begun_;
};

// The records of a planned benchmark's rows, as far as there are any: a folder may hold those of
// other settings, too.
Result<std::vector<RowRecord>> planned_records(const ModeSettings& settings,
                                               const PlannedBenchmark& planned);

// Scores the recorded replies anew, without an engine; rows of other files are left as they are.
Status rescore(const std::string& folder, const std::string& mode,
               const std::vector<PlannedBenchmark>& plan, const LoadOptions& load,
               std::size_t* rows);

}  // namespace bitdecoding::eval
