// SPDX-License-Identifier: Apache-2.0
// The CUDA backend against the reference: the same steps through both. Bytes of pages must be
// equal; outputs agree within what FP16 and BF16 operands allow. Skipped where there is no GPU.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda_compare.h"
#include "exchange.h"

namespace bitdecoding::test {
namespace {

// Relative L2 error of an output against the reference's over the same pages. Queries keep 11 bits
// below their row's maximum (about 3 sigma): 2^-12 * 3 / sqrt 3 of a score's deviation, 4e-4; P
// keeps 11 bits: 2^-12. ex2.approx and FP32 sums are below both.
constexpr double kTolerance = 1.0e-3;

constexpr double kLseTolerance = 4.0e-3;

void compare(const WorldOptions& options, const std::vector<std::int64_t>& chunks,
             const Masks& masks = {}, double limit = kTolerance,
             const std::vector<Planner>& planners = {Planner::kHost, Planner::kDevice}) {
  compare_steps({options, chunks, masks, {limit, kLseTolerance}, planners});
}

TEST_F(Cuda, FormatsAndHeadDims) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int head_dim : kHeadDims) {
      WorldOptions o = WorldOptions::for_cuda();
      o.format = format;
      o.head_dim = head_dim;
      o.outer_exponent = -3;
      compare(o, kChunks);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(Cuda, GroupSizes) {
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 64}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.num_q_heads = 2 * group;
    compare(o, {80, 1, 5}, {}, kTolerance, {Planner::kDevice});
    if (HasFatalFailure()) return;
  }
}

TEST_F(Cuda, PageSizes) {
  for (const int page_size : {64, 128, 192, 256, 512, 1024}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.page_size = page_size;
    o.page_padding = 64;
    compare(o, {200, 1, 1, 70, 3}, {}, kTolerance, {Planner::kDevice});
    if (HasFatalFailure()) return;
  }
}

