// SPDX-License-Identifier: Apache-2.0
// The seven modes and the names of rules and arithmetic.
#include <fmt/format.h>

#include <array>
#include <utility>

#include "bitdecoding/recipe.h"
#include "io/suggest.h"

namespace bitdecoding {
namespace {

constexpr std::array<std::pair<ScaleRule, const char*>, 5> kRules = {{
    {ScaleRule::kAmax6, "amax6"},
    {ScaleRule::kFourSix, "four_six"},
    {ScaleRule::kCodeSearch, "code_search"},
    {ScaleRule::kMxfp4Search, "mxfp4_search"},
    {ScaleRule::kMxfp4Floor, "mxfp4_floor"},
}};

constexpr std::array<std::pair<Arithmetic, const char*>, 3> kArithmetic = {{
    {Arithmetic::kWide, "wide"},
    {Arithmetic::kFp4, "fp4"},
    {Arithmetic::kInt8, "int8"},
}};

template <class Names, class T>
std::string_view name_of(const Names& names, T value) {
  for (const auto& [known, name] : names) {
    if (known == value) return name;
  }
  return "unknown";
}

template <class T, class Names>
Result<T> parse_name(const Names& names, std::string_view what, std::string_view text) {
  std::vector<std::string> known;
  for (const auto& [value, name] : names) {
    if (text == name) return value;
    known.emplace_back(name);
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("unknown {} '{}'; expected {}{}", what, text, join_or(known),
                            did_you_mean(text, known)));
}

// Caches without BF16 tokens, shift or rotation: what the other systems of the field do. They write
// a step's rows first and attend to the cache alone, which is what `reproducible` means here.
Recipe plain_recipe(std::string_view mode, Format format) {
  Recipe recipe;
  recipe.mode = mode;
  recipe.format = format;
  recipe.sink_tokens = 0;
  recipe.tail_tokens = 0;
  recipe.hadamard = false;
  recipe.key_shift = false;
  recipe.value_shift = false;
  recipe.key_rule = ScaleRule::kAmax6;
  recipe.value_rule = ScaleRule::kAmax6;
  recipe.arithmetic = Arithmetic::kWide;
  recipe.reproducible = true;
  return recipe;
}

Recipe mxfp4_recipe() {
  Recipe recipe;
  recipe.mode = "bitdecoding-mxfp4";
  recipe.format = Format::kMxfp4;
  recipe.key_rule = ScaleRule::kMxfp4Search;
  recipe.value_rule = ScaleRule::kMxfp4Search;
  return recipe;
}

}  // namespace

std::string_view scale_rule_name(ScaleRule rule) { return name_of(kRules, rule); }
std::string_view arithmetic_name(Arithmetic arithmetic) { return name_of(kArithmetic, arithmetic); }

Result<ScaleRule> parse_scale_rule(std::string_view name) {
  return parse_name<ScaleRule>(kRules, "scale rule", name);
}

Result<Arithmetic> parse_arithmetic(std::string_view name) {
  return parse_name<Arithmetic>(kArithmetic, "arithmetic", name);
}

const std::vector<std::string>& mode_names() {
  static const std::vector<std::string> names = {
      "bf16",
      "fp8",
      "turboquant-4bit-nc",
      "turboquant-4bit-nc-all-layers",
      "nvfp4",
      "bitdecoding-nvfp4",
      "bitdecoding-mxfp4",
  };
  return names;
}

Result<Recipe> mode_recipe(std::string_view mode) {
  if (mode == "bitdecoding-nvfp4") return Recipe{};
  if (mode == "bitdecoding-mxfp4") return mxfp4_recipe();
  if (mode == "bf16") return plain_recipe(mode, Format::kBf16);
  if (mode == "fp8") return plain_recipe(mode, Format::kFp8E4m3);
  if (mode == "nvfp4") return plain_recipe(mode, Format::kNvfp4Rows);
  if (mode == "turboquant-4bit-nc" || mode == "turboquant-4bit-nc-all-layers") {
    return Status(StatusCode::kUnsupported,
                  fmt::format("mode '{}' is vLLM's own cache on CUDA and has no pages here; serve "
                              "it with vLLM on a CUDA machine, or choose bf16, fp8, nvfp4, "
                              "bitdecoding-nvfp4 or bitdecoding-mxfp4",
                              mode));
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("unknown mode '{}'; expected {}{}", mode, join_or(mode_names()),
                            did_you_mean(mode, mode_names())));
}

}  // namespace bitdecoding
