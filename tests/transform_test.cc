// SPDX-License-Identifier: Apache-2.0
// Hadamard rotation and the two-term query.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include "bitdecoding/format.h"
#include "transform/hadamard.h"
#include "transform/two_term.h"

namespace bitdecoding {
namespace {

TEST(Hadamard, MatrixIsAsDefined) {
  for (const int dim : kHeadDims) {
    const int block = hadamard_block(dim);
    EXPECT_EQ(dim % block, 0);
    EXPECT_TRUE(std::has_single_bit(static_cast<unsigned>(block)));
    EXPECT_EQ(hadamard_scale(block), static_cast<float>(1.0 / std::sqrt(block)));
    for (int j = 0; j < dim; ++j) {
      std::vector<float> x(static_cast<std::size_t>(dim), 0.0F);
      x[static_cast<std::size_t>(j)] = 1.0F;
      hadamard(x.data(), dim);
      for (int i = 0; i < dim; ++i) {
        const bool same_block = i / block == j / block;
        const bool odd =
            (std::popcount(static_cast<unsigned>(i & j) % static_cast<unsigned>(block)) & 1) != 0;
        const float c = hadamard_scale(block);
        EXPECT_EQ(x[static_cast<std::size_t>(i)], same_block ? (odd ? -c : c) : 0.0F);
      }
    }
  }
}

TEST(Hadamard, IsOrthonormalAndItsOwnInverse) {
  std::mt19937_64 engine(1);
  std::normal_distribution<float> normal;
  for (const int dim : kHeadDims) {
    for (int trial = 0; trial < 50; ++trial) {
      std::vector<float> x(static_cast<std::size_t>(dim));
      std::vector<float> y(x.size());
      double before = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = normal(engine);
        y[i] = normal(engine);
        before += double{x[i]} * y[i];
      }
      std::vector<float> hx = x;
      std::vector<float> hy = y;
      hadamard(hx.data(), dim);
      hadamard(hy.data(), dim);
      double after = 0;
      for (std::size_t i = 0; i < x.size(); ++i) after += double{hx[i]} * hy[i];
      // log2(dim) + 1 roundings of 2^-24 each on values whose norms are about sqrt(dim).
      const double tolerance = 10 * 0x1p-24 * dim;
      EXPECT_TRUE(std::fabs(after - before) <= tolerance);
      hadamard(hx.data(), dim);
      for (std::size_t i = 0; i < x.size(); ++i) {
        EXPECT_TRUE(std::fabs(hx[i] - x[i]) <= 20 * 0x1p-24 * std::sqrt(dim));
      }
    }
  }
}

TEST(TwoTerm, SecondTermTakesWhatTheFirstLeaves) {
  std::mt19937_64 engine(2);
  std::normal_distribution<float> normal;
  double norm = 0;
  double error[3] = {0, 0, 0};
  for (int trial = 0; trial < 400; ++trial) {
    std::vector<float> q(128);
    for (float& v : q) v = normal(engine);
    for (int terms = 1; terms <= 2; ++terms) {
      std::vector<float> one(128, NAN);
      std::vector<float> two(128, NAN);
      split_two_term(q.data(), 128, terms, one.data(), two.data());
      for (std::size_t i = 0; i < q.size(); ++i) {
        if (terms == 1) {
          EXPECT_EQ(two[i], 0.0F);
        }
        const double d = double{q[i]} - one[i] - two[i];
        error[terms] += d * d;
      }
    }
    for (const float v : q) norm += double{v} * v;
  }
  EXPECT_TRUE(std::fabs(std::sqrt(error[1] / norm) - 0.095) <= 0.003);
  // Measured .0136; the residual is no longer Gaussian, so this is a bound and not a figure.
  EXPECT_TRUE(std::sqrt(error[2] / norm) <= 0.02);
}

TEST(TwoTerm, ZeroAndHugeQueriesStayFinite) {
  for (const float m : {0.0F, 1e-30F, 1e-3F, 1e30F}) {
    std::vector<float> q(16, m);
    std::vector<float> one(16, NAN);
    std::vector<float> two(16, NAN);
    split_two_term(q.data(), 16, 2, one.data(), two.data());
    for (std::size_t i = 0; i < q.size(); ++i) {
      EXPECT_TRUE(std::isfinite(one[i]) && std::isfinite(two[i]));
    }
  }
}

}  // namespace
}  // namespace bitdecoding
