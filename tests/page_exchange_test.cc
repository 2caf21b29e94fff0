// SPDX-License-Identifier: Apache-2.0
// Pages that leave the process: golden bytes, fragment orders, tags, damage.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>
#include <sstream>

#include "bitdecoding/quantize.h"
#include "golden_pages.h"
#include "page/address.h"

namespace bitdecoding::test {
namespace {

constexpr Format kFormats[] = {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4,
                               Format::kMxfp4};

std::vector<std::uint8_t> random_bytes(std::int64_t n, unsigned seed, int below = 256) {
  std::mt19937 engine(seed);
  std::vector<std::uint8_t> out(static_cast<std::size_t>(n));
  for (auto& b : out) b = static_cast<std::uint8_t>(engine() % static_cast<unsigned>(below));
  return out;
}

PageGeometry geometry(Format f, FragmentOrder o, int dim = 64, int page = 128) {
  return PageGeometry::make(f, o, dim, page).take();
}

std::vector<std::uint8_t> golden_file(const std::string& name) {
  std::ifstream in(std::string(BITDECODING_GOLDEN_DIR) + "/" + name + ".hex");
  EXPECT_TRUE(in.good()) << name;
  std::stringstream text;
  text << in.rdbuf();
  return from_hex(text.str());
}

TEST(GoldenPages, BytesNeverChange) {
  for (const GoldenPage& page : golden_pages()) {
    const std::vector<std::uint8_t> expected = golden_file(page.name);
    ASSERT_GT(expected.size(), 4000U);
    EXPECT_EQ(make_golden(page), expected)
        << page.name << ": pages written by other versions cannot be read; see docs/format.md";
  }
}

// The files of one page in the orders of the CPU, of CUDA and of exchange say the same: each is
// what becomes of the others.
TEST(GoldenPages, OrdersAreTheSamePage) {
  for (const auto& [name, format] :
       {std::pair("nvfp4_d64", Format::kNvfp4), std::pair("mxfp4_d64", Format::kMxfp4)}) {
    const std::vector<std::uint8_t> file = golden_file(name);
    for (const auto& [suffix, order] : {std::pair("_quad", FragmentOrder::kQuad),
                                        std::pair("_fp16_mma", FragmentOrder::kFp16Mma)}) {
      const std::vector<std::uint8_t> own = golden_file(std::string(name) + suffix);
      const PageGeometry g = geometry(format, order, 64, 64);
      ASSERT_EQ(own.size(), static_cast<std::size_t>(g.head_bytes));
      const std::uint8_t* head = own.data();
      EXPECT_EQ(export_page(g, {&head, 1}, 0).take(), file) << name << suffix;
      std::vector<std::uint8_t> back(own.size(), 0xEE);
      std::uint8_t* to = back.data();
      ASSERT_TRUE(import_page(g, file, {&to, 1}, 0).ok());
      EXPECT_EQ(back, own) << name << suffix;
    }
  }
}

TEST(GoldenPages, HoldTheirInput) {
  // Read back with nothing but the format's own definition: rotated rows are compared rotated back.
  for (const GoldenPage& page : golden_pages()) {
    if (is_tiled(page.format)) continue;
    const std::vector<std::uint8_t> bytes = make_golden(page);
    const PageGeometry g = geometry(page.format, page.order, page.head_dim, 64);
    std::uint64_t corrupt = 0;
    for (int t = 0; t < 64; ++t) {
      for (int d = 0; d < page.head_dim; ++d) {
        for (int side = 0; side < 2; ++side) {
          const float x = golden_input(side, t, d);
          const float got =
              read_element(g, bytes.data() + 32, static_cast<Side>(side), t, d, 1.0F, &corrupt);
          // Half of E2M1's largest gap is one scale: a sixth of the block's maximum (at most 16),
          // and the scale itself was rounded to three bits.
          EXPECT_TRUE(std::fabs(got - x) <= 16.0F / 6.0F * (1.0F + 1.0F / 16.0F));
          if (page.format == Format::kBf16) {
            EXPECT_EQ(got, x);
          }
        }
      }
    }
  }
}

TEST(FragmentOrders, ThereAndBackIsTheSameBytes) {
  for (const Format f : kFormats) {
    for (const int dim : kHeadDims) {
      for (const FragmentOrder a : {FragmentOrder::kQuad, FragmentOrder::kFp16Mma}) {
        const PageGeometry g = geometry(f, a, dim);
        const auto in = random_bytes(g.head_bytes, 1);
        std::vector<std::uint8_t> mma(in.size(), 0xEE);
        std::vector<std::uint8_t> back(in.size(), 0xEE);
        const FragmentOrder b = FragmentOrder::kFp4Mma;
        ASSERT_TRUE(convert_fragment_order(g, a, b, in, mma).ok());
        ASSERT_TRUE(convert_fragment_order(g, b, a, mma, back).ok());
        EXPECT_EQ(back, in);
        if (is_tiled(f)) {
          EXPECT_NE(mma, in);
        } else {
          EXPECT_EQ(mma, in);
        }
      }
    }
  }
}

TEST(FragmentOrders, ElementsKeepTheirValues) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int dim : kHeadDims) {
      const PageGeometry half = geometry(f, FragmentOrder::kFp16Mma, dim);
      const PageGeometry quad = geometry(f, FragmentOrder::kQuad, dim);
      const PageGeometry mma = geometry(f, FragmentOrder::kFp4Mma, dim);
      const auto in = random_bytes(quad.head_bytes, 2, 0x7F);
      std::vector<std::uint8_t> out(in.size());
      ASSERT_TRUE(convert_fragment_order(quad, quad.order, mma.order, in, out).ok());
      std::vector<std::uint8_t> third(in.size());
      ASSERT_TRUE(convert_fragment_order(quad, quad.order, half.order, in, third).ok());
      std::uint64_t corrupt = 0;
      for (int row = 0; row < quad.page_size; ++row) {
        for (int d = 0; d < dim; ++d) {
          for (const Side side : {Side::kKey, Side::kValue}) {
            ASSERT_EQ(read_element(quad, in.data(), side, row, d, 1.0F, &corrupt),
                      read_element(half, third.data(), side, row, d, 1.0F, &corrupt));
            ASSERT_EQ(read_element(quad, in.data(), side, row, d, 1.0F, &corrupt),
                      read_element(mma, out.data(), side, row, d, 1.0F, &corrupt));
          }
        }
      }
      // Never across fragments: every 512-byte fragment keeps its multiset of codes.
      const auto parts = layout::tile_parts(f, dim);
      for (std::int64_t at = 0; at < parts.key_scales; at += 512) {
        int count[2][16] = {};
        for (std::int64_t i = at; i < at + 512; ++i) {
          for (int k = 0; k < 2; ++k) {
            const std::uint8_t byte = (k == 0 ? in : out)[static_cast<std::size_t>(i)];
            ++count[k][byte & 15];
            ++count[k][byte >> 4];
          }
        }
        for (int c = 0; c < 16; ++c) ASSERT_EQ(count[0][c], count[1][c]);
      }
    }
  }
}

