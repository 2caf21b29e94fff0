// SPDX-License-Identifier: Apache-2.0
// One program at a time in an output folder. The lock goes with the process, however it ends.
#pragma once

#include <string>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

class FolderLock {
 public:
  // Makes the folder. kIo when another process holds the lock, or the folder cannot be written.
  static Result<FolderLock> take(const std::string& folder);
  FolderLock(FolderLock&& other) noexcept : handle_(other.handle_) { other.handle_ = -1; }
  FolderLock& operator=(FolderLock&& other) noexcept;
  ~FolderLock();

 private:
  explicit FolderLock(int handle) : handle_(handle) {}
  int handle_;
};

}  // namespace bitdecoding::eval
