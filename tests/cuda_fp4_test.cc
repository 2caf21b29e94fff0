// SPDX-License-Identifier: Apache-2.0
// fp4 arithmetic emulated on a GPU, against the reference's.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda_compare.h"

namespace bitdecoding::test {
namespace {

// Both sides add in double precision and round the result to float once. Scores differ by some
// 2^-52 of their size, so a probability's float is the same in all but one of 2^27 cases or so, and
// a code or a scale changes only when that float also lies at a decision point. One code that was
// another would show: it is a step of at least a twelfth of one token's weight, 1e-4 of a row here.
constexpr double kTolerance = 0x1p-23;
// One ulp of a log-sum-exp below 64.
constexpr double kLseTolerance = 0x1p-18;

void compare(WorldOptions options, const Masks& masks = {},
             const std::vector<std::int64_t>& chunks = kChunks,
             const std::vector<Planner>& planners = {Planner::kDevice}) {
  options.arithmetic = Arithmetic::kFp4;
  compare_steps({options, chunks, masks, {kTolerance, kLseTolerance}, planners});
}

using CudaFp4 = Cuda;

TEST_F(CudaFp4, FormatsAndHeadDims) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int head_dim : kHeadDims) {
      WorldOptions o = WorldOptions::for_cuda();
      o.format = format;
      o.head_dim = head_dim;
      o.outer_exponent = -3;
      compare(o, {}, kChunks, {Planner::kHost, Planner::kDevice});
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(CudaFp4, TermsFactorsAndRules) {
  for (const int terms : {1, 2}) {
    for (const float c : {1.0F, 8.0F, 3.7F, 1536.0F, 1e-6F}) {
      for (const float tau : {0.0F, 21.0F / 1024.0F, 448.0F}) {
        WorldOptions o = WorldOptions::for_cuda();
        o.query_terms = terms;
        o.probability_c = c;
        o.probability_tau = tau;
        o.tail_tokens = 16;
        compare(o, {}, {90, 1, 3, 1});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaFp4, GroupSizes) {
  for (const int group : {1, 2, 3, 7, 8, 9, 16, 24, 64}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.num_q_heads = 2 * group;
    compare(o, {}, {80, 1, 5});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaFp4, PageSizes) {
  for (const int page_size : {64, 128, 192, 1024}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.page_size = page_size;
    o.page_padding = 64;
    compare(o, {}, {200, 1, 1, 70, 3});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaFp4, Masks) {
  const std::vector<float> sinks = {-3.0F, 0.5F, 3.0F, 40.0F};
  for (const int window : {-1, 0, 15, 16, 64, 100, 1000}) {
    for (const float softcap : {0.0F, 2.0F, 50.0F}) {
      for (const float* sink : {static_cast<const float*>(nullptr), sinks.data()}) {
        WorldOptions o = WorldOptions::for_cuda();
        o.tail_tokens = 16;
        compare(o, {window, softcap, sink}, {90, 1, 3, 20, 1});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaFp4, SinksAndTails) {
  for (const int sink : {0, 5, 40}) {
    for (const int tail : {0, 7, 64, 100}) {
      for (const bool reproducible : {false, true}) {
        WorldOptions o = WorldOptions::for_cuda();
        o.sink_tokens = sink;
        o.tail_tokens = tail;
        o.reproducible = reproducible;
        o.page_size = 128;
        compare(o, {}, {100, 1, 4, 1, 8, 1});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(CudaFp4, SixteenBitTensors) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.dtype = dtype;
    o.arithmetic = Arithmetic::kFp4;
    // The same float goes to the output's type; should two differ in their last bit, one of the
    // row's 64 elements may round the other way.
    compare_steps({o, kChunks, {}, {dtype == DType::kBf16 ? 0x1p-11 : 0x1p-14, kLseTolerance}});
    if (HasFatalFailure()) return;
  }
}

TEST_F(CudaFp4, GraphsAreReplayedWithOtherLengths) {
  WorldOptions o = WorldOptions::for_cuda();
  o.head_dim = 128;
  std::vector<std::int64_t> chunks = {150};
  for (int i = 0; i < 40; ++i) chunks.push_back(i % 7 == 3 ? 4 : 1);
  compare(o, {}, chunks, {Planner::kGraph});
}

TEST_F(CudaFp4, NoRotationNoShift) {
  WorldOptions o = WorldOptions::for_cuda();
  o.hadamard = false;
  o.shift = false;
  compare(o);
}

TEST_F(CudaFp4, StaleAndPoisonedBytesDoNotShow) {
  for (const int fill : {0x7F, 0xFF, 0x00}) {
    WorldOptions o = WorldOptions::for_cuda();
    o.fill = static_cast<std::uint8_t>(fill);
    compare(o, {}, {3, 1, 1, 60, 1, 2, 1});
    if (HasFatalFailure()) return;
  }
}

// More blocks of rows than the workspace has parts for: each row is one block's own.
TEST_F(CudaFp4, ManyRows) {
  WorldOptions o = WorldOptions::for_cuda();
  o.num_kv_heads = 64;
  o.num_q_heads = 64 * 8;
  o.sink_tokens = 0;
  compare(o, {}, {70, 8});
}

// A query that is not finite gives rows of NaN, and other rows are left alone.
TEST_F(CudaFp4, QueriesThatAreNotFiniteShow) {
  for (const float value : {NAN, INFINITY}) {
    for (const bool shift : {false, true}) {
      WorldOptions o = WorldOptions::for_cuda();
      o.order = FragmentOrder::kFp16Mma;
      o.arithmetic = Arithmetic::kFp4;
      o.shift = shift;
      o.tail_tokens = 0;
      o.fault = {'q', 100, 5, value};
      World w(o);
      const int s = w.add_sequence({7, 3, 11, 1});
      w.backend = std::make_unique<CudaHostBackend>(&w, Planner::kDevice);
      ASSERT_TRUE(w.step({{s, iota_tokens(0, 100)}}).status.ok());
      const StepResult r = w.step({{s, iota_tokens(100, 2)}});
      ASSERT_TRUE(r.status.ok()) << r.status.message();
      const std::size_t row = static_cast<std::size_t>(o.num_q_heads * o.head_dim);
      for (std::size_t i = 0; i < 2 * row; ++i) {
        ASSERT_EQ(std::isnan(r.output[i]), i < row) << "element " << i;
      }
      for (std::size_t i = 0; i < 2 * static_cast<std::size_t>(o.num_q_heads); ++i) {
        ASSERT_EQ(std::isnan(r.lse[i]), i < static_cast<std::size_t>(o.num_q_heads));
      }
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
