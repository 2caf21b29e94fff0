// SPDX-License-Identifier: Apache-2.0
// Quantize: which bytes are written, and that no stale one is ever read.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "page/address.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

constexpr Format kFormats[] = {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4,
                               Format::kMxfp4};

const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};

TEST(ReferenceWriteMemory, WritesStayInsideTheirRows) {
  for (const Format f : kFormats) {
    WorldOptions o;
    o.format = f;
    o.page_padding = 2048;
    World w(o);
    const int s = w.add_sequence(kPages);
    std::vector<std::uint8_t> before(w.cache.pages,
                                     w.cache.pages + w.cache.stride_page * w.cache.num_pages);
    ASSERT_TRUE(w.step({{s, iota_tokens(0, 20)}}).status.ok());
    const PageGeometry& g = w.layer.geometry;
    std::vector<bool> allowed(static_cast<std::size_t>(g.head_bytes), false);
    for (int row = 0; row < 32; ++row) {
      for (int d = 0; d < padded_key_dims(g); ++d) {
        for (const Side side : {Side::kKey, Side::kValue}) {
          if (side == Side::kValue && d >= g.head_dim) continue;
          if (row >= 20 && (side == Side::kKey || !is_tiled(f))) continue;
          if (scale_block(f) == 0) {
            const auto at = static_cast<std::size_t>(element_address(g, side, row, d));
            allowed[at] = true;
            if (f == Format::kBf16) allowed[at + 1] = true;
            continue;
          }
          allowed[static_cast<std::size_t>(code_address(g, side, row, d).byte)] = true;
          allowed[static_cast<std::size_t>(scale_address(g, side, row, d))] = true;
        }
      }
    }
    for (std::size_t i = 0; i < before.size(); ++i) {
      const auto in_page = static_cast<std::int64_t>(i) % w.cache.stride_page;
      const bool own = static_cast<std::int64_t>(i) / w.cache.stride_page == kPages[0] &&
                       in_page < g.head_bytes * o.num_kv_heads &&
                       allowed[static_cast<std::size_t>(in_page % g.head_bytes)];
      if (!own) {
        ASSERT_EQ(w.cache.pages[i], before[i]) << i;
      }
    }
  }
}

// Pages and slots as other owners left them: FP4 codes, BF16 rows of NaN and of infinity.
struct StaleCase {
  std::string backend;
  Format format;
  Arithmetic arithmetic;
  bool reproducible;
  bool with_slots;
};

StepResult read_over(std::uint8_t fill, const StaleCase& c, std::int64_t n) {
  WorldOptions o;
  o.backend = c.backend;
  o.format = c.format;
  o.arithmetic = c.arithmetic;
  o.reproducible = c.reproducible;
  if (!c.with_slots) o.tail_tokens = o.sink_tokens = 0;
  o.fill = fill;
  World w(o);
  const std::int64_t slot_bytes =
      shadow_slot_bytes(o.num_kv_heads, w.layer.geometry.group_tokens, o.head_dim);
  std::memset(w.shadow.rows, fill, static_cast<std::size_t>(slot_bytes * o.num_slots));
  const int s = w.add_sequence(kPages);
  EXPECT_TRUE(w.step({{s, iota_tokens(0, n)}}).status.ok());
  StepResult result = w.step({{s, {77, 78}}});
  EXPECT_TRUE(result.status.ok()) << result.status.message();
  EXPECT_EQ(w.corrupt_scales, 0U);
  for (const float x : result.output) EXPECT_TRUE(std::isfinite(x));
  return result;
}

TEST(StaleBytes, NeverReachTheOutput) {
  std::vector<StaleCase> cases;
  for (const std::string& backend : backend_names()) {
    for (const Format f : kFormats) {
      for (const Arithmetic arithmetic : {Arithmetic::kWide, Arithmetic::kInt8, Arithmetic::kFp4}) {
        const bool same = arithmetic == Arithmetic::kInt8 && backend == "reference";
        if (arithmetic != Arithmetic::kWide && (!is_tiled(f) || same)) continue;
        cases.push_back({backend, f, arithmetic, false, false});
        cases.push_back({backend, f, arithmetic, true, true});
        cases.push_back({backend, f, arithmetic, false, true});
      }
    }
  }
  for (const StaleCase& c : cases) {
    SCOPED_TRACE(testing::Message() << c.backend << " " << format_name(c.format) << " "
                                    << arithmetic_name(c.arithmetic));
    for (const std::int64_t n : {1, 3, 9, 63, 65, 130}) {
      const StepResult zeros = read_over(0x00, c, n);
      for (const int fill : {0x7F, 0xFF, 0xA5}) {
        const StepResult stale = read_over(static_cast<std::uint8_t>(fill), c, n);
        ASSERT_EQ(stale.output, zeros.output) << "fill " << fill << " n " << n;
        ASSERT_EQ(stale.lse, zeros.lse);
      }
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
