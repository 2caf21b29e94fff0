// SPDX-License-Identifier: Apache-2.0
#include "score/logits_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

namespace bitdecoding::eval {
namespace {

constexpr std::size_t kFieldBytes = 16;  // four int32 before the logits
constexpr std::size_t kMostLogits = std::size_t{1} << 24;

Status corrupt(const std::string& path, const std::string& what) {
  return {StatusCode::kCorrupt,
          fmt::format("{} is no capture of logits that can be read: {}.", path, what)};
}

}  // namespace

Result<LogitsFile> LogitsFile::open(const std::string& path) {
  const std::string header_path = path + ".json";
  std::ifstream header_file(header_path);
  if (!header_file) {
    return Status(StatusCode::kNotFound,
                  fmt::format("There is no {}; the server wrote no logits. Is the plugin installed "
                              "in its Python environment?",
                              header_path));
  }
  const nlohmann::json header = nlohmann::json::parse(header_file, nullptr, false);
  const auto number = [&](const char* key) {
    const auto found = header.find(key);
    return found != header.end() && found->is_number_unsigned() ? found->get<std::size_t>() : 0;
  };
  if (!header.is_object() || header.value("format", "") != "bitdecoding-logits" ||
      number("version") != 1 || header.value("dtype", "") != "float32") {
    return corrupt(header_path, "wanted is format bitdecoding-logits, version 1, dtype float32");
  }
  LogitsFile file;
  file.vocab_size_ = number("vocab_size");
  file.header_bytes_ = number("header_bytes");
  file.record_bytes_ = number("record_bytes");
  if (file.vocab_size_ == 0 || file.vocab_size_ > kMostLogits || file.header_bytes_ < kFieldBytes ||
      file.header_bytes_ > 4096 || file.header_bytes_ % alignof(float) != 0 ||
      file.record_bytes_ % alignof(float) != 0 ||
      file.record_bytes_ < file.header_bytes_ + file.vocab_size_ * sizeof(float)) {
    return corrupt(header_path, "its sizes contradict each other");
  }
  const int handle = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (handle < 0) {
    return Status(StatusCode::kIo, fmt::format("Cannot open {}: {}.", path, std::strerror(errno)));
  }
  struct stat info {};
  fstat(handle, &info);
  file.size_ = static_cast<std::size_t>(info.st_size);
  if (file.size_ == 0 || file.size_ % file.record_bytes_ != 0) {
    close(handle);
    return corrupt(path, fmt::format("its {} bytes are no whole number of records of {} bytes",
                                     file.size_, file.record_bytes_));
  }
  void* mapped = mmap(nullptr, file.size_, PROT_READ, MAP_PRIVATE, handle, 0);
  const int error = errno;
  close(handle);
  if (mapped == MAP_FAILED) {
    file.size_ = 0;
    return Status(StatusCode::kIo, fmt::format("Cannot map {}: {}.", path, std::strerror(error)));
  }
  file.bytes_ = static_cast<const std::uint8_t*>(mapped);
  file.rows_ = file.size_ / file.record_bytes_;
  return file;
}

LogitsFile::LogitsFile(LogitsFile&& other) noexcept { *this = std::move(other); }

LogitsFile& LogitsFile::operator=(LogitsFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(size_, other.size_);
  std::swap(rows_, other.rows_);
  std::swap(vocab_size_, other.vocab_size_);
  std::swap(header_bytes_, other.header_bytes_);
  std::swap(record_bytes_, other.record_bytes_);
  return *this;
}

LogitsFile::~LogitsFile() {
  if (bytes_ != nullptr) munmap(const_cast<std::uint8_t*>(bytes_), size_);
}

LogitsRow LogitsFile::row(std::size_t index) const {
  const std::uint8_t* record = bytes_ + index * record_bytes_;
  std::int32_t fields[3];
  std::memcpy(fields, record, sizeof(fields));
  return {fields[0], fields[1], fields[2], reinterpret_cast<const float*>(record + header_bytes_)};
}

}  // namespace bitdecoding::eval
