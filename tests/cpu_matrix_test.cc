// SPDX-License-Identifier: Apache-2.0
// The matrix unit's kernels alone: operands against the numbers they stand for, attention against
// double arithmetic. Skipped where the machine has no such unit.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "backend/cpu/aligned_buffer.h"
#include "backend/cpu/dequantize_kernels.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/matrix_kernels.h"
#include "numeric/bf16.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "page/layout.h"
#include "transform/hadamard.h"

namespace bitdecoding::cpu {
namespace {

constexpr std::array<int, 5> kDims = {64, 96, 128, 192, 256};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class MatrixKernelsTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!amx_usable()) GTEST_SKIP() << "this machine has no AMX with BF16";
    kernels = amx_kernels();
    kernels->begin(&saved);
    begun = true;
  }
  void TearDown() override {
    if (begun) kernels->end(&saved);
  }
  std::vector<float> normals(std::size_t n, float deviation = 1.0F) {
    std::normal_distribution<float> normal(0.0F, deviation);
    std::vector<float> x(n);
    for (float& v : x) v = normal(random);
    return x;
  }
  const MatrixKernels* kernels = nullptr;
  MatrixSaved saved;
  bool begun = false;
  std::mt19937 random{17};
};

// Value of a right operand: the sum of its terms.
double right_value(const std::uint16_t* operand, int depth, int columns, int terms, int row,
                   int column) {
  double sum = 0.0;
  for (int term = 0; term < terms; ++term) {
    const std::size_t block = static_cast<std::size_t>(row / 32) * (columns / 16) + column / 16;
    const std::size_t at = static_cast<std::size_t>(term) * depth * columns + block * kMatrixBlock +
                           static_cast<std::size_t>(row % 32 / 2) * 32 + column % 16 * 2 + row % 2;
    sum += decode_bf16(operand[at]);
  }
  return sum;
}

double left_value(const std::uint16_t* operand, int head_dim, int terms, int row, int dim) {
  double sum = 0.0;
  for (int term = 0; term < terms; ++term) {
    const std::size_t block =
        (static_cast<std::size_t>(row / 16) * terms + term) * (head_dim / 32) + dim / 32;
    sum += decode_bf16(operand[block * kMatrixBlock + row % 16 * 32 + dim % 32]);
  }
  return sum;
}

TEST_F(MatrixKernelsTest, RightOperandsKeepEightOrSixteenBits) {
  for (const int columns : {64, 256}) {
    for (const int terms : {1, 2}) {
      const int depth = 64;
      const std::vector<float> in = normals(static_cast<std::size_t>(depth) * columns);
      AlignedBuffer<std::uint16_t> out;
      kernels->pack_right(in.data(), depth, columns, terms, out.reserve(in.size() * terms));
      for (int row = 0; row < depth; ++row) {
        for (int column = 0; column < columns; ++column) {
          const double x = in[static_cast<std::size_t>(row) * columns + column];
          ASSERT_NEAR(right_value(out.data(), depth, columns, terms, row, column), x,
                      std::fabs(x) * (terms == 1 ? 0x1p-8 : 0x1p-16));
        }
      }
    }
  }
}

TEST_F(MatrixKernelsTest, QueriesAreScaledByPowersOfTwoAndPaddedWithZeros) {
  const int rows = 37;
  for (const int head_dim : kDims) {
    for (const float size : {1e-30F, 1.0F, 3e37F}) {
      const std::vector<float> in = normals(static_cast<std::size_t>(rows) * head_dim, size);
      AlignedBuffer<std::uint16_t> out;
      out.reserve(matrix_left_values(64, head_dim, 2));
      std::vector<float> unit(64, -1.0F);
      kernels->pack_query(in.data(), rows, head_dim, 2, out.data(), unit.data());
      for (int row = 0; row < 64; ++row) {
        if (row < rows) {
          int exponent = 0;
          ASSERT_EQ(std::frexp(unit[row], &exponent), 0.5F);
        }
        for (int d = 0; d < head_dim; ++d) {
          const double got = left_value(out.data(), head_dim, 2, row, d);
          if (row >= rows) {
            ASSERT_EQ(got, 0.0);
            continue;
          }
          const double x = in[static_cast<std::size_t>(row) * head_dim + d];
          // Terms below 2^-126 of the unit are lost.
          ASSERT_NEAR(got * unit[row], x, std::fabs(x) * 0x1p-16 + unit[row] * 0x1p-126);
          ASSERT_LT(std::fabs(got), 2.0001);
        }
      }
    }
  }
}

