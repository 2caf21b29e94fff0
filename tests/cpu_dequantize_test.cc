// SPDX-License-Identifier: Apache-2.0
// The CPU backend's dequantized tiles against the reference's gather, bit for bit, over pages of
// random bytes: every code, every scale byte, NaN included.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/dequantize_kernels.h"
#include "backend/cpu/isa.h"
#include "backend/reference/verbs.h"
#include "page/address.h"

namespace bitdecoding {
namespace {

constexpr std::size_t kCanary = 64;  // floats after each output

struct Case {
  Format format = Format::kNvfp4;
  int head_dim = 64;
  bool hadamard = true;
  bool shift = true;
  int outer = 0;
  bool any_scale = false;  // all 256 scale bytes, else those that writers produce
  std::uint32_t seed = 1;
};

// One page of one head with one tile.
class Page {
 public:
  explicit Page(const Case& s) : random_(s.seed) {
    layer.geometry = PageGeometry::make(s.format, FragmentOrder::kQuad, s.head_dim, 64).take();
    layer.num_kv_heads = 1;
    layer.num_q_heads = 1;
    layer.hadamard = s.hadamard;
    outer_ = static_cast<std::int8_t>(s.outer);
    if (scale_block(s.format) != 0) layer.key_outer = layer.value_outer = &outer_;
    std::normal_distribution<float> normal;
    for (int d = 0; d < s.head_dim; ++d) shift_.push_back(normal(random_));
    if (s.shift && is_tiled(s.format)) layer.key_shift = shift_.data();
    for (std::int64_t i = 0; i < layer.geometry.tile_bytes; ++i) {
      bytes.push_back(static_cast<std::uint8_t>(random_()));
    }
    if (!s.any_scale && scale_block(s.format) != 0) make_scales_valid();
  }

  cpu::DequantizeArgs args(int valid, float* key, float* value) const {
    cpu::DequantizeArgs a;
    a.format = layer.geometry.format;
    a.head_dim = layer.geometry.head_dim;
    a.tile = bytes.data();
    a.valid_tokens = valid;
    a.hadamard = layer.hadamard;
    a.key_shift = layer.key_shift;
    a.key_outer = std::ldexp(1.0F, outer_);
    a.value_outer = std::ldexp(1.0F, outer_);
    a.key = key;
    a.value = value;
    return a;
  }

  void gather(std::vector<float>* key, std::vector<float>* value) {
    const std::int32_t page = 0;
    RequestPlan request;
    request.seq_len = 64;
    request.pages = &page;
    request.num_pages = 1;
    AttendParams params;
    params.layer = &layer;
    params.cache = {bytes.data(), 1, layer.geometry.head_bytes, layer.geometry.head_bytes};
    key->assign(static_cast<std::size_t>(64 * layer.geometry.head_dim), -1.0F);
    *value = *key;
    reference::gather(params, request, 0, 0, 64, key->data(), value->data());
  }

  // Scale bytes that are NaN and belong to a valid token: K has one a token and block, V one a
  // channel and block of tokens (row formats: as K).
  int corrupt_scales(int valid) const {
    const PageGeometry& g = layer.geometry;
    const int n = scale_block(g.format);
    if (n == 0) return 0;
    int count = 0;
    for (int row = 0; row < valid; ++row) {
      for (int dim = 0; dim < g.head_dim; ++dim) {
        for (const Side side : {Side::kKey, Side::kValue}) {
          const bool along_tokens = is_tiled(g.format) && side == Side::kValue;
          if ((along_tokens ? row : dim) % n != 0) continue;
          const std::uint8_t byte =
              bytes[static_cast<std::size_t>(scale_address(g, side, row, dim))];
          count += is_corrupt_scale(g.format, byte) ? 1 : 0;
        }
      }
    }
    return count;
  }

  LayerConfig layer;
  std::vector<std::uint8_t> bytes;

 private:
  void make_scales_valid() {
    const PageGeometry& g = layer.geometry;
    for (int row = 0; row < 64; ++row) {
      for (int dim = 0; dim < g.head_dim; ++dim) {
        for (const Side side : {Side::kKey, Side::kValue}) {
          std::uint8_t& byte = bytes[static_cast<std::size_t>(scale_address(g, side, row, dim))];
          byte = g.format == Format::kMxfp4 ? static_cast<std::uint8_t>(107 + byte % 40)
                                            : static_cast<std::uint8_t>(byte % 0x7F);
        }
      }
    }
  }

