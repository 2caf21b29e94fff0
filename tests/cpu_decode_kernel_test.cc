// SPDX-License-Identifier: Apache-2.0
// The decode kernel of every instruction set of this machine against plain double arithmetic over
// the dequantized tile, with the kernel's own integer probabilities.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/decode_kernels.h"
#include "backend/cpu/isa.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "numeric/e8m0.h"
#include "page/layout.h"

namespace bitdecoding::cpu {
namespace {

constexpr FragmentOrder kOrder = FragmentOrder::kQuad;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kTokens = 64;
constexpr int kTermWeight = 128;
constexpr int kTiles = 3;

struct Case {
  Format format;
  int head_dim, rows, terms;
  float softcap;
  bool masked;
};

struct Aligned {
  explicit Aligned(std::int64_t bytes) : store(static_cast<std::size_t>(bytes) + 64) {}
  std::uint8_t* data() {
    const auto at = reinterpret_cast<std::uintptr_t>(store.data());
    return store.data() + ((at + 63) / 64 * 64 - at);
  }
  std::vector<std::uint8_t> store;
};

// Tiles of random codes with block scales over many magnitudes; rows of query integers.
struct Problem {
  Problem(const Case& c, unsigned seed) : spec(c), random(seed) {
    const layout::TileParts parts = layout::tile_parts(c.format, c.head_dim);
    for (auto& tile : tiles) {
      tile.resize(static_cast<std::size_t>(parts.bytes));
      for (auto& byte : tile) byte = static_cast<std::uint8_t>(random());
      // Columns past head_dim hold whatever: the kernel must not read them.
      const bool extreme = &tile == &tiles[0];
      for (std::int64_t i = parts.key_scales; i < parts.value_codes; ++i) {
        tile[i] = scale_byte(extreme);
      }
      for (std::int64_t i = parts.value_scales; i < parts.bytes; ++i) tile[i] = scale_byte(extreme);
    }
    const int limit = c.terms == 1 ? 127 : 127 * kTermWeight + 63;
    for (int r = 0; r < c.rows; ++r) {
      std::vector<int> row(static_cast<std::size_t>(c.head_dim));
      for (int& q : row) q = std::uniform_int_distribution<int>(-limit, limit)(random);
      row[0] = limit;  // the extremes are in every row
      row[1] = -limit;
      levels.push_back(row);
      offset.push_back(std::uniform_real_distribution<float>(-1.0F, 1.0F)(random));
      scale.push_back(0.0F);
      double top = 0.0;
      for (int tile = 0; tile < kTiles; ++tile) {
        for (int t = 0; t < kTokens; ++t) top = std::max(top, std::fabs(dot(tile, r, t).sum));
      }
      scale[r] = static_cast<float>(9.0 / top);
    }
    for (auto& tile : masks) {
      for (auto& mask : tile) {
        mask = (std::uint64_t{random()} << 32) | random();
        if (random() % 4 == 0) mask = 0;
      }
    }
  }

