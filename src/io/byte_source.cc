// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "io/safetensors.h"

namespace bitdecoding {
namespace {

std::string system_reason(int error) { return std::generic_category().message(error); }

// Reads with pread and no mapping: a file that shrinks meanwhile is an error, not a signal.
class FileSource : public ByteSource {
 public:
  FileSource(std::string path, int fd, std::uint64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}
  FileSource(const FileSource&) = delete;
  FileSource& operator=(const FileSource&) = delete;
  ~FileSource() override { ::close(fd_); }

  const std::string& name() const override { return path_; }
  std::uint64_t size() const override { return size_; }
  Status read(std::uint64_t offset, std::span<std::uint8_t> out) const override {
    while (!out.empty()) {
      const ssize_t n = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) {
        return {StatusCode::kIo, fmt::format("cannot read '{}' at byte {}: {}", path_, offset,
                                             system_reason(errno))};
      }
      if (n == 0) {
        return {StatusCode::kCorrupt, fmt::format("'{}' ends at byte {}, {} bytes too early; it "
                                                  "was truncated while it was read",
                                                  path_, offset, out.size())};
      }
      out = out.subspan(static_cast<std::size_t>(n));
      offset += static_cast<std::uint64_t>(n);
    }
    return {};
  }

 private:
  std::string path_;
  int fd_;
  std::uint64_t size_;
};

class MemorySource : public ByteSource {
 public:
  MemorySource(std::string name, std::span<const std::uint8_t> bytes)
      : name_(std::move(name)), bytes_(bytes) {}

  const std::string& name() const override { return name_; }
  std::uint64_t size() const override { return bytes_.size(); }
  Status read(std::uint64_t offset, std::span<std::uint8_t> out) const override {
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
      return {StatusCode::kCorrupt,
              fmt::format("'{}' ends at byte {}; {} bytes at byte {} are asked for", name_,
                          bytes_.size(), out.size(), offset)};
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return {};
  }

 private:
  std::string name_;
  std::span<const std::uint8_t> bytes_;
};

}  // namespace

Result<std::unique_ptr<ByteSource>> open_byte_source(const std::string& path) {
  // Non-blocking, so that a named pipe is refused below instead of waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    return Status(error == ENOENT || error == ENOTDIR ? StatusCode::kNotFound : StatusCode::kIo,
                  fmt::format("cannot open '{}': {}", path, system_reason(error)));
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(fd);
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}' is not a regular file; expected a safetensors file", path));
  }
  return std::unique_ptr<ByteSource>(
      std::make_unique<FileSource>(path, fd, static_cast<std::uint64_t>(info.st_size)));
}

std::unique_ptr<ByteSource> memory_byte_source(std::string name,
                                               std::span<const std::uint8_t> bytes) {
  return std::make_unique<MemorySource>(std::move(name), bytes);
}

}  // namespace bitdecoding
