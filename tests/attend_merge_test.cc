// SPDX-License-Identifier: Apache-2.0
// Parts of a softmax and their merge.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <utility>

#include "attend/softmax.h"

namespace bitdecoding {
namespace {

TEST(Merge, EmptyPartsAreTheIdentity) {
  constexpr double kEmpty = -INFINITY;
  const auto none = merge_weights(kEmpty, kEmpty);
  EXPECT_EQ(none.a, 0.0);
  EXPECT_EQ(none.b, 0.0);
  EXPECT_EQ(none.lse, kEmpty);
  for (const double lse : {-1e4, -3.0, 0.0, 2.5, 1e4}) {
    const auto left = merge_weights(lse, kEmpty);
    EXPECT_EQ(left.a, 1.0);
    EXPECT_EQ(left.b, 0.0);
    EXPECT_EQ(left.lse, lse);
    const auto right = merge_weights(kEmpty, lse);
    EXPECT_EQ(right.b, 1.0);
    EXPECT_EQ(right.lse, lse);
  }
  EXPECT_TRUE(std::isnan(merge_weights<double>(NAN, 1.0).lse));
  EXPECT_TRUE(std::isnan(merge_weights<double>(1.0, NAN).a));
}

TEST(Merge, ThreePartsInAnyOrderAndWithAnySubsetEmpty) {
  const double lses[] = {-1e4, -2.0, 0.5, 3.0, 1e4, -INFINITY};
  for (const double a : lses) {
    for (const double b : lses) {
      for (const double c : lses) {
        const double x[3] = {1.0, -2.0, 5.0};
        const double l[3] = {a, b, c};
        auto merge = [&](int i, int j, int k) {
          const auto first = merge_weights(l[i], l[j]);
          const double out = first.a * x[i] + first.b * x[j];
          const auto second = merge_weights(first.lse, l[k]);
          return std::pair(second.a * out + second.b * x[k], second.lse);
        };
        const auto want = merge(0, 1, 2);
        for (const auto& order : {std::array{0, 2, 1}, std::array{1, 2, 0}, std::array{2, 1, 0}}) {
          const auto got = merge(order[0], order[1], order[2]);
          EXPECT_TRUE(std::fabs(got.first - want.first) <= 1e-12);
          EXPECT_TRUE(got.second == want.second || std::fabs(got.second - want.second) <= 1e-9);
        }
      }
    }
  }
}

}  // namespace
}  // namespace bitdecoding
