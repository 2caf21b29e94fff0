// SPDX-License-Identifier: Apache-2.0
// The cpu backend against the reference: the same steps through both, on every instruction set of
// this machine. Bytes of pages must be equal; outputs agree within what the arithmetic allows.
#include <gtest/gtest.h>

#include <cmath>

#include "attend_compare.h"
#include "backend/cpu/cpu_backend.h"

namespace bitdecoding::test {
namespace {

// Relative L2 error of an output against the reference's.
//   int8  q has 127 levels a side of its row's maximum m: an error of m / (254 sqrt 3) a value,
//   about
//         .006 of sigma for m = 2.8 sigma, so .006 of the scores' deviation (1 here), which is the
//         relative error of a probability; p adds 1 / (254 sqrt 3) of the tile's maximum, about 5
//         times the mean: .011. Together .013; small contexts have fewer terms to average over.
//   wide  128 times finer: .0001; float's own 2^-24 over a few hundred terms is below that.
double tolerance(Arithmetic arithmetic) { return arithmetic == Arithmetic::kInt8 ? 0.03 : 2.5e-4; }

std::unique_ptr<Backend> cpu_backend(const std::string& isa, int threads) {
  BackendOptions options;
  options.isa = isa;
  options.num_threads = threads;
  Result<std::unique_ptr<Backend>> backend = make_backend("cpu", options);
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  return backend.ok() ? backend.take() : nullptr;
}

// Steps of `chunks` tokens for two sequences at once, in both backends.
void compare(WorldOptions options, const std::vector<std::int64_t>& chunks, const std::string& isa,
             const Masks& masks = {}, double limit = 0.0) {
  SCOPED_TRACE(testing::Message() << isa << " format " << format_name(options.format)
                                  << " head_dim " << options.head_dim << " heads "
                                  << options.num_q_heads << "/" << options.num_kv_heads << " "
                                  << arithmetic_name(options.arithmetic));
  World want(options);
  World got(options);
  got.backend = cpu_backend(isa, 2);
  ASSERT_NE(got.backend, nullptr);
  ASSERT_EQ(got.backend->isa(), isa);
  for (World* w : {&want, &got}) {
    set_masks(*w, masks);
    w->add_sequence({7, 3, 11, 1, 20, 9, 8, 2});
    w->add_sequence({30, 31, 5, 6, 12, 13, 14, 15});
  }
  std::uint32_t next = 0;
  for (const std::int64_t n : chunks) {
    const std::vector<Work> work = {{0, iota_tokens(next, n)},
                                    {1, iota_tokens(next + 7000, n / 2 + 1)}};
    next += static_cast<std::uint32_t>(n);
    const StepResult a = want.step(work);
    const StepResult b = got.step(work);
    ASSERT_TRUE(a.status.ok()) << a.status.message();
    ASSERT_TRUE(b.status.ok()) << b.status.message();
    for (std::int64_t page = 0; page < options.num_pages; ++page) {
      ASSERT_EQ(want.page_bytes(page), got.page_bytes(page))
          << "page " << page << " after " << next;
    }
    const double error = relative_error(b.output, a.output, 0, a.output.size());
    ASSERT_TRUE(error <= (limit == 0.0 ? tolerance(options.arithmetic) : limit))
        << "error " << error << " after " << next << " tokens";
    for (std::size_t i = 0; i < a.lse.size(); ++i) {
      // The LSE averages the scores' errors; int8's are below .03 each.
      ASSERT_TRUE(std::fabs(a.lse[i] - b.lse[i]) <=
                  (options.arithmetic == Arithmetic::kFp4 ? 0.05 : 0.03));
    }
  }
  EXPECT_EQ(got.corrupt_scales, 0U);
}

class CpuAttend : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Isa, CpuAttend, testing::ValuesIn(cpu_supported_isas()),
                         [](const auto& isa) { return isa.param; });

TEST_P(CpuAttend, FormatsAndHeadDims) {
  for (const Format format :
       {Format::kNvfp4, Format::kMxfp4, Format::kNvfp4Rows, Format::kFp8E4m3, Format::kBf16}) {
    for (const int head_dim : kHeadDims) {
      WorldOptions o;
      o.format = format;
      o.head_dim = head_dim;
      if (format == Format::kMxfp4) o.key_rule = o.value_rule = ScaleRule::kMxfp4Search;
      if (is_tiled(format)) o.outer_exponent = -3;
      o.arithmetic = Arithmetic::kWide;
      compare(o, kChunks, GetParam());
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(CpuAttend, Arithmetics) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const Arithmetic arithmetic : {Arithmetic::kInt8, Arithmetic::kWide, Arithmetic::kFp4}) {
      for (const bool reproducible : {false, true}) {
        WorldOptions o;
        o.format = format;
        if (format == Format::kMxfp4) o.key_rule = o.value_rule = ScaleRule::kMxfp4Search;
        o.arithmetic = arithmetic;
        o.reproducible = reproducible;
        o.page_size = 128;
        // fp4 rounds scores that differ in the last bit to other codes now and then: a flip moves
        // one probability by up to a third of its size.
        compare(o, kChunks, GetParam(), {}, arithmetic == Arithmetic::kFp4 ? 0.02 : 0.0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CpuAttend, GroupSizes) {
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 24, 32, 64}) {
    WorldOptions o;
    o.num_kv_heads = 2;
    o.num_q_heads = 2 * group;
    compare(o, {80, 1, 5}, GetParam());
    if (HasFatalFailure()) return;
  }
}

TEST_P(CpuAttend, PageSizes) {
  for (const int page_size : {64, 128, 192, 256, 512, 1024}) {
    WorldOptions o;
    o.page_size = page_size;
    o.page_padding = 64;
    compare(o, {200, 1, 1, 70, 3}, GetParam());
    if (HasFatalFailure()) return;
  }
}

TEST_P(CpuAttend, Masks) {
  const std::vector<float> sinks = {-3.0F, 0.5F, 3.0F, 40.0F};
  for (const int window : {-1, 0, 15, 16, 63, 64, 100, 1000}) {
    for (const float softcap : {0.0F, 2.0F, 50.0F}) {
      for (const float* sink : {static_cast<const float*>(nullptr), sinks.data()}) {
        WorldOptions o;
        o.tail_tokens = 16;
        o.arithmetic = Arithmetic::kWide;
        compare(o, {90, 1, 3, 20}, GetParam(), {window, softcap, sink});
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(CpuAttend, SixteenBitTensors) {
  for (const DType dtype : {DType::kBf16, DType::kF16}) {
    WorldOptions o;
    o.dtype = dtype;
    o.arithmetic = Arithmetic::kWide;
    // Both outputs are rounded to the type: half an ulp each.
    compare(o, kChunks, GetParam(), {}, dtype == DType::kBf16 ? 0x1p-8 : 0x1p-10);
  }
}

// A step of any shape gives every row the bits that one token at a time gives it.
TEST_P(CpuAttend, ReproducibleModeIsInvariantToChunking) {
  for (const Arithmetic arithmetic : {Arithmetic::kInt8, Arithmetic::kWide}) {
    WorldOptions o;
    o.reproducible = true;
    o.page_size = 128;
    o.arithmetic = arithmetic;
    o.num_q_heads = 6;
    const std::int64_t total = 300;
    const auto run = [&](const std::vector<std::int64_t>& chunks, int threads) {
      World w(o);
      w.backend = cpu_backend(GetParam(), threads);
      const int s = w.add_sequence({4, 9, 2, 7});
      std::vector<float> rows;
      std::int64_t done = 0;
      for (std::size_t i = 0; done < total; ++i) {
        const std::int64_t n = std::min(chunks[i % chunks.size()], total - done);
        const StepResult r = w.step({{s, iota_tokens(static_cast<std::uint32_t>(done), n)}});
        EXPECT_TRUE(r.status.ok()) << r.status.message();
        rows.insert(rows.end(), r.output.begin(), r.output.end());
        done += n;
      }
      EXPECT_EQ(w.directory->totals().missing_tokens, 0U);
      return rows;
    };
    const std::vector<float> single = run({1}, 1);
    EXPECT_EQ(single, run({total}, 2));
    EXPECT_EQ(single, run({17, 1, 3, 64, 8}, 1));
    EXPECT_EQ(single, run({128}, 2));
  }
}

TEST_P(CpuAttend, ResultDoesNotDependOnThreads) {
  WorldOptions o;
  o.num_q_heads = 8;
  std::vector<std::vector<float>> outputs;
  for (const int threads : {1, 2, 5}) {
    World w(o);
    w.backend = cpu_backend(GetParam(), threads);
    const int s = w.add_sequence({7, 3, 11, 1, 20, 9, 8, 2});
    ASSERT_TRUE(w.step({{s, iota_tokens(0, 400)}}).status.ok());
    outputs.push_back(w.step({{s, iota_tokens(400, 1)}}).output);
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_EQ(outputs[0], outputs[2]);
}

TEST(CpuBackend, UnknownInstructionSetIsRefusedWithTheKnownOnes) {
  BackendOptions options;
  options.isa = "AVX9";
  const Result<std::unique_ptr<Backend>> backend = make_backend("cpu", options);
  ASSERT_FALSE(backend.ok());
  EXPECT_EQ(backend.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(backend.status().message().find(cpu_supported_isas().front()), std::string::npos);
}

TEST(CpuBackend, CallersThreadsRunTheItems) {
  BackendOptions options;
  std::int64_t calls = 0;
  options.parallel_for = [&calls](std::int64_t n, const std::function<void(std::int64_t)>& body) {
    calls += n;
    for (std::int64_t i = n - 1; i >= 0; --i) body(i);
  };
  WorldOptions o;
  World w(o);
  Result<std::unique_ptr<Backend>> backend = make_backend("cpu", options);
  ASSERT_TRUE(backend.ok());
  w.backend = backend.take();
  const int s = w.add_sequence({7, 3, 11});
  ASSERT_TRUE(w.step({{s, iota_tokens(0, 100)}}).status.ok());
  EXPECT_GT(calls, 0);
}

}  // namespace
}  // namespace bitdecoding::test