  // Extreme: from zero and subnormals to large ones; else within 2^6.
  std::uint8_t scale_byte(bool extreme) {
    if (spec.format == Format::kMxfp4) {
      return static_cast<std::uint8_t>(extreme ? 100 + random() % 40 : 124 + random() % 6);
    }
    return static_cast<std::uint8_t>(extreme ? random() % 0x7F : 0x20 + random() % 0x30);
  }
  double block_scale(const std::vector<std::uint8_t>& tile, std::int64_t at) const {
    // The kernel's E4M3 scales are in units of 1 / 256.
    const std::uint8_t byte = tile[static_cast<std::size_t>(at)];
    return spec.format == Format::kMxfp4 ? decode_e8m0(byte) : decode_e4m3(byte) / 256.0;
  }
  static double code(const std::vector<std::uint8_t>& tile, layout::Nibble n) {
    return kE2m1TwiceValues[(tile[static_cast<std::size_t>(n.byte)] >> n.shift) & 15];
  }
  // The kernel's integer scales are multiples of 2^-bits of the fragment row's largest (at its
  // leading bit); a scale with four significant bits that is at least 2^(3 - bits) of it is exact.
  static double scale_error(double scale, double largest, int blocks) {
    const int bits = blocks <= 4 ? 13 : (blocks <= 8 ? 12 : 11);
    const double step = std::ldexp(1.0, std::ilogb(largest) - bits);
    return std::fmod(scale, step) == 0.0 ? 0.0 : step;
  }
  // The scaled integer product of row r and token t, the sum of its terms' magnitudes, and what the
  // rounding of scales may add.
  struct Dot {
    double sum = 0.0, size = 0.0, rounding = 0.0;
  };
  Dot dot(int tile, int r, int t) const {
    Dot dot;
    double largest = 0.0;
    for (int d = 0; d < spec.head_dim; d += 16) largest = std::max(largest, key_scale(tile, t, d));
    for (int d = 0; d < spec.head_dim; ++d) {
      const double q = levels[r][d] * code(tiles[tile], layout::key_code(spec.format, kOrder,
                                                                         spec.head_dim, t, d));
      const double unit = key_scale(tile, t, d);
      dot.sum += q * unit;
      dot.size += std::fabs(q * unit);
      dot.rounding += std::fabs(q) * scale_error(unit, largest, (spec.head_dim + 31) / 32 * 2);
    }
    return dot;
  }
  double key_scale(int tile, int t, int d) const {
    return block_scale(tiles[tile], layout::key_scale(spec.format, kOrder, spec.head_dim, t, d));
  }
  // Value element and its error for the same reason, per level. Row r of a tile seen in part counts
  // only blocks that it sees.
  std::pair<double, double> value(int tile, int r, int t, int d) const {
    const int block = spec.format == Format::kMxfp4 ? 32 : 16;
    double largest = 0.0;
    for (int u = 0; u < kTokens; ++u) {
      if (visible(tile, r, u)) largest = std::max(largest, value_scale(tile, u / block * block, d));
    }
    const double c =
        code(tiles[tile], layout::value_code(spec.format, kOrder, spec.head_dim, t, d));
    const double unit = value_scale(tile, t, d);
    return {c * unit, largest == 0.0 ? 0.0 : std::fabs(c) * scale_error(unit, largest, 4)};
  }
  double value_scale(int tile, int t, int d) const {
    return block_scale(tiles[tile], layout::value_scale(spec.format, kOrder, spec.head_dim, t, d));
  }
  bool visible(int tile, int r, int t) const {
    return !spec.masked || ((masks[tile][r] >> t) & 1U) != 0;
  }

