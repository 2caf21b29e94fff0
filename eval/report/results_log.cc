// SPDX-License-Identifier: Apache-2.0
#include "report/results_log.h"

#include <ctime>

#include "report/json_lines.h"

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

Json to_json(const Record& record) {
  return {{"run", record.run},
          {"fingerprint", record.fingerprint},
          {"key", record.key},
          {"time", record.time},
          {"data", record.data}};
}

std::optional<Record> read_record(const Json& line) {
  for (const char* key : {"run", "fingerprint", "key", "time"}) {
    if (!line.contains(key) || !line[key].is_string()) return std::nullopt;
  }
  return Record{line["run"], line["fingerprint"], line["key"], line["time"],
                line.value("data", Json())};
}

}  // namespace

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

Result<ResultsLog> ResultsLog::open(const std::string& path) {
  Result<JsonLines> lines = open_json_lines(path);
  if (!lines.ok()) return lines.status();
  ResultsLog log(path);
  log.dropped_lines_ = lines.value().dropped;
  for (const Json& line : lines.value().lines) {
    std::optional<Record> record = read_record(line);
    if (record.has_value()) {
      log.records_.push_back(std::move(*record));
    } else {
      ++log.dropped_lines_;
    }
  }
  return log;
}

Status ResultsLog::append(const Record& record) {
  Status stored = append_json_line(path_, to_json(record));
  if (stored.ok()) records_.push_back(record);
  return stored;
}

std::optional<Record> ResultsLog::find(const std::string& run, const std::string& key) const {
  for (auto record = records_.rbegin(); record != records_.rend(); ++record) {
    if (record->run == run && record->key == key) return *record;
  }
  return std::nullopt;
}

std::optional<std::string> ResultsLog::unfinished_run(const std::string& fingerprint) const {
  if (records_.empty()) return std::nullopt;
  const Record& last = records_.back();
  if (last.fingerprint != fingerprint || last.key == kRunEnd) return std::nullopt;
  return last.run;
}

}  // namespace bitdecoding::eval