TEST(FragmentOrders, BadBuffersAreRefused) {
  const PageGeometry g = geometry(Format::kNvfp4, FragmentOrder::kQuad);
  auto bytes = random_bytes(2 * g.head_bytes, 3);
  const std::span<std::uint8_t> all(bytes);
  const auto n = static_cast<std::size_t>(g.head_bytes);
  const FragmentOrder o = FragmentOrder::kQuad;
  EXPECT_FALSE(convert_fragment_order(g, o, o, all.first(n - 1), all.last(n)).ok());
  EXPECT_FALSE(convert_fragment_order(g, o, o, all.first(n), all.last(n - 1)).ok());
  EXPECT_FALSE(convert_fragment_order(g, o, o, all.first(n), all.subspan(1, n)).ok());
  EXPECT_TRUE(convert_fragment_order(g, o, o, all.first(n), all.last(n)).ok());
}

struct Exported {
  PageGeometry geometry;
  std::vector<std::vector<std::uint8_t>> heads;
  std::vector<std::uint8_t> bytes;
};

Exported exported(Format f, FragmentOrder o, int heads, int first) {
  Exported e{geometry(f, o), {}, {}};
  std::vector<const std::uint8_t*> pointers;
  for (int h = 0; h < heads; ++h) {
    e.heads.push_back(random_bytes(e.geometry.head_bytes, static_cast<unsigned>(10 + h), 0x7F));
  }
  for (const auto& h : e.heads) pointers.push_back(h.data());
  e.bytes = export_page(e.geometry, pointers, first).take();
  return e;
}

Status import_into(const PageGeometry& g, const std::vector<std::uint8_t>& bytes, int heads,
                   int first, std::vector<std::vector<std::uint8_t>>* out) {
  out->assign(static_cast<std::size_t>(heads),
              std::vector<std::uint8_t>(static_cast<std::size_t>(g.head_bytes), 0xEE));
  std::vector<std::uint8_t*> pointers;
  for (auto& h : *out) pointers.push_back(h.data());
  return import_page(g, bytes, pointers, first);
}

