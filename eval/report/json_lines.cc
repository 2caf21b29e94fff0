// SPDX-License-Identifier: Apache-2.0
#include "report/json_lines.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

std::string dumped(const Json& object) {
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::optional<Json> read_line(const std::string& text) {
  Json line = Json::parse(text, nullptr, false);
  if (!line.is_object() || !line.contains("sum") || !line["sum"].is_string()) return std::nullopt;
  const std::string sum = line["sum"].get<std::string>();
  line.erase("sum");
  if (stable_hash(dumped(line)) != sum) return std::nullopt;
  return line;
}

Status io_error(const std::string& path, const char* what) {
  return {StatusCode::kIo,
          fmt::format("Cannot {} the results file {}: {}.", what, path, std::strerror(errno))};
}

// The lines, and the offset behind the last newline.
JsonLines split(const std::string& text, std::size_t* whole) {
  JsonLines out;
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    if (end == begin) continue;
    if (std::optional<Json> line = read_line(text.substr(begin, end - begin))) {
      out.lines.push_back(std::move(*line));
    } else {
      ++out.dropped;
    }
  }
  if (begin < text.size()) ++out.dropped;
  *whole = begin;
  return out;
}

bool write_all(int handle, const std::string& text) {
  std::size_t written = 0;
  while (written < text.size()) {
    const ssize_t count = write(handle, text.data() + written, text.size() - written);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    written += static_cast<std::size_t>(count);
  }
  return true;
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

std::string json_line(Json object) {
  // Through text once: what is read back must be what the checksum is of.
  object = Json::parse(dumped(object));
  object["sum"] = stable_hash(dumped(object));
  return dumped(object) + "\n";
}

Result<JsonLines> read_json_lines(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  std::size_t whole = 0;
  return split(content.str(), &whole);
}

Result<JsonLines> open_json_lines(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  const int handle = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (handle < 0) return io_error(path, "open");
  close(handle);
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  std::size_t whole = 0;
  JsonLines out = split(text, &whole);
  if (whole < text.size() && truncate(path.c_str(), static_cast<off_t>(whole)) != 0) {
    return io_error(path, "mend");
  }
  return out;
}

Status append_json_line(const std::string& path, const Json& object) {
  const std::string text = json_line(object);
  const int handle = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (handle < 0) return io_error(path, "open");
  struct stat before {};
  const bool known = fstat(handle, &before) == 0;
  const bool stored = write_all(handle, text) && fsync(handle) == 0;
  Status failed = stored ? Status() : io_error(path, "write");
  // A full disk took a part of the line: the next line must not begin behind it.
  if (!stored && known && S_ISREG(before.st_mode) && ftruncate(handle, before.st_size) != 0) {
    failed = io_error(path, "mend");
  }
  close(handle);
  return failed;
}

}  // namespace bitdecoding::eval
