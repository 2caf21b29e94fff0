// SPDX-License-Identifier: Apache-2.0
#include "engine/folder_lock.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace bitdecoding::eval {

Result<FolderLock> FolderLock::take(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const int handle = open((folder + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (handle < 0) {
    return Status(StatusCode::kIo, fmt::format("the folder '{}' cannot be written: {}", folder,
                                               std::generic_category().message(errno)));
  }
  FolderLock lock(handle);
  if (flock(handle, LOCK_EX | LOCK_NB) == 0) return lock;
  return Status(StatusCode::kIo,
                fmt::format("another process is at work in '{}'; wait for it or choose another "
                            "folder",
                            folder));
}

FolderLock& FolderLock::operator=(FolderLock&& other) noexcept {
  std::swap(handle_, other.handle_);
  return *this;
}

FolderLock::~FolderLock() {
  if (handle_ >= 0) close(handle_);
}

}  // namespace bitdecoding::eval
