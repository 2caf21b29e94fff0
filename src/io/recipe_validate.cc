// SPDX-License-Identifier: Apache-2.0
// Checks between the keys of a recipe. Each error names the keys, says why, and what to change.
#include <fmt/format.h>

#include <string>
#include <utility>

#include "bitdecoding/recipe.h"
#include "io/key_shift.h"
#include "io/recipe_fields.h"

namespace bitdecoding {
namespace {

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

bool is_mxfp4_rule(ScaleRule rule) {
  return rule == ScaleRule::kMxfp4Search || rule == ScaleRule::kMxfp4Floor;
}

// A Recipe can be filled by hand, past the parser: its values go through the same table.
Status check_fields(const Recipe& recipe) {
  Recipe scratch = recipe;
  for (const RecipeField& field : recipe_fields()) {
    const nlohmann::json value = field.get(recipe);
    if (!field.set(value, &scratch)) {
      return invalid(
          fmt::format("the value {} of '{}' is not accepted; expected {}",
                      value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                      field.name, field.accepts));
    }
  }
  return {};
}

Status check_rule(const char* key, ScaleRule rule, Format format) {
  if (scale_block(format) == 0) return {};
  const bool mx = format == Format::kMxfp4;
  if (is_mxfp4_rule(rule) == mx) return {};
  return invalid(
      fmt::format("{} '{}' does not fit format '{}', whose scales are {}; expected {}", key,
                  scale_rule_name(rule), format_name(format),
                  mx ? "powers of two (E8M0) over 32 values" : "E4M3 over 16 values",
                  mx ? "mxfp4_search or mxfp4_floor" : "amax6, four_six or code_search"));
}

Status check_key_path(const Recipe& recipe) {
  if (!is_tiled(recipe.format) && recipe.hadamard) {
    return invalid(
        fmt::format("hadamard needs a tiled format (nvfp4 or mxfp4), and format is "
                    "'{}'; set \"hadamard\": false",
                    format_name(recipe.format)));
  }
  if (!is_tiled(recipe.format) && recipe.key_shift) {
    return invalid(
        fmt::format("key_shift needs a tiled format (nvfp4 or mxfp4), and format is "
                    "'{}'; set \"key_shift\": false",
                    format_name(recipe.format)));
  }
  if (!is_tiled(recipe.format) && recipe.value_shift) {
    return invalid(
        fmt::format("value_shift needs a tiled format (nvfp4 or mxfp4), and format is "
                    "'{}'; set \"value_shift\": false",
                    format_name(recipe.format)));
  }
  if (recipe.key_shift && recipe.key_shift_file.empty() && recipe.calibrate_file.empty()) {
    return invalid(
        std::string("key_shift is on, but key_shift_file, the path of the calibrated key means, is "
                    "empty. ") +
        kMakeKeyShift);
  }
  return {};
}

Status check_outer_scales(const Recipe& recipe) {
  if (recipe.outer_scale_file.empty() || scale_block(recipe.format) != 0) return {};
  return invalid(
      fmt::format("outer_scale_file names powers of two above the scales of FP4 blocks, and format "
                  "'{}' has no scales; set it to \"\", or choose nvfp4, mxfp4 or nvfp4_rows",
                  format_name(recipe.format)));
}

Status check_arithmetic(const Recipe& recipe) {
  if (recipe.arithmetic == Arithmetic::kFp4 && !is_tiled(recipe.format)) {
    return invalid(
        fmt::format("arithmetic 'fp4' multiplies FP4 tiles, and format is '{}'; choose "
                    "format nvfp4 or mxfp4, or arithmetic wide",
                    format_name(recipe.format)));
  }
  if (recipe.arithmetic == Arithmetic::kInt8 && scale_block(recipe.format) == 0) {
    return invalid(
        fmt::format("arithmetic 'int8' multiplies FP4 codes, and format is '{}'; choose "
                    "an FP4 format (nvfp4, mxfp4 or nvfp4_rows), or arithmetic wide",
                    format_name(recipe.format)));
  }
  const bool from_sidecar = recipe.key_shift && !recipe.key_shift_file.empty();
  if (recipe.tau_calibrate && recipe.calibrate_file.empty() && !from_sidecar) {
    return invalid(
        "probability_tau is still \"calibrate\", which cannot be served or timed; run `bitdecoding "
        "calibrate MODEL`, whose sidecar `serve` finds by itself (elsewhere name it as "
        "key_shift_file), or give a number (0.0205078125 is a good start, 0 switches the rule "
        "off)");
  }
  return {};
}

}  // namespace

Status validate_recipe(const Recipe& recipe) {
  if (Status s = check_fields(recipe); !s.ok()) return s;
  if (Status s = check_rule("key_rule", recipe.key_rule, recipe.format); !s.ok()) return s;
  if (Status s = check_rule("value_rule", recipe.value_rule, recipe.format); !s.ok()) return s;
  if (Status s = check_key_path(recipe); !s.ok()) return s;
  if (Status s = check_outer_scales(recipe); !s.ok()) return s;
  if (recipe.format == Format::kBf16 && (recipe.sink_tokens > 0 || recipe.tail_tokens > 0)) {
    return invalid(
        "sink_tokens and tail_tokens keep tokens in BF16 beside the pages, and the pages of format "
        "'bf16' are BF16 already; set both to 0");
  }
  return check_arithmetic(recipe);
}

}  // namespace bitdecoding
