// SPDX-License-Identifier: Apache-2.0
// One entry to all scale rules: a rule's number becomes a call, and a format knows its rules.
#pragma once

#include <cstdint>
#include <limits>

#include "bitdecoding/format.h"
#include "bitdecoding/recipe.h"
#include "scale/amax6.h"
#include "scale/code_search.h"
#include "scale/four_six.h"
#include "scale/mxfp4_search.h"

namespace bitdecoding {

// Rules whose scale code is E8M0; the others give E4M3.
BD_HOST_DEVICE constexpr bool is_e8m0_rule(ScaleRule rule) {
  return rule == ScaleRule::kMxfp4Search || rule == ScaleRule::kMxfp4Floor;
}

BD_HOST_DEVICE constexpr bool rule_fits(Format format, ScaleRule rule) {
  return scale_block(format) == 0 || is_e8m0_rule(rule) == (format == Format::kMxfp4);
}

// n is 16 or 32; the values are finite. outer_scale is a power of two.
BD_HOST_DEVICE constexpr std::uint8_t choose_scale(ScaleRule rule, const float* x, int n,
                                                   float outer_scale) {
  switch (rule) {
    case ScaleRule::kAmax6:
      return Amax6::choose(x, n, outer_scale);
    case ScaleRule::kFourSix:
      return FourSix::choose(x, n, outer_scale);
    case ScaleRule::kCodeSearch:
      return CodeSearch::choose(x, n, outer_scale);
    case ScaleRule::kMxfp4Search:
      return Mxfp4Search::choose(x, n, outer_scale);
    case ScaleRule::kMxfp4Floor:
      return Mxfp4Floor::choose(x, n, outer_scale);
  }
  return 0;
}

BD_HOST_DEVICE constexpr float decode_scale(Format format, std::uint8_t code) {
  return format == Format::kMxfp4 ? decode_e8m0(code) : decode_e4m3(code);
}

// Bytes that no writer produces and that mean corruption when a page holds them.
BD_HOST_DEVICE constexpr bool is_corrupt_scale(Format format, std::uint8_t code) {
  return format == Format::kMxfp4 ? code == kE8m0Nan : is_nan_e4m3(code);
}

// Largest finite magnitude that a block can hold under the largest scale.
BD_HOST_DEVICE constexpr float largest_block_value(Format format, float outer_scale) {
  const float most = kE2m1Max * outer_scale * (format == Format::kMxfp4 ? 0x1p127F : kE4m3Max);
  constexpr float kLargest = std::numeric_limits<float>::max();
  return most < kLargest ? most : kLargest;
}

// True when a value is above that. Writers have replaced what was not finite, so infinity and NaN
// come from the rotation of values near float's maximum: they are too large as well.
BD_HOST_DEVICE constexpr bool block_saturates(Format format, const float* x, int n,
                                              float outer_scale) {
  const float limit = largest_block_value(format, outer_scale);
  bool above = false;
  for (int i = 0; i < n; ++i) above = above || !((x[i] < 0.0F ? -x[i] : x[i]) <= limit);
  return above;
}

}  // namespace bitdecoding
