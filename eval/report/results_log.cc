// SPDX-License-Identifier: Apache-2.0
#include "report/results_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

Json unsigned_line(const Record& record) {
  return {{"run", record.run},
          {"fingerprint", record.fingerprint},
          {"key", record.key},
          {"time", record.time},
          {"data", record.data}};
}

std::optional<Record> read_line(const std::string& text) {
  Json line = Json::parse(text, nullptr, false);
  if (!line.is_object() || !line.contains("sum") || !line["sum"].is_string()) return std::nullopt;
  const std::string sum = line["sum"].get<std::string>();
  line.erase("sum");
  if (stable_hash(line.dump()) != sum) return std::nullopt;
  for (const char* key : {"run", "fingerprint", "key", "time"}) {
    if (!line.contains(key) || !line[key].is_string()) return std::nullopt;
  }
  return Record{line["run"], line["fingerprint"], line["key"], line["time"], line["data"]};
}

Status io_error(const std::string& path, const std::string& what) {
  return {StatusCode::kIo,
          fmt::format("Cannot {} the results log {}: {}.", what, path, std::strerror(errno))};
}

}  // namespace

std::string stable_hash(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const char c : text) {
    hash ^= static_cast<std::uint8_t>(c);
    hash *= 0x100000001b3ULL;
  }
  return fmt::format("{:016x}", hash);
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

Result<ResultsLog> ResultsLog::open(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  ResultsLog log(path);
  const int handle = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (handle < 0) return io_error(path, "open");
  close(handle);
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    if (end == begin) continue;
    std::optional<Record> record = read_line(text.substr(begin, end - begin));
    if (record.has_value()) {
      log.records_.push_back(std::move(*record));
    } else {
      ++log.dropped_lines_;
    }
  }
  if (begin < text.size()) {
    ++log.dropped_lines_;
    if (truncate(path.c_str(), static_cast<off_t>(begin)) != 0) return io_error(path, "mend");
  }
  return log;
}

Status ResultsLog::append(const Record& record) {
  Json line = unsigned_line(record);
  line["sum"] = stable_hash(line.dump());
  const std::string text = line.dump() + "\n";
  const int handle = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (handle < 0) return io_error(path_, "open");
  std::size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(handle, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    written += static_cast<std::size_t>(count);
  }
  const bool stored = written == text.size() && fsync(handle) == 0;
  Status failed = stored ? Status() : io_error(path_, "write");
  close(handle);
  if (stored) records_.push_back(record);
  return failed;
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