  std::mt19937 random_;
  std::vector<float> shift_;
  std::int8_t outer_ = 0;
};

bool same(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

void expect_equal_tiles(const Case& s, int valid, const cpu::Isa& isa) {
  SCOPED_TRACE(std::string(isa.name) + " outer " + std::to_string(s.outer) + " hadamard " +
               std::to_string(s.hadamard) + " valid " + std::to_string(valid));
  const cpu::DequantizeKernels* kernels = cpu::dequantize_kernels(isa.target);
  ASSERT_NE(kernels, nullptr);
  Page page(s);
  const auto elements = static_cast<std::size_t>(64 * s.head_dim);
  constexpr float kPoison = 1.0e30F;
  std::vector<float> key(elements + kCanary, kPoison);
  std::vector<float> value(elements + kCanary, kPoison);
  const int corrupt = kernels->tile(page.args(valid, key.data(), value.data()));
  std::vector<float> expected_key;
  std::vector<float> expected_value;
  page.gather(&expected_key, &expected_value);
  EXPECT_EQ(corrupt, page.corrupt_scales(valid));
  int wrong = 0;
  for (int t = 0; t < 64; ++t) {
    for (int d = 0; d < s.head_dim; ++d) {
      const auto row_major = static_cast<std::size_t>(t * s.head_dim + d);
      const float k = t < valid ? expected_key[row_major] : 0.0F;
      const float v = t < valid ? expected_value[row_major] : 0.0F;
      if (!same(key[static_cast<std::size_t>(d * 64 + t)], k)) ++wrong;
      if (!same(value[row_major], v)) ++wrong;
    }
  }
  EXPECT_EQ(wrong, 0);
  for (std::size_t i = elements; i < elements + kCanary; ++i) {
    ASSERT_EQ(key[i], kPoison);
    ASSERT_EQ(value[i], kPoison);
  }
}

class CpuDequantize : public testing::TestWithParam<std::tuple<Format, int>> {
 protected:
  Case base() const {
    Case s;
    s.format = std::get<0>(GetParam());
    s.head_dim = std::get<1>(GetParam());
    return s;
  }
};

TEST_P(CpuDequantize, EqualsTheReferencesGather) {
  for (const cpu::Isa& isa : cpu::supported_isas()) {
    for (const int outer : {0, -30, 21}) {
      for (const bool rotated : {true, false}) {
        Case s = base();
        s.outer = outer;
        s.hadamard = rotated;
        s.shift = outer != 21;
        s.seed = static_cast<std::uint32_t>(outer + 50) * 2 + (rotated ? 1 : 0);
        expect_equal_tiles(s, 64, isa);
      }
    }
  }
}

TEST_P(CpuDequantize, TokensPastTheValidOnesAreZeroWhateverThePageHolds) {
  for (const cpu::Isa& isa : cpu::supported_isas()) {
    for (const int valid : {0, 1, 3, 4, 5, 15, 16, 17, 31, 33, 63}) {
      Case s = base();
      s.any_scale = true;
      s.seed = static_cast<std::uint32_t>(valid);
      expect_equal_tiles(s, valid, isa);
    }
  }
}

TEST_P(CpuDequantize, NanScalesOfValidTokensAreCounted) {
  for (const cpu::Isa& isa : cpu::supported_isas()) {
    Case s = base();
    s.any_scale = true;
    s.seed = 9;
    expect_equal_tiles(s, 64, isa);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuDequantize,
                         testing::Combine(testing::Values(Format::kBf16, Format::kFp8E4m3,
                                                          Format::kNvfp4Rows, Format::kNvfp4,
                                                          Format::kMxfp4),
                                          testing::ValuesIn(kHeadDims)),
                         [](const auto& test) {
                           return std::string(format_name(std::get<0>(test.param))) + "_" +
                                  std::to_string(std::get<1>(test.param));
                         });

}  // namespace
}  // namespace bitdecoding