TEST_F(MatrixKernelsTest, RotationIsHadamard) {
  for (const int head_dim : kDims) {
    std::vector<float> rows = normals(static_cast<std::size_t>(3) * head_dim);
    std::vector<float> want = rows;
    for (int r = 0; r < 3; ++r) hadamard(want.data() + std::int64_t{r} * head_dim, head_dim);
    kernels->rotate(rows.data(), 3, head_dim);
    for (std::size_t i = 0; i < rows.size(); ++i) ASSERT_NEAR(rows[i], want[i], 2e-6);
  }
}

// Every code and every scale that is a number: one BF16 term holds their product exactly.
TEST_F(MatrixKernelsTest, TilesOfPagesAreExact) {
  const Isa isa = supported_isas().front();
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int head_dim : kDims) {
      const layout::TileParts parts = layout::tile_parts(format, head_dim);
      std::vector<std::uint8_t> tile(static_cast<std::size_t>(parts.bytes));
      for (auto& byte : tile) byte = static_cast<std::uint8_t>(random());
      for (const auto& [begin, end] : {std::pair{parts.key_scales, parts.value_codes},
                                       std::pair{parts.value_scales, parts.bytes}}) {
        for (std::int64_t i = begin; i < end; ++i) {
          if (format == Format::kNvfp4 && (tile[i] & 0x7F) == kE4m3Nan) tile[i] ^= 1;
          // Products stay inside BF16's normal range.
          if (format == Format::kMxfp4) tile[i] = static_cast<std::uint8_t>(2 + tile[i] % 250);
        }
      }
      AlignedBuffer<float> key;
      AlignedBuffer<float> value;
      AlignedBuffer<std::uint16_t> packed_key;
      AlignedBuffer<std::uint16_t> packed_value;
      const std::size_t n = matrix_right_values(head_dim, 1);
      DequantizeArgs args;
      args.format = format;
      args.head_dim = head_dim;
      args.tile = tile.data();
      args.hadamard = false;
      args.key = key.reserve(n);
      args.value = value.reserve(n);
      ASSERT_EQ(dequantize_kernels(isa.target)->tile(args), 0);
      kernels->unpack_tile(format, head_dim, tile.data(), packed_key.reserve(n),
                           packed_value.reserve(n));
      for (int token = 0; token < kTileTokens; ++token) {
        for (int d = 0; d < head_dim; ++d) {
          ASSERT_EQ(right_value(packed_key.data(), head_dim, kTileTokens, 1, d, token),
                    args.key[d * kTileTokens + token])
              << format_name(format) << " head_dim " << head_dim << " token " << token << " dim "
              << d;
          ASSERT_EQ(right_value(packed_value.data(), kTileTokens, head_dim, 1, token, d),
                    args.value[token * head_dim + d]);
        }
      }
    }
  }
}

// ---- attention ---------------------------------------------------------------------------------

struct Case {
  int head_dim = 64;
  int tiles = 4;
  int terms = 2;
  float softcap = 0.0F;
  bool masked = true;
};

struct Problem {
  std::vector<float> query, key[kMatrixTiles], value[kMatrixTiles];  // key is [head_dim][64]
  std::vector<std::uint64_t> mask[kMatrixTiles];
  std::vector<float> scale, offset;
};

constexpr int kRows = 96;

