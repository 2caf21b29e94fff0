// SPDX-License-Identifier: Apache-2.0
// The demo's course: one server a mode, one after the other, every task asked of each, every
// result on the disk before the next begins.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "bitdecoding/status.h"
#include "demo/options.h"
#include "engine/launch.h"
#include "engine/server.h"
#include "report/progress.h"
#include "report/results_log.h"
#include "report/summary.h"
#include "tasks/document.h"
#include "tasks/plan.h"

namespace bitdecoding::eval {

class DemoRunner {
 public:
  DemoRunner(DemoOptions options, Progress* progress);

  // Runs, or finishes the newest unfinished run of the same settings.
  Status run();
  // What is measured so far.
  Summary summary() const;
  std::string report_path() const { return options_.out + "/report.html"; }
  // The key means in use; empty before calibration.
  const std::string& key_shift_file() const { return key_shift_file_; }

 private:
  Status check_surroundings() const;
  Status open_log();
  Status calibrate();
  Status observe_texts(Server* server, const std::string& path);
  Status run_mode(const std::string& mode);
  Status run_tasks(const std::string& mode, Server* server, const Client& client);
  Status measure_divergence(const std::string& mode, const Client& client);
  Result<std::unique_ptr<Server>> start_server(const std::string& mode, const CacheChoice& means);
  Status task(const std::string& mode, const std::string& name, const std::string& words,
              const std::function<Result<Json>()>& work);
  bool recorded(const std::string& mode, const std::string& name) const;
  Status record(const std::string& key, const Json& data);
  Json settings() const;
  std::string logits_path(const std::string& mode) const;
  bool compares_logits() const;
  bool baseline_captured() const;

  DemoOptions options_;
  Plan plan_;
  ServeSettings serve_;
  Progress* progress_;
  std::optional<ResultsLog> log_;
  std::optional<Document> document_;
  std::string fingerprint_;
  std::string run_;
  std::string key_shift_file_;
  Command last_command_;
};

}  // namespace bitdecoding::eval
