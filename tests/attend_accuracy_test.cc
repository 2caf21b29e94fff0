// SPDX-License-Identifier: Apache-2.0
// The CPU backend's decode beside a BF16 kernel that reads the same pages.
#include "attend_accuracy.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace bitdecoding::test {
namespace {

// A BF16 kernel rounds keys, values and probabilities to 8 bits. `wide` keeps 14 of each factor.
void expect_accurate(Arithmetic arithmetic, double most) {
  for (AccuracyCase c : accuracy_cases()) {
    c.options.arithmetic = arithmetic;
    const Accuracy a = measure_accuracy(c, [](World*) { return make_backend("cpu", {}).take(); });
    std::printf("%s: %.2e, BF16 %.2e\n", c.name.c_str(), a.ours, a.bf16);
    EXPECT_TRUE(a.bf16 > 0 && a.bf16 <= 0.05) << c.name << ": BF16 " << a.bf16;
    EXPECT_TRUE(a.ours <= most * a.bf16) << c.name << ": " << a.ours << ", BF16 " << a.bf16;
  }
}

TEST(AttendAccuracy, CpuWide) { expect_accurate(Arithmetic::kWide, 2.0); }

// Seven bits of a query block's maximum and of a tile's largest probability, where BF16 has eight
// of each number: about four times its error.
TEST(AttendAccuracy, CpuInt8) { expect_accurate(Arithmetic::kInt8, 5.0); }

}  // namespace
}  // namespace bitdecoding::test
