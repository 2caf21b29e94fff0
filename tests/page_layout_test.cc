// SPDX-License-Identifier: Apache-2.0
// Every nibble and scale byte of a page has one address, and every address one element.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <tuple>
#include <vector>

#include "bitdecoding/page.h"
#include "page/address.h"

namespace bitdecoding {
namespace {

PageGeometry geometry(Format f, FragmentOrder o, int head_dim, int page_size) {
  return PageGeometry::make(f, o, head_dim, page_size).take();
}

constexpr Format kFormats[] = {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4,
                               Format::kMxfp4};

constexpr FragmentOrder kOrders[] = {FragmentOrder::kFp4Mma, FragmentOrder::kQuad,
                                     FragmentOrder::kFp16Mma};

// Marks [byte, byte + n) halves; every half must be met exactly once in the end.
class Coverage {
 public:
  explicit Coverage(std::int64_t bytes) : halves_(static_cast<std::size_t>(2 * bytes), 0) {}
  void nibble(layout::Nibble n) {
    ASSERT_TRUE(n.shift == 0 || n.shift == 4);
    mark(2 * n.byte + n.shift / 4);
  }
  void bytes(std::int64_t at, int n) {
    for (std::int64_t i = 2 * at; i < 2 * (at + n); ++i) mark(i);
  }
  void expect_each_once() const {
    for (std::size_t i = 0; i < halves_.size(); ++i) {
      ASSERT_EQ(halves_[i], 1) << "half byte " << i << " of " << halves_.size();
    }
  }

