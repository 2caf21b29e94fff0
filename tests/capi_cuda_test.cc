// SPDX-License-Identifier: Apache-2.0
// The C ABI over device memory, on a GPU: the same steps through the reference backend on the host.
// Over the shared library, as callers use it. Skips itself where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "capi_cuda_world.h"

namespace bitdecoding::capi_cuda {
namespace {

// Relative L2; 1e-3 is what cuda_attend_test promises of decode.
void expect_close(const std::vector<float>& got, const std::vector<float>& expected) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - expected[i], 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  EXPECT_LE(std::sqrt(error / norm), 1e-3);
}

class CapiCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) GTEST_SKIP() << "no GPU";
  }
  std::mt19937 random{7};
};

TEST_F(CapiCuda, StepsAreTheReferences) {
  Reference reference;
  Gpu gpu;
  const Step prompt({100, 60}, {100, 60}, &random);
  reference.run(prompt);
  gpu.build(prompt);
  gpu.launch(prompt);
  for (int i = 1; i <= 40; ++i) {
    SCOPED_TRACE(i);
    const Step step({1, 1}, {100 + i, 60 + i}, &random);
    const auto expected = reference.run(step);
    gpu.build(step);
    gpu.launch(step);
    expect_close(gpu.output(step), expected);
  }
  const Step verify({4, 2}, {144, 102}, &random);
  const auto expected = reference.run(verify);
  gpu.build(verify);
  gpu.launch(verify);
  expect_close(gpu.output(verify), expected);
}

