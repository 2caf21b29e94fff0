// SPDX-License-Identifier: Apache-2.0
// Address space without memory behind it, for tests with offsets beyond 2^32 bytes and for canaries
// that end the program: only what was asked for can be touched, anything else is a fault.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace bitdecoding::test {

class ReservedMemory {
 public:
  explicit ReservedMemory(std::int64_t bytes) : bytes_(round_up(bytes) + page()) {
    void* memory = mmap(nullptr, static_cast<std::size_t>(bytes_), PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(memory, MAP_FAILED);
    if (memory != MAP_FAILED) base_ = static_cast<std::uint8_t*>(memory);
  }
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;
  ~ReservedMemory() {
    if (base_ != nullptr) munmap(base_, static_cast<std::size_t>(bytes_));
  }

  // Gives [offset, offset + bytes) memory, in whole pages of the machine; zero at first.
  std::uint8_t* open(std::int64_t offset, std::int64_t bytes) {
    const std::int64_t begin = offset / page() * page();
    const std::int64_t end = round_up(offset + bytes);
    EXPECT_LE(end, bytes_);
    EXPECT_EQ(
        mprotect(base_ + begin, static_cast<std::size_t>(end - begin), PROT_READ | PROT_WRITE), 0);
    return base_ + offset;
  }
  // `bytes` bytes that end where memory ends.
  std::uint8_t* open_before_the_end(std::int64_t bytes) {
    return open(bytes_ - page() - bytes, bytes);
  }
  std::uint8_t* base() { return base_; }

 private:
  static std::int64_t page() { return sysconf(_SC_PAGESIZE); }
  static std::int64_t round_up(std::int64_t n) { return (n + page() - 1) / page() * page(); }

  std::int64_t bytes_;  // a last page is never opened
  std::uint8_t* base_ = nullptr;
};

}  // namespace bitdecoding::test