 private:
  void mark(std::int64_t half) {
    ASSERT_GE(half, 0);
    ASSERT_LT(half, static_cast<std::int64_t>(halves_.size()));
    ++halves_[static_cast<std::size_t>(half)];
  }
  std::vector<int> halves_;
};

void cover_side(const PageGeometry& g, Side side, Coverage* coverage) {
  const int dims = side == Side::kKey ? padded_key_dims(g) : g.head_dim;
  const int block = scale_block(g.format);
  const bool along_tokens = is_tiled(g.format) && side == Side::kValue;
  for (int row = 0; row < g.page_size; ++row) {
    for (int dim = 0; dim < dims; ++dim) {
      if (block == 0) {
        coverage->bytes(element_address(g, side, row, dim), g.format == Format::kBf16 ? 2 : 1);
        continue;
      }
      coverage->nibble(code_address(g, side, row, dim));
      if ((along_tokens ? row : dim) % block == 0) {
        coverage->bytes(scale_address(g, side, row, dim), 1);
      }
    }
  }
}

TEST(PageLayout, IsABijectionOntoThePage) {
  for (const Format f : kFormats) {
    for (const FragmentOrder o : kOrders) {
      for (const int dim : kHeadDims) {
        for (const int page : {64, 128, 192, 1024}) {
          const PageGeometry g = geometry(f, o, dim, page);
          Coverage coverage(g.head_bytes);
          cover_side(g, Side::kKey, &coverage);
          cover_side(g, Side::kValue, &coverage);
          coverage.expect_each_once();
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(PageLayout, ElementsOfABlockShareTheirScale) {
  for (const Format f : {Format::kNvfp4Rows, Format::kNvfp4, Format::kMxfp4}) {
    for (const FragmentOrder o : kOrders) {
      for (const int dim : kHeadDims) {
        const PageGeometry g = geometry(f, o, dim, 128);
        const int block = scale_block(f);
        std::set<std::int64_t> seen;
        for (int row = 0; row < g.page_size; ++row) {
          for (int d = 0; d < dim; ++d) {
            for (const Side side : {Side::kKey, Side::kValue}) {
              const bool along_tokens = is_tiled(f) && side == Side::kValue;
              const int row0 = along_tokens ? row / block * block : row;
              const int dim0 = along_tokens ? d : d / block * block;
              EXPECT_EQ(scale_address(g, side, row, d), scale_address(g, side, row0, dim0));
              seen.insert(scale_address(g, side, row, d));
            }
          }
        }
        EXPECT_EQ(seen.size(), static_cast<std::size_t>(2 * g.page_size * dim / block));
      }
    }
  }
}

TEST(PageLayout, SizesAreAsDesigned) {
  const PageGeometry g = geometry(Format::kNvfp4, FragmentOrder::kFp4Mma, 128, 128);
  EXPECT_EQ(g.tile_bytes, 9216);
  EXPECT_EQ(g.head_bytes, 18432);
  EXPECT_EQ(g.bytes_per_token, 144.0);
  EXPECT_EQ(g.groups_per_page, 8);
  EXPECT_EQ(geometry(Format::kMxfp4, FragmentOrder::kQuad, 128, 128).bytes_per_token, 136.0);
  EXPECT_EQ(geometry(Format::kMxfp4, FragmentOrder::kQuad, 128, 128).group_tokens, 32);
  EXPECT_EQ(geometry(Format::kNvfp4Rows, FragmentOrder::kQuad, 128, 64).bytes_per_token, 144.0);
  EXPECT_EQ(geometry(Format::kFp8E4m3, FragmentOrder::kQuad, 96, 64).bytes_per_token, 192.0);
  EXPECT_EQ(geometry(Format::kBf16, FragmentOrder::kQuad, 64, 64).bytes_per_token, 256.0);
  // K of head_dim 96 fills two column blocks of 64.
  EXPECT_EQ(geometry(Format::kNvfp4, FragmentOrder::kQuad, 96, 64).tile_bytes,
            4 * 2 * (512 + 64) + 6 * (512 + 64));
}

// The fp4_mma order in the words of the hardware's operand: lane (g, t) has four words; word w
// holds row g + 8 (w & 1), columns 32 (w >> 1) + 8 t .. + 7; column 2i is nibble i, 2i + 1 is i
// + 4.
TEST(PageLayout, Fp4MmaFragmentIsTheMmaOperand) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int w = 0; w < 4; ++w) {
      for (int c = 0; c < 8; ++c) {
        const int row = lane / 4 + 8 * (w & 1);
        const int column = 32 * (w >> 1) + 8 * (lane % 4) + c;
        const layout::Nibble n = layout::fragment_code(FragmentOrder::kFp4Mma, row, column);
        const int nibble = c % 2 == 0 ? c / 2 : c / 2 + 4;
        EXPECT_EQ(2 * n.byte + n.shift / 4, 2 * (16 * lane + 4 * w) + nibble);
      }
    }
  }
}

// fp16_mma: the same words; code j under the mask 0x8E of byte j is its value as E5M2 times 2^-14,
// and code j + 4 gets there by two shifts.
TEST(PageLayout, Fp16MmaUnpacksWithMasks) {
  for (int code = 0; code < 16; ++code) {
    for (int column = 0; column < 8; ++column) {
      const layout::Nibble n = layout::fragment_code(FragmentOrder::kFp16Mma, 0, column);
      EXPECT_EQ(n.byte, column % 4);
      const int byte =
          layout::put_code(column < 4 ? 0x71 : 0x8E, n, static_cast<std::uint8_t>(code));
      EXPECT_EQ(layout::take_code(static_cast<std::uint8_t>(byte), n), code);
      EXPECT_EQ(byte & (column < 4 ? 0x71 : 0x8E), column < 4 ? 0x71 : 0x8E)
          << "other code changed";
      const int e5m2 = column < 4 ? byte & 0x8E : ((byte << 1) & 0x82) | ((byte >> 2) & 0x0C);
      const int exponent = (e5m2 >> 2) & 31;
      const double fraction = (e5m2 & 3) / 4.0;
      const double magnitude =
          exponent == 0 ? fraction * 0x1p-14 : (1.0 + fraction) * std::ldexp(1.0, exponent - 15);
      EXPECT_EQ((e5m2 & 0x80) != 0 ? -magnitude : magnitude,
                double{decode_e2m1(static_cast<std::uint8_t>(code))} * 0x1p-14);
    }
  }
}

// fp16_mma: the scales of rows g and g + 8 that a lane multiplies with are one word.
TEST(PageLayout, Fp16MmaScalesAreOneWordALane) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
    const int columns_of_block = scale_block(f);
    for (int lane = 0; lane < 32; ++lane) {
      std::set<int> words;
      for (int w = 0; w < 4; ++w) {
        const int row = lane / 4 + 8 * (w & 1);
        const int column = 32 * (w >> 1) + 8 * (lane % 4);
        const int at =
            layout::fragment_scale(FragmentOrder::kFp16Mma, f, row, column / columns_of_block);
        words.insert(at / 4);
        EXPECT_EQ(at % 4, 2 * (w & 1) + (w >> 1));
      }
      EXPECT_EQ(words.size(), 1U);
    }
  }
}

TEST(PageLayout, KeyRowsAreAPermutationOfEachRowGroup) {
  for (const FragmentOrder o : kOrders) {
    std::set<std::pair<int, int>> seen;
    for (int token = 0; token < 64; ++token) {
      const int row = layout::key_row(o, token);
      ASSERT_TRUE(row >= 0 && row < 16);
      seen.insert({layout::key_row_group(token), row});
    }
    EXPECT_EQ(seen.size(), 64U);
  }
}

TEST(PageLayout, NibbleOrderOfRows) {
  // [1.0, -6.0] is 0xF2: the low nibble comes first.
  const PageGeometry g = geometry(Format::kNvfp4Rows, FragmentOrder::kQuad, 64, 64);
  std::vector<std::uint8_t> page(static_cast<std::size_t>(g.head_bytes), 0xAA);
  set_nibble(page.data(), code_address(g, Side::kKey, 0, 0), 2);
  set_nibble(page.data(), code_address(g, Side::kKey, 0, 1), 15);
  EXPECT_EQ(page[0], 0xF2);
  EXPECT_EQ(page[1], 0xAA);
}

// The tables of docs/format.md; codes count half bytes, low nibble first.
TEST(PageLayout, DocumentedVectors) {
  struct Vector {
    Format format;
    FragmentOrder order;
    int token, dim;
    std::int64_t key_half, key_scale, value_half, value_scale;
  };
  const Vector vectors[] = {
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 0, 0, 0, 2048, 4608, 4352},
      {Format::kNvfp4, FragmentOrder::kQuad, 0, 0, 0, 2048, 4608, 4352},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 0, 1, 4, 2048, 4736, 4356},
      {Format::kNvfp4, FragmentOrder::kQuad, 0, 1, 2, 2048, 4616, 4353},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 0, 2, 1, 2048, 4864, 4360},
      {Format::kNvfp4, FragmentOrder::kQuad, 0, 2, 4, 2048, 4624, 4354},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 1, 0, 128, 2052, 4612, 4352},
      {Format::kNvfp4, FragmentOrder::kQuad, 1, 0, 8, 2049, 4610, 4352},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 3, 37, 158, 2086, 7301, 4500},
      {Format::kNvfp4, FragmentOrder::kQuad, 3, 37, 539, 2083, 6702, 4485},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 5, 63, 1271, 2119, 8590, 4604},
      {Format::kNvfp4, FragmentOrder::kQuad, 5, 63, 1935, 2161, 7803, 4559},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 21, 40, 1712, 2134, 6734, 4513},
      {Format::kNvfp4, FragmentOrder::kQuad, 21, 40, 1736, 2153, 6979, 4504},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 63, 63, 4095, 2303, 8703, 4607},
      {Format::kNvfp4, FragmentOrder::kQuad, 63, 63, 4095, 2303, 8703, 4607},
      {Format::kNvfp4, FragmentOrder::kFp4Mma, 100, 17, 12356, 6849, 14994, 9030},
      {Format::kNvfp4, FragmentOrder::kQuad, 100, 17, 12546, 6864, 15369, 9057},
      {Format::kMxfp4, FragmentOrder::kFp4Mma, 3, 37, 158, 2067, 7045, 4298},
      {Format::kMxfp4, FragmentOrder::kQuad, 3, 37, 539, 2067, 6446, 4293},
      {Format::kMxfp4, FragmentOrder::kFp4Mma, 63, 63, 4095, 2175, 8447, 4351},
      {Format::kMxfp4, FragmentOrder::kQuad, 63, 63, 4095, 2175, 8447, 4351},
      {Format::kMxfp4, FragmentOrder::kFp4Mma, 100, 17, 11844, 6496, 14226, 8611},
      {Format::kMxfp4, FragmentOrder::kQuad, 100, 17, 12034, 6496, 14601, 8625},
  };
  for (const Vector& v : vectors) {
    const PageGeometry g = geometry(v.format, v.order, 64, 128);
    const layout::Nibble key = code_address(g, Side::kKey, v.token, v.dim);
    const layout::Nibble value = code_address(g, Side::kValue, v.token, v.dim);
    EXPECT_EQ(2 * key.byte + key.shift / 4, v.key_half);
    EXPECT_EQ(scale_address(g, Side::kKey, v.token, v.dim), v.key_scale);
    EXPECT_EQ(2 * value.byte + value.shift / 4, v.value_half);
    EXPECT_EQ(scale_address(g, Side::kValue, v.token, v.dim), v.value_scale);
  }
}

