// SPDX-License-Identifier: Apache-2.0
// The recipe: every choice of a KV mode, in one JSON object. Unknown keys, wrong types and values
// out of range are errors that name the key and what it accepts.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "bitdecoding/format.h"
#include "bitdecoding/status.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

enum class ScaleRule : std::uint8_t {
  kAmax6 = 1,
  kFourSix = 2,
  kCodeSearch = 3,
  kMxfp4Search = 4,
  kMxfp4Floor = 5
};

// wide: queries and probabilities keep 14 bits (reference: double, CUDA: FP16). int8: 8 and 7 bits,
// the CPU's fast path: off by 1.3 % of the output's norm on N(0, 1) data of 32K tokens, where the
// FP4 pages themselves are off by 7 to 9 %. fp4: two-term NVFP4 queries and NVFP4 probabilities, as
// FP4 tensor cores compute.
enum class Arithmetic : std::uint8_t { kWide = 1, kFp4 = 2, kInt8 = 3 };

std::string_view scale_rule_name(ScaleRule rule);
std::string_view arithmetic_name(Arithmetic arithmetic);
Result<ScaleRule> parse_scale_rule(std::string_view name);
Result<Arithmetic> parse_arithmetic(std::string_view name);

struct Recipe {
  std::string mode = "bitdecoding-nvfp4";  // the preset it started from
  Format format = Format::kNvfp4;
  int sink_tokens = 16;  // 0 = off
  int tail_tokens = 64;  // 0 = only the incomplete group
  bool hadamard = true;
  bool key_shift = true;         // subtract the sidecar's key means
  bool value_shift = true;       // keep the sidecar's value means, if it has any, out of pages
  std::string key_shift_file;    // key_shift.safetensors; empty = none (then key_shift must be off
                                 // or calibration on)
  std::string outer_scale_file;  // key_outer and value_outer; empty = all outer scales are 1
  ScaleRule key_rule = ScaleRule::kFourSix;
  ScaleRule value_rule = ScaleRule::kAmax6;
  int query_terms = 2;                      // fp4 arithmetic: 1 or 2
  float probability_c = 8.0F;               // fp4 arithmetic
  float probability_tau = 21.0F / 1024.0F;  // fp4 arithmetic; 0 = amax6
  bool tau_calibrate = false;               // "probability_tau": "calibrate"
  Arithmetic arithmetic = Arithmetic::kInt8;
  bool reproducible = false;
  double shadow_pool_share = 0.03;  // of the cache's bytes; the floor may exceed it
  std::string calibrate_file;       // observe keys while serving and write their means here
};

// The seven mode names of the field, in the order tables print them.
const std::vector<std::string>& mode_names();
// The preset of a mode that this library serves itself (bf16, fp8, nvfp4, bitdecoding-*), else
// kUnsupported with the reason, or kInvalidArgument for an unknown name.
Result<Recipe> mode_recipe(std::string_view mode);

// {"mode": "...", <overrides>}. `origin` (a path, "environment", ...) begins every error.
Result<Recipe> parse_recipe(std::string_view json, std::string_view origin);
Result<Recipe> load_recipe(const std::string& path);
// load_recipe without validate_recipe at its end, for a caller that completes the recipe (key means
// named elsewhere) and validates it then.
Result<Recipe> read_recipe(const std::string& path);
// All keys, resolved; parses back to the same recipe.
std::string recipe_to_json(const Recipe& recipe, int indent = 2);
// One line a key: name, value, what it does, what it accepts.
std::string explain_recipe(const Recipe& recipe);
// Cross-field checks (a rule that does not fit the format, fp4 arithmetic on a BF16 format, ...).
Status validate_recipe(const Recipe& recipe);

}  // namespace bitdecoding
#pragma GCC visibility pop