TEST(Exchange, RoundTripsThroughEitherOrder) {
  for (const Format f : kFormats) {
    for (const FragmentOrder from :
         {FragmentOrder::kQuad, FragmentOrder::kFp4Mma, FragmentOrder::kFp16Mma}) {
      const Exported e = exported(f, from, 3, 2);
      const auto tag = read_format_tag(e.bytes);
      ASSERT_TRUE(tag.ok()) << tag.status().message();
      EXPECT_EQ(tag.value().format, f);
      EXPECT_EQ(tag.value().head_dim, 64);
      EXPECT_EQ(tag.value().page_size, 128);
      EXPECT_EQ(tag.value().num_kv_heads, 3);
      EXPECT_EQ(tag.value().first_kv_head, 2);
      std::vector<std::vector<std::uint8_t>> back;
      ASSERT_TRUE(import_into(e.geometry, e.bytes, 3, 2, &back).ok());
      EXPECT_EQ(back, e.heads);
      // Into a cache with the other order and out again: the same file.
      const PageGeometry other =
          geometry(f, from == FragmentOrder::kQuad ? FragmentOrder::kFp4Mma : FragmentOrder::kQuad);
      ASSERT_TRUE(import_into(other, e.bytes, 3, 2, &back).ok());
      std::vector<const std::uint8_t*> pointers;
      for (const auto& h : back) pointers.push_back(h.data());
      EXPECT_EQ(export_page(other, pointers, 2).take(), e.bytes);
    }
  }
}

TEST(Exchange, DamageIsFoundAndNothingIsWritten) {
  const Exported e = exported(Format::kNvfp4, FragmentOrder::kQuad, 2, 0);
  auto expect = [&](StatusCode code, auto change) {
    std::vector<std::uint8_t> bytes = e.bytes;
    change(bytes);
    std::vector<std::vector<std::uint8_t>> out;
    const Status status = import_into(e.geometry, bytes, 2, 0, &out);
    EXPECT_EQ(status.code(), code) << status.message();
    for (const auto& head : out) {
      EXPECT_TRUE(std::all_of(head.begin(), head.end(), [](auto b) { return b == 0xEE; }));
    }
  };
  const StatusCode corrupt = StatusCode::kCorrupt;
  using Bytes = std::vector<std::uint8_t>;
  for (std::size_t n = 0; n < 32; ++n) expect(corrupt, [n](Bytes& b) { b.resize(n); });
  expect(corrupt, [](Bytes& b) { b[0] ^= 1; });
  expect(StatusCode::kUnsupported, [](Bytes& b) { b[4] = 2; });
  expect(corrupt, [](Bytes& b) { b[6] = 9; });      // format
  expect(corrupt, [](Bytes& b) { b[7] = 2; });      // order
  expect(corrupt, [](Bytes& b) { b[8] = 65; });     // head_dim
  expect(corrupt, [](Bytes& b) { b[10] = 1; });     // page size
  expect(corrupt, [](Bytes& b) { b[12] = 3; });     // heads
  expect(corrupt, [](Bytes& b) { b[16] ^= 1; });    // payload bytes
  expect(corrupt, [](Bytes& b) { b[23] = 0xFF; });  // payload of 2^63
  expect(corrupt, [](Bytes& b) { b[31] = 1; });     // reserved
  expect(corrupt, [](Bytes& b) { b.pop_back(); });
  expect(corrupt, [](Bytes& b) { b.push_back(0); });
  expect(corrupt, [](Bytes& b) { b.resize(b.size() / 2); });
  expect(StatusCode::kInvalidArgument, [](Bytes& b) { b[14] = 1; });  // first head
  const auto parts = layout::tile_parts(Format::kNvfp4, 64);
  for (const std::int64_t at : {parts.key_scales, parts.value_codes - 1, parts.value_scales,
                                parts.bytes - 1, 3 * parts.bytes + parts.key_scales}) {
    for (const std::uint8_t scale : {0x7F, 0xFF, 0x80}) {
      expect(corrupt, [=](Bytes& b) { b[static_cast<std::size_t>(32 + at)] = scale; });
    }
  }
}

TEST(Exchange, AnotherLayoutIsRefused) {
  const Exported e = exported(Format::kNvfp4, FragmentOrder::kQuad, 2, 0);
  std::vector<std::vector<std::uint8_t>> out;
  for (const PageGeometry& g : {geometry(Format::kMxfp4, FragmentOrder::kQuad),
                                geometry(Format::kNvfp4Rows, FragmentOrder::kQuad),
                                geometry(Format::kNvfp4, FragmentOrder::kQuad, 128),
                                geometry(Format::kNvfp4, FragmentOrder::kQuad, 64, 64)}) {
    const Status status = import_into(g, e.bytes, 2, 0, &out);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.message();
  }
  EXPECT_EQ(import_into(e.geometry, e.bytes, 1, 0, &out).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(import_page(e.geometry, e.bytes, {}, 0).code(), StatusCode::kInvalidArgument);
  std::uint8_t* null_head[2] = {nullptr, nullptr};
  EXPECT_EQ(import_page(e.geometry, e.bytes, null_head, 0).code(), StatusCode::kInvalidArgument);
  const std::uint8_t* head = e.heads[0].data();
  EXPECT_FALSE(export_page(e.geometry, {&head, 1}, -1).ok());
}

}  // namespace
}  // namespace bitdecoding::test