// A group of 16 value tokens is a whole number of bytes: writing it touches no other group's.
TEST(PageLayout, ValueGroupsShareNoByte) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
    for (const FragmentOrder o : kOrders) {
      const PageGeometry g = geometry(f, o, 96, 128);
      std::vector<int> owner(static_cast<std::size_t>(g.head_bytes), -1);
      for (int row = 0; row < g.page_size; ++row) {
        for (int d = 0; d < g.head_dim; ++d) {
          const int group = row / g.group_tokens;
          for (const std::int64_t at : {code_address(g, Side::kValue, row, d).byte,
                                        scale_address(g, Side::kValue, row, d)}) {
            int& o2 = owner[static_cast<std::size_t>(at)];
            ASSERT_TRUE(o2 == -1 || o2 == group);
            o2 = group;
          }
        }
      }
    }
  }
}

TEST(PageGeometryTest, RefusesWhatIsNotOffered) {
  auto code = [](Format f, FragmentOrder o, int dim, int page) {
    return PageGeometry::make(f, o, dim, page).status().code();
  };
  const FragmentOrder quad = FragmentOrder::kQuad;
  for (const int dim : {-64, 0, 32, 40, 65, 72, 80, 100, 112, 512}) {
    EXPECT_EQ(code(Format::kNvfp4, quad, dim, 128), StatusCode::kInvalidArgument);
    const auto made = PageGeometry::make(Format::kNvfp4, quad, dim, 128);
    EXPECT_NE(made.status().message().find("64, 96, 128, 192, 256"), std::string::npos);
  }
  for (const int page : {-64, 0, 1, 16, 63, 65, 100, 1025, 1088, 2048}) {
    EXPECT_EQ(code(Format::kNvfp4, quad, 64, page), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(code(static_cast<Format>(0), quad, 64, 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(static_cast<Format>(6), quad, 64, 64), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(Format::kNvfp4, static_cast<FragmentOrder>(4), 64, 64),
            StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace bitdecoding
