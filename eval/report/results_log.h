// SPDX-License-Identifier: Apache-2.0
// The demo's memory: a line of json_lines.h a result, on the disk before the next task begins.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bitdecoding/status.h"
#include "report/json_lines.h"

namespace bitdecoding::eval {

struct Record {
  std::string run;          // the run's name: when it began
  std::string fingerprint;  // of everything that decides the results
  std::string key;          // "bf16/kl"; "end" closes a run
  std::string time;         // UTC
  nlohmann::json data;
};

class ResultsLog {
 public:
  // Opens or creates `path` and reads what is whole.
  static Result<ResultsLog> open(const std::string& path);

  // On the disk when it returns.
  Status append(const Record& record);
  // The newest record of a run with this key.
  std::optional<Record> find(const std::string& run, const std::string& key) const;
  // The newest run, when it has this fingerprint and no end.
  std::optional<std::string> unfinished_run(const std::string& fingerprint) const;

  const std::vector<Record>& records() const { return records_; }
  int dropped_lines() const { return dropped_lines_; }

 private:
  explicit ResultsLog(std::string path) : path_(std::move(path)) {}

  std::string path_;
  std::vector<Record> records_;
  int dropped_lines_ = 0;
};

inline constexpr const char* kRunEnd = "end";

std::string utc_now();

}  // namespace bitdecoding::eval
