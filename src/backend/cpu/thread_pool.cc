// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/thread_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif

namespace bitdecoding::cpu {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

int affinity_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int num_threads) {
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::drain(int thread) {
  for (;;) {
    const std::int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= count_) return;
    try {
      (*body_)(item, thread);
    } catch (...) {
      // Leaving a worker's function would end the process, and leaving the caller's would free what
      // the workers still use.
      const std::lock_guard<std::mutex> lock(mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
      next_.store(count_, std::memory_order_relaxed);
    }
  }
}

void ThreadPool::run(std::int64_t n, const std::function<void(std::int64_t, int)>& body) {
  if (n <= 0) return;
  const std::lock_guard<std::mutex> call(call_mutex_);
  if (workers_.empty() || n == 1) {
    for (std::int64_t item = 0; item < n; ++item) body(item, 0);
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    body_ = &body;
    count_ = n;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  drain(0);
  // Workers are inside their last item now, so this wait is short; yielding keeps it harmless when
  // there are fewer CPUs than threads.
  for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) {
    if (spins < 1000) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::work(int thread) {
  std::uint64_t seen = 0;
  for (;;) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (generation_.load(std::memory_order_acquire) == seen &&
           std::chrono::steady_clock::now() < deadline) {
      relax();
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      seen = generation_.load(std::memory_order_relaxed);
      if (stop_) return;
    }
    drain(thread);
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace bitdecoding::cpu
