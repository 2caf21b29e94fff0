// SPDX-License-Identifier: Apache-2.0
#include "golden_pages.h"

#include <cmath>

#include "backend/reference/reference.h"
#include "bitdecoding/backend.h"

namespace bitdecoding::test {
namespace {

constexpr int kTokens = 64;

}  // namespace

const std::vector<GoldenPage>& golden_pages() {
  static const std::vector<GoldenPage> pages = {
      {"nvfp4_d64", Format::kNvfp4, FragmentOrder::kFp4Mma, 64},
      {"nvfp4_d96", Format::kNvfp4, FragmentOrder::kFp4Mma, 96},
      {"nvfp4_d64_quad", Format::kNvfp4, FragmentOrder::kQuad, 64},
      {"nvfp4_d64_fp16_mma", Format::kNvfp4, FragmentOrder::kFp16Mma, 64},
      {"nvfp4_d96_fp16_mma", Format::kNvfp4, FragmentOrder::kFp16Mma, 96},
      {"mxfp4_d64_fp16_mma", Format::kMxfp4, FragmentOrder::kFp16Mma, 64},
      {"mxfp4_d64", Format::kMxfp4, FragmentOrder::kFp4Mma, 64},
      {"mxfp4_d64_quad", Format::kMxfp4, FragmentOrder::kQuad, 64},
      {"nvfp4_rows_d64", Format::kNvfp4Rows, FragmentOrder::kFp4Mma, 64},
      {"fp8_e4m3_d64", Format::kFp8E4m3, FragmentOrder::kFp4Mma, 64},
      {"bf16_d64", Format::kBf16, FragmentOrder::kFp4Mma, 64},
  };
  return pages;
}

float golden_input(int side, int token, int dim) {
  if (token / 16 == 1 && dim / 16 == 2) return 0.0F;
  std::uint32_t x = static_cast<std::uint32_t>((side * 64 + token) * 256 + dim) * 2654435761U;
  x ^= x >> 15;
  x *= 2246822519U;
  x ^= x >> 13;
  const int numerator = static_cast<int>(x % 257U) - 128;
  const int exponent = (token / 16 + 3 * (dim / 16)) % 5 - 2;
  return std::ldexp(static_cast<float>(numerator) / 32.0F, exponent);
}

std::vector<std::uint8_t> make_golden(const GoldenPage& page) {
  const PageGeometry g = PageGeometry::make(page.format, page.order, page.head_dim, kTokens).take();
  LayerConfig layer;
  layer.geometry = g;
  layer.num_kv_heads = layer.num_q_heads = 1;
  const bool mx = page.format == Format::kMxfp4;
  layer.key_rule = mx ? ScaleRule::kMxfp4Search : ScaleRule::kFourSix;
  layer.value_rule = mx ? ScaleRule::kMxfp4Search : ScaleRule::kAmax6;
  std::vector<float> rows[2];
  for (int side = 0; side < 2; ++side) {
    for (int t = 0; t < kTokens; ++t) {
      for (int d = 0; d < page.head_dim; ++d) rows[side].push_back(golden_input(side, t, d));
    }
  }
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(g.head_bytes), 0xEE);
  StepPlan plan;
  plan.rule = make_shadow_rule(g, 0, 0, false);
  plan.num_tokens = kTokens;
  for (int group = 0; group < g.groups_per_page; ++group) {
    plan.writes.push_back({0, group, 0, g.group_tokens, group * g.group_tokens, -1, false});
  }
  WriteParams p;
  p.layer = &layer;
  p.cache = {bytes.data(), 1, g.head_bytes, g.head_bytes};
  p.key = {rows[0].data(), DType::kF32, page.head_dim, page.head_dim};
  p.value = {rows[1].data(), DType::kF32, page.head_dim, page.head_dim};
  p.plan = &plan;
  if (!make_reference_backend({}, page.order).take()->write(p).ok()) return {};
  if (page.order != FragmentOrder::kFp4Mma) return bytes;
  const std::uint8_t* head = bytes.data();
  return export_page(g, {&head, 1}, 0).take();
}

std::string to_hex(const std::vector<std::uint8_t>& bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
    if (i % 32 == 31 || i + 1 == bytes.size()) text += '\n';
  }
  return text;
}

std::vector<std::uint8_t> from_hex(const std::string& text) {
  std::vector<std::uint8_t> bytes;
  int high = -1;
  for (const char c : text) {
    const int digit = c >= '0' && c <= '9' ? c - '0' : (c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1);
    if (digit < 0) continue;
    if (high < 0) {
      high = digit;
      continue;
    }
    bytes.push_back(static_cast<std::uint8_t>(16 * high + digit));
    high = -1;
  }
  return bytes;
}

}  // namespace bitdecoding::test
