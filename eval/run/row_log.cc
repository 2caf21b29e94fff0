// SPDX-License-Identifier: Apache-2.0
#include "run/row_log.h"

#include <fmt/format.h>

#include "io/file.h"
#include "report/json_lines.h"

namespace bitdecoding::eval {

std::string row_log_path(const std::string& folder, const std::string& mode,
                         const std::string& benchmark) {
  return fmt::format("{}/rows/{}/{}.jsonl", folder, mode, benchmark);
}

void RowLog::keep(const RowRecord& record) {
  const auto [at, added] = place_.try_emplace(record.key, rows_.size());
  if (added) {
    rows_.push_back(record);
  } else {
    rows_[at->second] = record;
  }
}

Result<std::unique_ptr<RowLog>> RowLog::open(const std::string& path) {
  Result<JsonLines> lines = open_json_lines(path);
  if (!lines.ok()) return lines.status();
  std::unique_ptr<RowLog> log(new RowLog(path));
  log->dropped_ = lines.value().dropped;
  for (const nlohmann::json& line : lines.value().lines) {
    if (const std::optional<RowRecord> record = row_record(line)) {
      log->keep(*record);
    } else {
      ++log->dropped_;
    }
  }
  return log;
}

bool RowLog::finished(const std::string& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto at = place_.find(key);
  return at != place_.end() && rows_[at->second].error.empty();
}

Status RowLog::append(const RowRecord& record) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Status stored = append_json_line(path_, to_json(record));
  if (stored.ok()) keep(record);
  return stored;
}

std::vector<RowRecord> RowLog::rows() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return rows_;
}

Status RowLog::rewrite(const std::vector<RowRecord>& rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const RowRecord& row : rows) text += json_line(to_json(row));
  if (Status s = write_file_atomic(path_, text); !s.ok()) return s;
  rows_.clear();
  place_.clear();
  for (const RowRecord& row : rows) keep(row);
  return {};
}

Result<std::vector<RowRecord>> read_rows(const std::string& path) {
  Result<JsonLines> lines = read_json_lines(path);
  if (!lines.ok()) return lines.status();
  std::vector<RowRecord> rows;
  std::map<std::string, std::size_t> place;
  for (const nlohmann::json& line : lines.value().lines) {
    std::optional<RowRecord> record = row_record(line);
    if (!record) continue;
    const auto [at, added] = place.try_emplace(record->key, rows.size());
    if (added) {
      rows.push_back(std::move(*record));
    } else {
      rows[at->second] = std::move(*record);
    }
  }
  return rows;
}

}  // namespace bitdecoding::eval
