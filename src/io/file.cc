// SPDX-License-Identifier: Apache-2.0
#include "io/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <system_error>

namespace bitdecoding {
namespace {

std::string system_reason(int error) { return std::generic_category().message(error); }

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  // Closing reports what a delayed write could not do.
  int close() {
    const int result = ::close(fd_);
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

Status write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return {StatusCode::kIo, system_reason(errno)};
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return {};
}

Status write_and_close(const std::string& path, std::string_view bytes) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (file.get() < 0) return {StatusCode::kIo, system_reason(errno)};
  if (Status status = write_all(file.get(), bytes); !status.ok()) return status;
  if (::fsync(file.get()) != 0) return {StatusCode::kIo, system_reason(errno)};
  if (file.close() != 0) return {StatusCode::kIo, system_reason(errno)};
  return {};
}

}  // namespace

Result<std::string> read_file(const std::string& path, std::int64_t max_bytes) {
  // Non-blocking while it opens: a named pipe that nobody writes would wait forever. Reading waits
  // for a writer that is there, and a pipe without one is empty.
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.get() >= 0) ::fcntl(file.get(), F_SETFL, O_RDONLY);
  if (file.get() < 0) {
    const int error = errno;
    return Status(error == ENOENT || error == ENOTDIR ? StatusCode::kNotFound : StatusCode::kIo,
                  fmt::format("cannot open '{}': {}", path, system_reason(error)));
  }
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) {
    return Status(StatusCode::kIo, fmt::format("cannot read '{}': {}", path, system_reason(errno)));
  }
  if (S_ISDIR(info.st_mode) || S_ISCHR(info.st_mode) || S_ISBLK(info.st_mode)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}' is a {}; expected a file", path,
                              S_ISDIR(info.st_mode) ? "folder" : "device"));
  }
  const Status too_long(
      StatusCode::kInvalidArgument,
      fmt::format("'{}' is longer than {} bytes, the most that is read", path, max_bytes));
  if (S_ISREG(info.st_mode) && info.st_size > max_bytes) return too_long;
  // Read one byte more than allowed: how long a pipe or a growing file is shows at its end only.
  std::string text;
  std::size_t used = 0;
  const auto limit = static_cast<std::size_t>(max_bytes) + 1;
  const auto expected = std::clamp<std::int64_t>(info.st_size, 0, max_bytes) + 1;
  text.resize(static_cast<std::size_t>(expected));
  while (true) {
    if (used == text.size()) {
      if (used >= limit) break;
      text.resize(std::min(limit, used * 2));
    }
    const ssize_t n = ::read(file.get(), text.data() + used, text.size() - used);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return Status(StatusCode::kIo,
                    fmt::format("cannot read '{}': {}", path, system_reason(errno)));
    }
    if (n == 0) break;
    used += static_cast<std::size_t>(n);
  }
  if (used >= limit) return too_long;
  text.resize(used);
  return text;
}

Status write_file_atomic(const std::string& path, std::string_view bytes) {
  static std::atomic<unsigned> serial{0};
  const std::string temporary = fmt::format("{}.{}.{}.tmp", path, ::getpid(), serial.fetch_add(1));
  Status status = write_and_close(temporary, bytes);
  if (status.ok() && ::rename(temporary.c_str(), path.c_str()) != 0) {
    status = {StatusCode::kIo, system_reason(errno)};
  }
  if (!status.ok()) {
    ::unlink(temporary.c_str());
    return {StatusCode::kIo, fmt::format("cannot write '{}': {}", path, status.message())};
  }
  return {};
}

}  // namespace bitdecoding
