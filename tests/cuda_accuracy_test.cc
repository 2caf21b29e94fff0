// SPDX-License-Identifier: Apache-2.0
// The GPU's decode is no less accurate than a BF16 kernel that reads the same pages.
#include <gtest/gtest.h>

#include <cstdio>

#include "attend_accuracy.h"
#include "cuda_compare.h"

namespace bitdecoding::test {
namespace {

using CudaAccuracy = Cuda;

TEST_F(CudaAccuracy, AtMostTwiceTheErrorOfBf16) {
  for (AccuracyCase c : accuracy_cases()) {
    c.options.order = FragmentOrder::kFp16Mma;
    const Accuracy a = measure_accuracy(
        c, [](World* w) { return std::make_unique<CudaHostBackend>(w, Planner::kHost, 24); });
    std::printf("%s: %.2e, BF16 %.2e\n", c.name.c_str(), a.ours, a.bf16);
    EXPECT_TRUE(a.bf16 > 0 && a.bf16 <= 0.05) << c.name << ": BF16 " << a.bf16;
    EXPECT_TRUE(a.ours <= 2.0 * a.bf16) << c.name << ": " << a.ours << ", BF16 " << a.bf16;
  }
}

}  // namespace
}  // namespace bitdecoding::test