TEST_F(Cuda, Masks) {
  const std::vector<float> sinks = {-3.0F, 0.5F, 3.0F, 40.0F};
  for (const int window : {-1, 0, 15, 16, 63, 64, 100, 1000}) {
    for (const float softcap : {0.0F, 2.0F, 50.0F}) {
      for (const float* sink : {static_cast<const float*>(nullptr), sinks.data()}) {
        WorldOptions o = WorldOptions::for_cuda();
        o.tail_tokens = 16;
        compare(o, {90, 1, 3, 20, 1}, {window, softcap, sink}, 2 * kTolerance, {Planner::kDevice});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Cuda, SinksAndTails) {
  for (const int sink : {0, 5, 16, 40, 64}) {
    for (const int tail : {0, 7, 16, 64, 100}) {
      for (const bool reproducible : {false, true}) {
        WorldOptions o = WorldOptions::for_cuda();
        o.sink_tokens = sink;
        o.tail_tokens = tail;
        o.reproducible = reproducible;
        o.page_size = 128;
        compare(o, {100, 1, 4, 1, 8, 1}, {}, kTolerance, {Planner::kDevice});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Cuda, ScaleRules) {
  for (const ScaleRule rule : {ScaleRule::kAmax6, ScaleRule::kFourSix, ScaleRule::kCodeSearch}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.head_dim = 128;
    o.key_rule = o.value_rule = rule;
    compare(o, kChunks, {}, kTolerance, {Planner::kDevice});
    if (HasFatalFailure()) return;
  }
}

TEST_F(Cuda, SixteenBitTensors) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.dtype = dtype;
    // Both outputs are rounded to the type: half an ulp each.
    compare(o, kChunks, {}, dtype == DType::kBf16 ? 0x1p-8 : 0x1p-9);
    if (HasFatalFailure()) return;
  }
}

// A captured step, replayed with other lengths, block tables, slot mappings and rows: group borders
// and page borders are crossed inside the replays.
TEST_F(Cuda, GraphsAreReplayedWithOtherLengths) {
  for (const int head_dim : {64, 128}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.head_dim = head_dim;
    std::vector<std::int64_t> chunks = {150};
    for (int i = 0; i < 70; ++i) chunks.push_back(i % 7 == 3 ? 4 : 1);
    compare(o, chunks, {}, kTolerance, {Planner::kGraph});
    if (HasFatalFailure()) return;
  }
}

// Finite keys of which the rotation makes infinities and NaN, and whole blocks of NaN.
TEST_F(Cuda, KeysThatTheRotationOverflows) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int head_dim : kHeadDims) {
      SCOPED_TRACE(testing::Message() << format_name(format) << " head_dim " << head_dim);
      WorldOptions o = WorldOptions::for_cuda();
      o.format = format;
      o.head_dim = head_dim;
      o.order = FragmentOrder::kFp16Mma;
      World want(o);
      World got(o);
      got.backend = std::make_unique<CudaHostBackend>(&got, Planner::kDevice);
      constexpr std::int64_t kTokens = 40;
      std::vector<float> k;
      for (std::int64_t i = 0; i < kTokens * o.num_kv_heads * head_dim; ++i) {
        k.push_back(normal_of(static_cast<std::uint64_t>(i)) < 0.0F ? -1e38F : 1e38F);
      }
      const std::vector<float> v(k.size(), 1.0F);
      for (World* w : {&want, &got}) {
        const int s = w->add_sequence({3, 1});
        ASSERT_TRUE(w->plan_step({{s, iota_tokens(0, kTokens)}}).ok());
        const Status status = w->write_rows(k, v);
        ASSERT_TRUE(status.ok()) << status.message();
      }
      EXPECT_EQ(want.page_bytes(3), got.page_bytes(3));
      EXPECT_EQ(want.counters.saturated_blocks, got.counters.saturated_blocks);
      EXPECT_EQ(want.counters.flushed_blocks, got.counters.flushed_blocks);
      EXPECT_EQ(got.counters.non_finite, 0U);
    }
  }
}

TEST_F(Cuda, NoRotationNoShift) {
  WorldOptions o = WorldOptions::for_cuda();
  o.hadamard = false;
  o.shift = false;
  compare(o, kChunks, {}, kTolerance, {Planner::kDevice});
}

// Few slots: the device drops and refuses as the host does, by count.
TEST_F(Cuda, ShortPoolOfSlots) {
  for (const int slots : {6, 8, 10, 14}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.num_slots = slots;
    o.max_requests = 2;
    compare(o, {150, 1, 1, 1, 20, 1, 1, 40, 1}, {}, kTolerance, {Planner::kDevice});
    if (HasFatalFailure()) return;
  }
}

// Long enough that a row is shared by several blocks of threads, and with more rows than blocks.
TEST_F(Cuda, LongAndShortTogether) {
  WorldOptions o = WorldOptions::for_cuda();
  o.head_dim = 128;
  o.page_size = 128;
  o.num_pages = 64;
  o.num_slots = 128;
  o.order = FragmentOrder::kFp16Mma;
  o.num_kv_heads = 2;
  o.num_q_heads = 8;
  World want(o);
  World got(o);
  std::vector<std::int32_t> pages[4];
  for (int i = 0; i < 64; ++i) pages[i % 4].push_back((i * 37) % 64);
  for (World* w : {&want, &got}) {
    for (const auto& p : pages) w->add_sequence(p);
  }
  got.backend = std::make_unique<CudaHostBackend>(&got, Planner::kDevice);
  const std::int64_t lengths[4] = {1900, 20, 700, 3};
  for (int s = 0; s < 4; ++s) {
    const std::vector<Work> work = {
        {s, iota_tokens(static_cast<std::uint32_t>(1000 * s), lengths[s])}};
    for (World* w : {&want, &got}) {
      Status status = w->plan_step(work);
      ASSERT_TRUE(status.ok()) << status.message();
      status = w->write();
      ASSERT_TRUE(status.ok()) << status.message();
    }
  }
  for (int step = 0; step < 3; ++step) {
    std::vector<Work> work;
    for (int s = 0; s < 4; ++s) {
      work.push_back(
          {s, iota_tokens(static_cast<std::uint32_t>(9000 + 100 * s + 10 * step), 1 + step)});
    }
    const StepResult a = want.step(work);
    const StepResult b = got.step(work);
    ASSERT_TRUE(a.status.ok() && b.status.ok()) << a.status.message() << b.status.message();
    expect_decoded_rows(got, b, a, {kTolerance, kLseTolerance});
    if (HasFatalFailure()) return;
  }
}

// More rows than multiprocessors: blocks take runs of the list, across rows. Fewer: a part of a row
// each. Both with more requests than a warp looks at together.
TEST_F(Cuda, ManyRequests) {
  constexpr int kRequests = 90;
  for (const Planner planner : {Planner::kHost, Planner::kDevice}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.head_dim = 128;
    o.num_pages = 2 * kRequests;
    o.num_slots = 8 * kRequests;
    o.max_requests = kRequests;
    o.order = FragmentOrder::kFp16Mma;
    World want(o);
    World got(o);
    got.backend = std::make_unique<CudaHostBackend>(&got, planner);
    std::vector<Work> chunks;
    for (int i = 0; i < kRequests; ++i) {
      for (World* w : {&want, &got}) w->add_sequence({(2 * i + 90) % 180, (2 * i + 91) % 180});
      chunks.push_back({i, iota_tokens(static_cast<std::uint32_t>(500 * i), 9 + i * 37 % 100)});
    }
    ASSERT_TRUE(want.step(chunks).status.ok());
    ASSERT_TRUE(got.step(chunks).status.ok());
    for (const int every : {1, 1, 2, 5}) {
      std::vector<Work> work;
      for (int i = 0; i < kRequests; i += every) {
        work.push_back({i, iota_tokens(static_cast<std::uint32_t>(500 * i + 200 + every), 1)});
      }
      const StepResult a = want.step(work);
      const StepResult b = got.step(work);
      ASSERT_TRUE(a.status.ok() && b.status.ok()) << a.status.message() << b.status.message();
      expect_decoded_rows(got, b, a, {kTolerance, kLseTolerance});
      if (HasFatalFailure()) return;
    }
  }
}

// Pages that a GPU wrote are the CPU backend's once they are in its order, and it reads hers.
TEST_F(Cuda, PagesAreExchangedWithTheCpu) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.format = format;
    o.head_dim = 128;
    o.fill = 0;
    World cpu([&] {
      WorldOptions other = o;
      other.backend = "cpu";
      return other;
    }());
    o.order = FragmentOrder::kFp16Mma;
    World gpu(o);
    const std::vector<std::int32_t> pages = {7, 3, 11, 1};
    for (World* w : {&cpu, &gpu}) w->add_sequence(pages);
    gpu.backend = std::make_unique<CudaHostBackend>(&gpu, Planner::kHost);
    StepResult own;
    for (const std::int64_t n : {150, 1, 5, 40, 1}) {
      const std::vector<Work> work = {{0, iota_tokens(static_cast<std::uint32_t>(n), n)}};
      ASSERT_TRUE(cpu.step(work).status.ok());
      own = gpu.step(work);
      ASSERT_TRUE(own.status.ok()) << own.status.message();
    }
    for (const std::int32_t page : pages) {
      const std::vector<std::uint8_t> file = export_from(cpu, page);
      EXPECT_EQ(export_from(gpu, page), file) << "page " << page;
      std::fill_n(gpu.head_bytes(page, 0), gpu.page_bytes(page).size(), std::uint8_t{0});
      import_into(gpu, page, file);
    }
    EXPECT_EQ(gpu.attend().output, own.output);
  }
}