// Two calls, so that the second rescales what the first left.
void attend_all(const MatrixKernels& kernels, const Case& c, const Problem& p, float* max,
                float* sum, float* out) {
  const std::size_t n = matrix_right_values(c.head_dim, c.terms);
  AlignedBuffer<std::uint16_t> query;
  AlignedBuffer<std::uint16_t> operands;
  operands.reserve(2 * n * kMatrixTiles);
  std::vector<float> unit(kRows);
  kernels.pack_query(p.query.data(), kRows, c.head_dim, c.terms,
                     query.reserve(matrix_left_values(kRows, c.head_dim, c.terms)), unit.data());
  for (int r = 0; r < kRows; ++r) unit[r] *= p.scale[r];
  MatrixTile tiles[kMatrixTiles];
  for (int t = 0; t < c.tiles; ++t) {
    std::uint16_t* key = operands.data() + 2 * n * t;
    kernels.pack_right(p.key[t].data(), c.head_dim, kTileTokens, c.terms, key);
    kernels.pack_right(p.value[t].data(), kTileTokens, c.head_dim, c.terms, key + n);
    tiles[t] = {key, key + n, p.mask[t].data()};
  }
  MatrixState state;
  state.query = query.data();
  state.scale = unit.data();
  state.offset = p.offset.data();
  state.max = max;
  state.sum = sum;
  state.out = out;
  state.rows = kRows;
  state.head_dim = c.head_dim;
  state.query_terms = state.key_terms = state.value_terms = state.probability_terms = c.terms;
  state.softcap = c.softcap;
  const int first = c.tiles / 2;
  if (first > 0) kernels.attend(tiles, first, state);
  kernels.attend(tiles + first, c.tiles - first, state);
}

double score(const Case& c, const Problem& p, int row, int tile, int token) {
  double dot = 0.0;
  for (int d = 0; d < c.head_dim; ++d) {
    dot += double{p.query[static_cast<std::size_t>(row) * c.head_dim + d]} *
           p.key[tile][static_cast<std::size_t>(d) * kTileTokens + token];
  }
  const double x = dot * p.scale[row] + p.offset[row];
  return c.softcap == 0.0F ? x : c.softcap * std::tanh(x / c.softcap);
}

