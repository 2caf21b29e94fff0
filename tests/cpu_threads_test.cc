// SPDX-License-Identifier: Apache-2.0
// What the library promises to threads, small enough for ThreadSanitizer.
#include <gtest/gtest.h>

#include <atomic>
#include <new>
#include <stdexcept>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/thread_pool.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

TEST(ThreadPool, RunsEveryItemOnceFromManyCallers) {
  cpu::ThreadPool pool(3);
  constexpr int kCallers = 3;
  constexpr std::int64_t kItems = 97;
  std::vector<std::vector<int>> seen(kCallers, std::vector<int>(kItems, 0));
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 20; ++round) {
        pool.run(kItems, [&](std::int64_t item, int thread) {
          EXPECT_GE(thread, 0);
          EXPECT_LT(thread, pool.num_threads());
          ++seen[static_cast<std::size_t>(caller)][static_cast<std::size_t>(item)];
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const std::vector<int>& counts : seen) EXPECT_EQ(counts, std::vector<int>(kItems, 20));
}

TEST(ThreadPool, NoItemsAndOneItemReturn) {
  cpu::ThreadPool pool(2);
  int calls = 0;
  pool.run(0, [&](std::int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 0);
  pool.run(1, [&](std::int64_t, int) { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST(ThreadPool, AnItemThatThrowsEndsItsCallAndNoMore) {
  cpu::ThreadPool pool(3);
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> inside{0};
    EXPECT_THROW(pool.run(64,
                          [&](std::int64_t item, int) {
                            ++inside;
                            if (item == round) throw std::runtime_error("an item failed");
                            --inside;
                          }),
                 std::runtime_error);
    EXPECT_EQ(inside.load(), 1);  // the one that threw: all others have left
    std::atomic<int> calls{0};
    pool.run(64, [&](std::int64_t, int) { ++calls; });
    EXPECT_EQ(calls.load(), 64);
  }
}

TEST(CpuBackend, AnExceptionOfTheCallersThreadsIsAnError) {
  BackendOptions options;
  bool fails = false;
  options.parallel_for = [&](std::int64_t n, const std::function<void(std::int64_t)>& body) {
    if (fails) throw std::bad_alloc();
    for (std::int64_t i = 0; i < n; ++i) body(i);
  };
  World w(WorldOptions{});
  Result<std::unique_ptr<Backend>> backend = make_backend("cpu", options);
  ASSERT_TRUE(backend.ok());
  w.backend = backend.take();
  const int s = w.add_sequence({7, 3, 11});
  ASSERT_TRUE(w.step({{s, iota_tokens(0, 20), 0}}).status.ok());
  ASSERT_TRUE(w.plan_step({{s, iota_tokens(20, 20), 0}}).ok());
  ASSERT_TRUE(w.write().ok());
  fails = true;
  EXPECT_EQ(w.attend().status.code(), StatusCode::kResourceExhausted);
  fails = false;
  EXPECT_TRUE(w.attend().status.ok());
}

// Lets several worlds use one backend.
class SharedBackend final : public Backend {
 public:
  explicit SharedBackend(Backend& backend) : backend_(backend) {}
  std::string_view name() const override { return backend_.name(); }
  std::string isa() const override { return backend_.isa(); }
  int num_threads() const override { return backend_.num_threads(); }
  FragmentOrder fragment_order() const override { return backend_.fragment_order(); }
  Status write(const WriteParams& params) override { return backend_.write(params); }
  Status attend(const AttendParams& params) override { return backend_.attend(params); }
  Status gather(const AttendParams& params, int request, int kv_head, std::int64_t begin,
                std::int64_t end, float* key, float* value) override {
    return backend_.gather(params, request, kv_head, begin, end, key, value);
  }

 private:
  Backend& backend_;
};

// Two layers of one backend at once, each with its own pages: the results of each alone.
TEST(CpuBackend, LayersMayRunOnDifferentThreads) {
  BackendOptions backend_options;
  backend_options.num_threads = 2;
  Result<std::unique_ptr<Backend>> made = make_backend("cpu", backend_options);
  ASSERT_TRUE(made.ok()) << made.status().message();
  const std::unique_ptr<Backend> backend = made.take();

  WorldOptions options;
  const auto run = [&](std::uint32_t first) {
    World w(options);
    w.backend = std::make_unique<SharedBackend>(*backend);
    const int s = w.add_sequence({4, 9, 2, 7});
    std::vector<float> rows;
    for (const std::int64_t n : {70, 1, 9, 1}) {
      const StepResult result = w.step({{s, iota_tokens(first, n), 0}});
      EXPECT_TRUE(result.status.ok()) << result.status.message();
      rows.insert(rows.end(), result.output.begin(), result.output.end());
      first += static_cast<std::uint32_t>(n);
    }
    return rows;
  };
  const std::vector<float> alone[2] = {run(0), run(500)};
  std::vector<float> together[2];
  std::thread other([&] { together[1] = run(500); });
  together[0] = run(0);
  other.join();
  EXPECT_EQ(together[0], alone[0]);
  EXPECT_EQ(together[1], alone[1]);
}

}  // namespace
}  // namespace bitdecoding::test
