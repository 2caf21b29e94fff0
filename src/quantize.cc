// SPDX-License-Identifier: Apache-2.0
#include "bitdecoding/quantize.h"

#include <fmt/format.h>

#include <cmath>

#include "numeric/bf16.h"
#include "scale/rules.h"

namespace bitdecoding {
namespace {

bool is_known_rule(ScaleRule rule) {
  const int number = static_cast<int>(rule);
  return number >= static_cast<int>(ScaleRule::kAmax6) &&
         number <= static_cast<int>(ScaleRule::kMxfp4Floor);
}

}  // namespace

Result<std::uint8_t> quantize_block(ScaleRule rule, std::span<const float> x, float outer_scale,
                                    std::span<std::uint8_t> codes) {
  const int n = static_cast<int>(x.size());
  if (!is_known_rule(rule)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("scale rule number {} does not exist; expected 1 to 5",
                              static_cast<int>(rule)));
  }
  const int expected = is_e8m0_rule(rule) ? 32 : 16;
  if (n != expected) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a block of this scale rule has {} values, but {} were given",
                              expected, x.size()));
  }
  if (codes.size() != x.size()) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("codes needs one element a value ({}), but has {}", x.size(), codes.size()));
  }
  int exponent = 0;
  if (!(outer_scale > 0.0F) || std::frexp(outer_scale, &exponent) != 0.5F) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("the outer scale must be a positive power of two, but is {}", outer_scale));
  }
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (!std::isfinite(x[i])) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("value {} of the block is {}; blocks hold finite values only: "
                                "replace it (the page writers store 0 and count it)",
                                i, x[i]));
    }
  }
  const std::uint8_t code = choose_scale(rule, x.data(), n, outer_scale);
  const float scale = (is_e8m0_rule(rule) ? decode_e8m0(code) : decode_e4m3(code)) * outer_scale;
  encode_block(x.data(), n, scale, codes.data());
  return code;
}

float dequantize_value(Format format, std::uint8_t code, std::uint8_t scale_code,
                       float outer_scale) {
  if (format == Format::kFp8E4m3) return decode_e4m3(code);
  return decode_e2m1(code & 15U) * (decode_scale(format, scale_code) * outer_scale);
}

}  // namespace bitdecoding
