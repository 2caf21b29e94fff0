// SPDX-License-Identifier: Apache-2.0
// The rows of one mode and benchmark on the disk: FOLDER/rows/MODE/BENCHMARK.jsonl, in the form of
// report/json_lines.h. The newest line of a key counts.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bitdecoding/status.h"
#include "report/json_lines.h"
#include "run/row_record.h"

namespace bitdecoding::eval {

std::string row_log_path(const std::string& folder, const std::string& mode,
                         const std::string& benchmark);

class RowLog {
 public:
  static Result<std::unique_ptr<RowLog>> open(const std::string& path);
  // The rows alone, without mending: of a run that may still go on. No file is no rows.
  static Result<std::vector<RowRecord>> read(const std::string& path);

  // A row that is there and needs no other attempt: one in which the engine failed does.
  bool finished(const std::string& key) const;
  // From any thread; on the disk when it returns.
  Status append(const RowRecord& record);
  // The newest record of every key in the order of the keys' first appearance.
  std::vector<RowRecord> rows() const;
  // Replaces the file by one line a key, in one step.
  Status rewrite(const std::vector<RowRecord>& rows);
  int dropped_lines() const { return dropped_; }

 private:
  explicit RowLog(std::string path) : path_(std::move(path)) {}
  void keep(RowRecord record);
  void keep_all(const JsonLines& lines);

  std::string path_;
  mutable std::mutex mutex_;
  std::vector<RowRecord> rows_;
  std::map<std::string, std::size_t> place_;
  int dropped_ = 0;
};

}  // namespace bitdecoding::eval