TEST_F(Cuda, GatherGivesTheStoredNumbers) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int head_dim : kHeadDims) {
      WorldOptions o = WorldOptions::for_cuda();
      o.format = format;
      o.head_dim = head_dim;
      o.order = FragmentOrder::kFp16Mma;
      World want(o);
      World got(o);
      for (World* w : {&want, &got}) w->add_sequence({7, 3, 11, 1});
      got.backend = std::make_unique<CudaHostBackend>(&got, Planner::kDevice);
      for (World* w : {&want, &got}) ASSERT_TRUE(w->step({{0, iota_tokens(5, 170)}}).status.ok());
      const auto count = static_cast<std::size_t>(120 * head_dim);
      std::vector<float> k[2] = {std::vector<float>(count, NAN), std::vector<float>(count, NAN)};
      std::vector<float> v[2] = {k[0], k[0]};
      ASSERT_TRUE(want.backend->gather(want.params, 0, 1, 30, 150, k[0].data(), v[0].data()).ok());
      ASSERT_TRUE(got.backend->gather(got.params, 0, 1, 30, 150, k[1].data(), v[1].data()).ok());
      EXPECT_EQ(v[0], v[1]);
      // Keys are rotated back: FP32 additions in the same order.
      EXPECT_TRUE(relative_error(k[1], k[0], 0, count) <= 1.0e-6);
    }
  }
}

TEST_F(Cuda, StaleAndPoisonedBytesDoNotShow) {
  for (const int fill : {0x7F, 0xFF, 0x00}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.fill = static_cast<std::uint8_t>(fill);
    compare(o, {3, 1, 1, 60, 1, 2, 1});
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace bitdecoding::test