class MatrixAttend : public MatrixKernelsTest {
 protected:
  Problem make_problem(const Case& c) {
    Problem p;
    p.query = normals(static_cast<std::size_t>(kRows) * c.head_dim);
    for (int t = 0; t < c.tiles; ++t) {
      p.key[t] = normals(static_cast<std::size_t>(kTileTokens) * c.head_dim);
      p.value[t] = normals(static_cast<std::size_t>(kTileTokens) * c.head_dim);
      for (int r = 0; r < kRows; ++r) {
        std::uint64_t mask = ~std::uint64_t{0};
        if (c.masked) mask = random() % 4 == 0 ? 0 : std::uint64_t{random()} << 32 | random();
        // One block of rows sees nothing of tile 0, one row nothing at all.
        if ((t == 0 && r < kMatrixRows) || r == 40) mask = 0;
        p.mask[t].push_back(mask);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      p.scale.push_back(1.5F / std::sqrt(static_cast<float>(c.head_dim)));
      p.offset.push_back(0.01F * static_cast<float>(r) - 0.5F);
    }
    return p;
  }
};

void compare(const Case& c, const Problem& p, int row, float max, float sum, const float* out) {
  double top = -std::numeric_limits<double>::infinity();
  std::vector<double> scores(static_cast<std::size_t>(c.tiles) * kTileTokens, top);
  for (int i = 0; i < c.tiles * kTileTokens; ++i) {
    const int tile = i / kTileTokens;
    if (((p.mask[tile][row] >> (i % kTileTokens)) & 1) == 0) continue;
    scores[i] = score(c, p, row, tile, i % kTileTokens);
    top = std::max(top, scores[i]);
  }
  if (!std::isfinite(top)) {
    ASSERT_EQ(max, -kInfinity);
    ASSERT_EQ(sum, 0.0F);
    for (int d = 0; d < c.head_dim; ++d) ASSERT_EQ(out[d], 0.0F);
    return;
  }
  double total = 0.0;
  std::vector<double> want(c.head_dim, 0.0);
  for (int i = 0; i < c.tiles * kTileTokens; ++i) {
    const double weight = std::exp(scores[i] - top);
    total += weight;
    for (int d = 0; d < c.head_dim && weight > 0.0; ++d) {
      want[d] +=
          weight *
          p.value[i / kTileTokens][static_cast<std::size_t>(i % kTileTokens) * c.head_dim + d];
    }
  }
  // A rounding to one BF16 term is 2^-9 at most, to two 2^-17; the score's many add up as a root.
  const double unit = c.terms == 1 ? 0x1p-8 : 0x1p-15;
  ASSERT_NEAR(max + std::log(sum), top + std::log(total), 4.0 * unit);
  double error = 0.0;
  double norm = 0.0;
  for (int d = 0; d < c.head_dim; ++d) {
    error += std::pow(out[d] / sum - want[d] / total, 2);
    norm += std::pow(want[d] / total, 2);
  }
  ASSERT_LE(std::sqrt(error / norm), 4.0 * unit) << "row " << row;
}

TEST_F(MatrixAttend, EqualsDoubleArithmetic) {
  for (const int head_dim : kDims) {
    for (const int tiles : {1, 2, 3, 4}) {
      for (const int terms : {1, 2}) {
        for (const float softcap : {0.0F, 3.0F}) {
          const Case c{head_dim, tiles, terms, softcap, tiles % 2 == 0};
          SCOPED_TRACE(testing::Message() << "head_dim " << head_dim << " tiles " << tiles
                                          << " terms " << terms << " softcap " << softcap);
          const Problem p = make_problem(c);
          std::vector<float> max(kRows, -kInfinity);
          std::vector<float> sum(kRows, 0.0F);
          std::vector<float> out(static_cast<std::size_t>(kRows) * head_dim, 0.0F);
          attend_all(*kernels, c, p, max.data(), sum.data(), out.data());
          for (int r = 0; r < kRows; ++r) {
            compare(c, p, r, max[r], sum[r], out.data() + std::int64_t{r} * head_dim);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

TEST_F(MatrixAttend, RowsDoNotDependOnTheirCompany) {
  const Case c{128, 4, 1, 0.0F, true};
  Problem p = make_problem(c);
  std::vector<float> max[2], sum[2], out[2];
  for (int i = 0; i < 2; ++i) {
    max[i].assign(kRows, -kInfinity);
    sum[i].assign(kRows, 0.0F);
    out[i].assign(static_cast<std::size_t>(kRows) * c.head_dim, 0.0F);
    attend_all(*kernels, c, p, max[i].data(), sum[i].data(), out[i].data());
    // All rows but number 70 change; what it sees does not, nor which tiles its block sees.
    for (int r = 0; r < kRows; ++r) {
      if (r == 70) continue;
      for (int d = 0; d < c.head_dim; ++d) {
        p.query[static_cast<std::size_t>(r) * c.head_dim + d] *= -3.0F;
      }
    }
  }
  EXPECT_EQ(max[0][70], max[1][70]);
  EXPECT_EQ(sum[0][70], sum[1][70]);
  for (int d = 0; d < c.head_dim; ++d) {
    ASSERT_EQ(out[0][std::size_t{70} * c.head_dim + d], out[1][std::size_t{70} * c.head_dim + d]);
  }
  EXPECT_NE(max[0][71], max[1][71]);
}

TEST_F(MatrixKernelsTest, WhatAnotherUserConfiguredIsKept) {
  MatrixSaved inner;
  kernels->begin(&inner);  // finds SetUp's configuration
  EXPECT_EQ(inner.config[0], 1);
  kernels->end(&inner);
  kernels->begin(&inner);
  EXPECT_EQ(inner.config[0], 1) << "end dropped the configuration that begin found";
  kernels->end(&inner);
  kernels->end(&saved);
  kernels->begin(&saved);
  EXPECT_EQ(saved.config[0], 0) << "the first end released the unit";
}

}  // namespace
}  // namespace bitdecoding::cpu