TEST_F(CapiCuda, AGraphIsReplayedForFurtherSteps) {
  Reference reference;
  Gpu gpu;
  const Step prompt({100, 60}, {100, 60}, &random);
  reference.run(prompt);
  gpu.build(prompt);
  gpu.launch(prompt);
  cudaGraphExec_t exec = nullptr;
  for (int i = 1; i <= 20; ++i) {
    SCOPED_TRACE(i);
    const Step step({1, 1}, {100 + i, 60 + i}, &random);
    const auto expected = reference.run(step);
    gpu.build(step);
    if (exec == nullptr) {
      cudaGraph_t graph = nullptr;
      ASSERT_EQ(cudaStreamBeginCapture(gpu.stream(), cudaStreamCaptureModeThreadLocal),
                cudaSuccess);
      gpu.launch(step);
      ASSERT_EQ(cudaStreamEndCapture(gpu.stream(), &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      cudaGraphDestroy(graph);
    }
    ASSERT_EQ(cudaGraphLaunch(exec, gpu.stream()), cudaSuccess);
    expect_close(gpu.output(step), expected);
  }
  cudaGraphExecDestroy(exec);
}

TEST_F(CapiCuda, GatherGivesRowsBack) {
  Gpu gpu;
  const Step prompt({128, 60}, {128, 60}, &random);
  gpu.build(prompt);
  gpu.launch(prompt);
  const std::size_t row = std::size_t{kKvHeads} * kHeadDim;
  for (const auto [begin, end] : {std::pair(0, 128), {5, 6}, {63, 120}}) {
    const auto rows = gpu.gather(begin, end);
    for (int side = 0; side < 2; ++side) {
      const auto& from = side == 0 ? prompt.key : prompt.value;
      double error = 0;
      double norm = 0;
      for (int p = begin; p < end; ++p) {
        for (std::size_t e = 0; e < row; ++e) {
          const float got =
              rows[(static_cast<std::size_t>(side * (end - begin) + p - begin)) * row + e];
          const float x = from[static_cast<std::size_t>(p) * row + e];
          // The first sixteen positions are in BF16: eight bits.
          if (p < 16) EXPECT_NEAR(got, x, std::abs(x) * 0x1p-8) << p;
          error += (got - x) * (got - x);
          norm += x * x;
        }
      }
      EXPECT_LE(error, norm * 0.012) << side;  // relative MSE of NVFP4 on N(0, 1): .009
    }
  }
}

TEST_F(CapiCuda, MergeOfPartsIsTheWhole) {
  Gpu gpu;
  // Weights 3 and 1 of one token and head; the second head's second part is empty.
  Device<float> a(2 * kHeadDim), b(2 * kHeadDim), lse_a(2), lse_b(2), out(2 * kHeadDim), lse(2);
  a.put(std::vector<float>(2 * kHeadDim, 1.0F));
  b.put(std::vector<float>(2 * kHeadDim, 5.0F));
  lse_a.put({std::log(3.0F), 2.0F});
  lse_b.put({0.0F, -INFINITY});
  auto m = sized<bd_merge_params>();
  m.runtime = gpu.runtime();
  m.num_tokens = 1;
  m.num_heads = 2;
  m.head_dim = kHeadDim;
  m.dtype = BD_F32;
  m.a = a.get();
  m.b = b.get();
  m.lse_a = lse_a.get();
  m.lse_b = lse_b.get();
  m.out = out.get();
  m.lse = lse.get();
  ASSERT_EQ(bd_cuda_merge(&m, gpu.stream()), BD_OK) << bd_last_error();
  ASSERT_EQ(cudaStreamSynchronize(gpu.stream()), cudaSuccess);
  EXPECT_NEAR(out.take()[0], 2.0F, 1e-5F);
  EXPECT_NEAR(out.take()[kHeadDim], 1.0F, 1e-6F);
  EXPECT_NEAR(lse.take()[0], std::log(4.0F), 1e-5F);
  EXPECT_NEAR(lse.take()[1], 2.0F, 1e-6F);
}

TEST_F(CapiCuda, CountersAreReadFromTheDevice) {
  Gpu gpu;
  Step prompt({100, 60}, {100, 60}, &random);
  prompt.key[3] = NAN;
  gpu.build(prompt);
  gpu.launch(prompt);
  auto counters = sized<bd_counters>();
  ASSERT_EQ(bd_counters_get(gpu.runtime(), &counters), BD_OK) << bd_last_error();
  EXPECT_EQ(counters.non_finite, 1U);
  EXPECT_EQ(counters.steps, 1U);
}

TEST_F(CapiCuda, MemoryIsKnownBefore) {
  Gpu gpu;
  auto o = cuda_steps_options();
  o.steps.num_pages = 1 << 20;
  auto memory = sized<bd_cuda_memory>();
  ASSERT_EQ(bd_cuda_memory_get(gpu.runtime(), &o, &memory), BD_OK) << bd_last_error();
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t total = 0;
  cudaMemGetInfo(&before, &total);
  bd_steps* steps = nullptr;
  ASSERT_EQ(bd_cuda_steps_create(gpu.runtime(), &o, &steps), BD_OK) << bd_last_error();
  cudaMemGetInfo(&after, &total);
  // The driver hands out pieces of 2 MiB.
  EXPECT_NEAR(static_cast<double>(before - after), static_cast<double>(memory.steps_bytes),
              8 << 20);
  EXPECT_GT(memory.attend_bytes, 0);
  bd_steps_destroy(steps);
}

TEST_F(CapiCuda, HostCallsAndForeignHandlesAreRefused) {
  Gpu gpu;
  const auto o = steps_options();
  bd_steps* steps = nullptr;
  EXPECT_EQ(bd_steps_create(gpu.runtime(), &o, &steps), BD_UNSUPPORTED);
  EXPECT_HAS(bd_last_error(), "bd_cuda_steps_create");
  auto c = cuda_steps_options();
  c.num_windows = 5;
  EXPECT_EQ(bd_cuda_steps_create(gpu.runtime(), &c, &steps), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "num_windows is 5");
  Runtime host(kWideRecipe);
  c = cuda_steps_options();
  EXPECT_EQ(bd_cuda_steps_create(host.handle, &c, &steps), BD_UNSUPPORTED);
  EXPECT_HAS(bd_last_error(), "make it with the backend cuda");
}

}  // namespace
}  // namespace bitdecoding::capi_cuda