  Case spec;
  std::mt19937 random;
  std::vector<std::uint8_t> tiles[kTiles];
  std::vector<std::vector<int>> levels;
  std::vector<float> scale, offset;
  std::uint64_t masks[kTiles][kMaxWork] = {};
};

struct Result {
  std::vector<float> max, sum, out;
};

// Runs the kernel for rows [first, first + rows) of the problem.
Result run(const DecodeKernels& kernels, Problem& p, int first, int rows, bool widen) {
  const Case& c = p.spec;
  const int work = rows * c.terms;
  const int blocks = 4 * layout::key_column_blocks(c.head_dim);
  std::vector<std::int32_t> quads(static_cast<std::size_t>(blocks) * 4 * work, 0);
  std::vector<std::int32_t> bias(static_cast<std::size_t>(blocks) * work, 0);
  for (int r = 0; r < rows; ++r) {
    for (int d = 0; d < c.head_dim; ++d) {
      const int q = p.levels[first + r][d];
      const int high = c.terms == 1 ? q : (q + kTermWeight / 2) >> 7;
      const int term[2] = {high, q - high * kTermWeight};
      for (int t = 0; t < c.terms; ++t) {
        const int w = r * c.terms + t;
        const std::uint32_t byte = static_cast<std::uint8_t>(term[t]);
        quads[(d / 4) * work + w] |= static_cast<std::int32_t>(byte << (8 * (d % 4)));
        bias[(d / 16) * work + w] -= 12 * term[t];
      }
    }
  }
  for (auto& b : bias) b &= 0xFFFF;
  DecodeQuery query{rows, c.terms, quads.data(), bias.data(), &p.scale[first], &p.offset[first]};
  Aligned wide(kernels.wide_query_bytes(c.head_dim, work));
  if (widen) {
    kernels.widen_query(c.head_dim, query, wide.data());
    query.wide = wide.data();
  }
  Result result{std::vector<float>(rows, -kInfinity), std::vector<float>(rows, 0.0F),
                std::vector<float>(static_cast<std::size_t>(rows) * c.head_dim, 0.0F)};
  const DecodeState state{result.max.data(), result.sum.data(), result.out.data()};
  const DecodeContext context{c.format, c.head_dim, c.softcap, 2.0F};
  for (int i = 0; i < kTiles; ++i) {
    DecodeTile tile;
    tile.tile = p.tiles[i].data();
    tile.prefetch = i + 1 < kTiles ? p.tiles[i + 1].data() : nullptr;
    tile.full = !c.masked;
    for (int r = 0; r < rows; ++r) tile.mask[r] = p.masks[i][first + r];
    kernels.tile(context, query, tile, state);
  }
  return result;
}

// Integer probabilities as the kernel rounds them, in double; `slack` bounds how far each may be
// off: a whole level where the unrounded one is within the arithmetic's error of a half.
struct Levels {
  double top = -kInfinity;
  double error = 0.0;  // of the scores
  double value[kTokens] = {}, slack[kTokens] = {};
};

Levels tile_levels(const Problem& p, int tile, int r) {
  const double count = p.spec.terms == 1 ? 127.0 : 127.0 * kTermWeight + 127.0;
  double score[kTokens], error[kTokens];
  Levels levels;
  for (int t = 0; t < kTokens; ++t) {
    const Problem::Dot dot = p.dot(tile, r, t);
    double x = dot.sum * p.scale[r] + p.offset[r];
    // Integers to float (two terms: twice), times unit, scale, plus offset: eight roundings at
    // most.
    error[t] = 8 * 6e-8 * (dot.size * p.scale[r] + 1.0) + dot.rounding * p.scale[r];
    if (p.spec.softcap != 0.0F) {
      x = p.spec.softcap * std::tanh(x / p.spec.softcap);
      error[t] += 1e-6 * p.spec.softcap;
    }
    score[t] = p.visible(tile, r, t) ? x : -kInfinity;
    levels.top = std::max(levels.top, score[t]);
  }
  if (levels.top == -kInfinity) return levels;
  const double top_error = *std::max_element(error, error + kTokens);
  levels.error = top_error;
  for (int t = 0; t < kTokens; ++t) {
    const double exact = count * std::exp(score[t] - levels.top);
    levels.value[t] = std::nearbyint(exact);
    // The polynomial's error (exp2_levels), and the scores'.
    const double off = exact * ((p.spec.terms == 1 ? 7.6e-5 : 3e-7) + error[t] + top_error) + 1e-5;
    const double to_half = 0.5 - std::fabs(exact - levels.value[t]);
    levels.slack[t] = to_half > off ? 0.0 : std::ceil(off);
  }
  return levels;
}

void expect_matches(const Problem& p, int first, const Result& got, int rows) {
  const Case& c = p.spec;
  const double count = c.terms == 1 ? 127.0 : 127.0 * kTermWeight + 127.0;
  for (int r = 0; r < rows; ++r) {
    Levels levels[kTiles];
    double top = -kInfinity;
    double error = 0.0;
    for (int i = 0; i < kTiles; ++i) {
      levels[i] = tile_levels(p, i, first + r);
      top = std::max(top, levels[i].top);
      error = std::max(error, levels[i].error);
    }
    if (top == -kInfinity) {
      EXPECT_EQ(got.max[r], -kInfinity);
      EXPECT_EQ(got.sum[r], 0.0F);
    } else {
      EXPECT_TRUE(std::fabs(got.max[r] - top) <= 1e-5 + error) << got.max[r] << " for " << top;
    }
    double sum = 0.0, sum_slack = 0.0;
    std::vector<double> out(c.head_dim, 0.0), slack(c.head_dim, 0.0);
    for (int i = 0; i < kTiles && top != -kInfinity; ++i) {
      // The kernel's maximum may differ from `top`, by less than 1e-4: the units of what it
      // reports.
      const double weight = std::exp(levels[i].top - got.max[r]) / count;
      for (int t = 0; t < kTokens; ++t) {
        const double p_t = weight * levels[i].value[t];
        // The tile's maximum is off by its scores' error; weights go through float exponentials and
        // roundings, 2e-5 in all.
        const double p_slack = weight * levels[i].slack[t] + (2e-5 + levels[i].error) * p_t;
        sum += p_t;
        sum_slack += p_slack;
        for (int d = 0; d < c.head_dim; ++d) {
          const auto [v, rounding] = p.value(i, first + r, t, d);
          out[d] += p_t * 2.0 * v;
          slack[d] += 2.0 * (p_slack * std::fabs(v) + p_t * rounding);
        }
      }
    }
    EXPECT_TRUE(std::fabs(got.sum[r] - sum) <= sum_slack) << got.sum[r] << " for " << sum;
    for (int d = 0; d < c.head_dim; ++d) {
      const float x = got.out[static_cast<std::size_t>(r) * c.head_dim + d];
      ASSERT_TRUE(std::fabs(x - out[d]) <= slack[d])
          << "row " << r << " dim " << d << ": " << x << " for " << out[d] << " +- " << slack[d];
    }
  }
}

using Parameters = std::tuple<Format, int, int>;  // format, head_dim, terms

class DecodeKernel : public testing::TestWithParam<Parameters> {
 protected:
  template <class Body>
  void each(Body body) {
    const auto [format, head_dim, terms] = GetParam();
    for (const Isa& isa : supported_isas()) {
      const DecodeKernels* kernels = decode_kernels(isa.decode_target);
      ASSERT_NE(kernels, nullptr) << isa.name;
      for (int rows = 1; rows * terms <= kernels->max_work; ++rows) {
        for (const bool masked : {false, true}) {
          const float softcap = masked == (rows % 2 == 1) ? 0.0F : 5.0F;
          SCOPED_TRACE(std::string(isa.name) + " rows " + std::to_string(rows) +
                       (masked ? " masked" : "") + (softcap != 0.0F ? " softcap" : ""));
          Problem problem({format, head_dim, rows, terms, softcap, masked},
                          static_cast<unsigned>(head_dim + 7 * rows + masked));
          body(*kernels, problem, rows);
        }
      }
    }
  }
};

TEST_P(DecodeKernel, EqualsDoubleArithmetic) {
  each([](const DecodeKernels& kernels, Problem& problem, int rows) {
    expect_matches(problem, 0, run(kernels, problem, 0, rows, true), rows);
  });
}

TEST_P(DecodeKernel, RowsDoNotDependOnTheirCompany) {
  each([](const DecodeKernels& kernels, Problem& problem, int rows) {
    const int head_dim = problem.spec.head_dim;
    const Result all = run(kernels, problem, 0, rows, true);
    for (int r = 0; r < rows; ++r) {
      const Result one = run(kernels, problem, r, 1, false);  // without the broadcast query, too
      EXPECT_EQ(std::memcmp(&one.max[0], &all.max[r], sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(&one.sum[0], &all.sum[r], sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(one.out.data(), all.out.data() + std::size_t(r) * head_dim,
                            sizeof(float) * head_dim),
                0)
          << "row " << r;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, DecodeKernel,
                         testing::Combine(testing::Values(Format::kNvfp4, Format::kMxfp4),
                                          testing::Values(64, 96, 128, 192, 256),
                                          testing::Values(1, 2)));

}  // namespace
}  // namespace bitdecoding::cpu
