// SPDX-License-Identifier: Apache-2.0
#include "bench_memory.h"

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cstring>
#include <ctime>
#include <thread>
#include <vector>

#include "bitdecoding/bitdecoding.h"

namespace bitdecoding::cli {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kCeilingBytes = std::size_t{512} << 20;
constexpr std::size_t kPasses = 9;

// Independent sums, so that the loop waits for memory and not for its own additions.
std::uint64_t sum(const std::uint64_t* data, std::size_t count) {
  constexpr std::size_t kLanes = 32;
  std::array<std::uint64_t, kLanes> lanes{};
  for (std::size_t i = 0; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += data[i + lane];
  }
  std::uint64_t total = 0;
  for (const std::uint64_t lane : lanes) total += lane;
  return total;
}

double thread_cpu_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

}  // namespace

void* allocate_huge(std::size_t bytes) {
  const std::size_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* data = std::aligned_alloc(kHugePage, std::max(rounded, kHugePage));
  if (data == nullptr) return nullptr;
  // A machine without huge pages still runs; its figures are what it gives.
  static_cast<void>(bd_advise_huge_pages(data, static_cast<std::int64_t>(rounded), nullptr));
  std::memset(data, 0, std::max(rounded, kHugePage));
  return data;
}

Result<ReadCeiling> measure_read_ceiling(int threads) {
  const HugeArray<std::uint64_t> buffer(static_cast<std::uint64_t*>(allocate_huge(kCeilingBytes)));
  if (buffer == nullptr) {
    return Status(StatusCode::kResourceExhausted,
                  "no memory for the 512 MiB buffer whose reading gives the bandwidth ceiling");
  }
  const std::size_t share =
      kCeilingBytes / sizeof(std::uint64_t) / static_cast<std::size_t>(threads);
  using Clock = std::chrono::steady_clock;
  std::array<Clock::time_point, kPasses + 1> marks;
  std::size_t next = 0;
  std::barrier turn(threads, [&]() noexcept { marks[next++] = Clock::now(); });
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads));
  std::vector<std::array<double, kPasses>> cpu_ns(static_cast<std::size_t>(threads));
  const auto work = [&](std::size_t index) {
    for (std::size_t pass = 0; pass < kPasses; ++pass) {
      turn.arrive_and_wait();
      const double start = thread_cpu_ns();
      sums[index] += sum(buffer.get() + index * share, share);
      cpu_ns[index][pass] = thread_cpu_ns() - start;
    }
    turn.arrive_and_wait();
  };
  std::vector<std::thread> others;
  for (std::size_t i = 1; i < static_cast<std::size_t>(threads); ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& thread : others) thread.join();
  std::uint64_t total = 0;
  for (const std::uint64_t part : sums) total += part;
  if (total != 0) {  // also keeps the sums from being optimised away
    return Status(StatusCode::kInternal, "the sum of a zeroed buffer is not zero");
  }
  ReadCeiling ceiling;
  for (std::size_t pass = 1; pass < kPasses; ++pass) {  // the first pass warms up
    const std::chrono::duration<double, std::nano> time = marks[pass + 1] - marks[pass];
    double slowest = 0;
    for (const auto& of_thread : cpu_ns) slowest = std::max(slowest, of_thread[pass]);
    constexpr auto kBytes = static_cast<double>(kCeilingBytes);
    ceiling.gbps = std::max(ceiling.gbps, kBytes / time.count());
    ceiling.cpu_gbps = std::max(ceiling.cpu_gbps, kBytes / slowest);
  }
  return ceiling;
}

}  // namespace bitdecoding::cli
