// SPDX-License-Identifier: Apache-2.0
// Needles in haystacks of any length, in the model's own tokens: the eight variants of RULER's
// needle tasks. The same seed gives the same bytes on every machine, as far as the token counts
// are the same.
//
// variant       haystack   keys    values    asked for
// single_1      noise      words   numbers   1 of 1
// single_2      essay      words   numbers   1 of 1
// single_3      essay      words   uuids     1 of 1
// multikey_1    essay      words   numbers   1 of 4 keys
// multikey_2    needles    words   numbers   1, all else are needles too
// multikey_3    needles    uuids   uuids     1, all else are needles too
// multivalue    essay      words   numbers   the 4 values of one key
// multiquery    essay      words   numbers   the values of all 4 keys
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

// How many tokens a text has; the served model's own count.
using CountTokens = std::function<Result<std::size_t>(const std::string&)>;

struct NiahPlan {
  std::vector<std::string> variants;  // empty: all eight
  std::size_t length = 0;             // tokens of a prompt, its question included; never more
  int rows = 10;                      // of each variant, their needles at evenly spread depths
  std::uint64_t seed = 42;
  // One haystack for all rows of a variant: prompts share what stands before their first needle, so
  // a server with prefix caching computes it once.
  bool one_haystack = false;
};

const std::vector<std::string>& niah_variants();

// Rows as the data file has them: index, variant, input, answer_prefix, outputs, length,
// prompt_tokens, depth (percent, of the needles that are asked for), seed.
Result<std::vector<nlohmann::json>> generate_niah(const NiahPlan& plan, const CountTokens& count);

// Writes them, a row a line. The file is there whole or not at all.
Status write_niah(const NiahPlan& plan, const CountTokens& count, const std::string& path);

}  // namespace bitdecoding::eval
