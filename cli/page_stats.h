// SPDX-License-Identifier: Apache-2.0
// Counts over the codes and scales of one page, for `inspect`.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <span>

#include "bitdecoding/page.h"

namespace bitdecoding::cli {

struct SideStats {
  std::int64_t values = 0;
  std::int64_t zeros = 0;
  std::int64_t largest = 0;     // codes of the largest magnitude: 6, or 448 for FP8
  std::int64_t non_finite = 0;  // formats of rows only
  std::int64_t blocks = 0;
  std::int64_t zero_blocks = 0;  // scale 0
  float min_scale = 0;           // of the others
  float max_scale = 0;
};

// One head of a page; side 0 is K, 1 is V.
SideStats page_stats(const PageGeometry& geometry, std::span<const std::uint8_t> head, int side);

nlohmann::ordered_json to_json(const SideStats& stats);
std::string in_words(const SideStats& stats, Format format);

}  // namespace bitdecoding::cli
