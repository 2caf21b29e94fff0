// SPDX-License-Identifier: Apache-2.0
// Threads that run the items of one call. Waiting threads spin for some microseconds before they
// sleep: decode calls follow each other within that time, and a wake-up costs more than a small
// call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace bitdecoding::cpu {

// Runs body(item, thread) for items [0, n).
using ParallelFor =
    std::function<void(std::int64_t n, const std::function<void(std::int64_t, int)>& body)>;

// CPUs of the calling thread's affinity mask, at least 1.
int affinity_cpus();

class ThreadPool {
 public:
  // num_threads counts the caller: 1 starts no thread. Workers inherit the caller's affinity.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // body(item, thread) for every item of [0, n), in any order; returns when all are done. `thread`
  // is in [0, num_threads). Calls from several threads are served one after another. When an item
  // throws, items that have not begun are left out, and run() throws the first exception once no
  // thread is inside an item.
  void run(std::int64_t n, const std::function<void(std::int64_t, int)>& body);

 private:
  void work(int thread);
  void drain(int thread);

  std::mutex call_mutex_;  // one call at a time
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  const std::function<void(std::int64_t, int)>* body_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::atomic<int> busy_{0};
  std::atomic<std::uint64_t> generation_{0};
  std::exception_ptr error_;  // of the current call; written under mutex_
  bool stop_ = false;
};

}  // namespace bitdecoding::cpu
