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

void RowLog::keep(RowRecord record) {
  const auto [at, added] = place_.try_emplace(record.key, rows_.size());
  if (added) {
    rows_.push_back(std::move(record));
  } else {
    rows_[at->second] = std::move(record);
  }
}

void RowLog::keep_all(const JsonLines& lines) {
  dropped_ = lines.dropped;
  for (const nlohmann::json& line : lines.lines) {
    if (std::optional<RowRecord> record = row_record(line)) {
      keep(std::move(*record));
    } else {
      ++dropped_;
    }
  }
}

Result<std::unique_ptr<RowLog>> RowLog::open(const std::string& path) {
  Result<JsonLines> lines = open_json_lines(path);
  if (!lines.ok()) return lines.status();
  std::unique_ptr<RowLog> log(new RowLog(path));
  log->keep_all(lines.value());
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

Result<std::vector<RowRecord>> RowLog::read(const std::string& path) {
  const Result<JsonLines> lines = read_json_lines(path);
  if (!lines.ok()) return lines.status();
  RowLog log(path);
  log.keep_all(lines.value());
  return std::move(log.rows_);
}

}  // namespace bitdecoding::eval
