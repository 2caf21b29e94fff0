// SPDX-License-Identifier: Apache-2.0
// A calibration from beginning to end: one vLLM server, key means first, then probabilities with
// the means applied; what is observed is on the disk after every prompt.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bitdecoding/recipe.h"
#include "bitdecoding/status.h"
#include "calibrate/corpus.h"
#include "calibrate/prompts.h"
#include "engine/launch.h"
#include "engine/server.h"
#include "io/calibration_identity.h"
#include "io/calibration_state.h"
#include "report/progress.h"

namespace bitdecoding::eval {

// Fewer tokens than this are refused: the mean of n tokens is off by about 1/sqrt(n) of the
// channel's spread, and neighbouring tokens are alike.
inline constexpr std::size_t kMinCorpusTokens = 1024;

struct CalibrateOptions {
  std::string program;  // bitdecoding
  std::string python;
  std::string model;  // a folder
  std::string data = "builtin";
  std::string out;  // default: MODEL/calibration
  Recipe recipe;
  std::string dtype;
  std::size_t tokens = 16384;
  std::size_t prompt_tokens = 2048;
  std::int64_t cache_bytes = std::int64_t{256} << 20;
  int threads = 1;
  int start_timeout = 600;
  bool force = false;
  bool measure_overhead = false;
};

// How far a calibration is: a bar, and what is left by the rate of the phase's own prompts.
class Remaining {
 public:
  // Tokens of each phase, in their order.
  explicit Remaining(const std::vector<std::size_t>& phase_tokens);
  void done(std::size_t phase, std::size_t tokens, double seconds);
  // Of the phases from `phase` on, less what is done; empty before anything was timed.
  std::optional<double> seconds_left(std::size_t phase) const;
  double share() const;
  // "[#####.....]  48 %  about 1 min 20 s left"; `since` seconds of the current prompt have gone.
  std::string words(std::size_t phase, double since) const;

 private:
  struct Phase {
    std::size_t tokens = 0;
    std::size_t done = 0;
    std::size_t timed = 0;  // done in this process
    double seconds = 0;
  };
  std::vector<Phase> phases_;
};

class CalibrateRunner {
 public:
  CalibrateRunner(CalibrateOptions options, Progress* progress);
  Status run();
  std::string sidecar_path() const { return options_.out + "/" + kCalibrationFile; }

 private:
  Status prepare();
  Status check_saved(bool* reuse);
  Status begin_or_resume();
  Status start_server();
  Status run_phase(std::size_t phase);
  Status run_prompt(std::size_t phase, std::size_t index);
  Status save_state(std::size_t phase, std::size_t done);
  Status set_phase(const std::string& phase);
  void report_non_finite(const Json& answers, const std::string& prompt);
  Result<CalibrationState> read_state() const;
  Status finish();
  void show(const KeyShift& sidecar) const;
  Identity identity() const;
  std::string folder() const { return options_.out + "/unfinished"; }
  std::string state_path() const { return folder() + "/state.safetensors"; }

  CalibrateOptions options_;
  Progress* progress_;
  std::vector<CalibrationText> texts_;
  std::vector<CalibrationPrompt> prompts_;
  Identity model_;
  std::string corpus_;
  std::string fingerprint_;
  std::vector<std::string> phases_;
  std::unique_ptr<Server> server_;
  std::optional<Client> client_;
  std::optional<Remaining> remaining_;
  std::map<std::string, std::pair<std::size_t, double>> timed_;  // phase -> tokens, seconds
  std::vector<std::pair<std::size_t, CalibrationState>> snapshots_;
  std::size_t first_phase_ = 0;  // where a resumed calibration goes on
  std::size_t first_prompt_ = 0;
  std::uint64_t skipped_rows_ = 0;
};

}  // namespace bitdecoding::eval
