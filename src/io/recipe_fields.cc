// SPDX-License-Identifier: Apache-2.0
#include "io/recipe_fields.h"

#include <cstdint>
#include <optional>
#include <string>

namespace bitdecoding {
namespace {

using Json = nlohmann::json;

constexpr int kMaxBf16Tokens = 4096;
constexpr std::size_t kMaxPathBytes = 4096;
// The largest product of P = 1 and c that E2M1 times E4M3 can hold: 6 * 448.
constexpr double kMaxProbabilityFactor = 2688.0;
constexpr double kMaxTau = 448.0;
constexpr double kMaxPoolShare = 0.5;

std::optional<std::int64_t> integer(const Json& value, std::int64_t low, std::int64_t high) {
  if (!value.is_number_integer()) return std::nullopt;
  // An unsigned value above int64's range would turn negative in get().
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) {
    return std::nullopt;
  }
  const auto n = value.get<std::int64_t>();
  if (n < low || n > high) return std::nullopt;
  return n;
}

bool set_integer(const Json& value, std::int64_t low, std::int64_t high, int* out) {
  const std::optional<std::int64_t> n = integer(value, low, high);
  if (n) *out = static_cast<int>(*n);
  return n.has_value();
}

std::optional<double> number(const Json& value, double low, double high) {
  if (!value.is_number()) return std::nullopt;
  const auto x = value.get<double>();
  if (!(x >= low && x <= high)) return std::nullopt;
  return x;
}

bool set_bool(const Json& value, bool* out) {
  if (!value.is_boolean()) return false;
  *out = value.get<bool>();
  return true;
}

bool set_path(const Json& value, std::string* out) {
  if (!value.is_string()) return false;
  const auto& path = value.get_ref<const std::string&>();
  if (path.size() > kMaxPathBytes || path.find('\0') != std::string::npos) return false;
  *out = path;
  return true;
}

template <class T>
bool set_name(const Json& value, Result<T> (*parse)(std::string_view), T* out) {
  if (!value.is_string()) return false;
  const Result<T> parsed = parse(value.get_ref<const std::string&>());
  if (parsed.ok()) *out = parsed.value();
  return parsed.ok();
}

bool set_tau(const Json& value, Recipe* recipe) {
  if (value.is_string()) {
    if (value.get_ref<const std::string&>() != "calibrate") return false;
    recipe->tau_calibrate = true;
    return true;
  }
  const std::optional<double> tau = number(value, 0.0, kMaxTau);
  if (!tau) return false;
  recipe->probability_tau = static_cast<float>(*tau);
  recipe->tau_calibrate = false;
  return true;
}

constexpr const char* kRuleNames =
    "\"amax6\", \"four_six\", \"code_search\", \"mxfp4_search\" or \"mxfp4_floor\"";

std::vector<RecipeField> make_fields() {
  return {
      {"format", "\"bf16\", \"fp8_e4m3\", \"nvfp4_rows\", \"nvfp4\" or \"mxfp4\"",
       "what the bytes of a page mean", [](const Recipe& r) { return Json(format_name(r.format)); },
       [](const Json& v, Recipe* r) { return set_name(v, parse_format, &r->format); }},
      {"sink_tokens", "an integer from 0 to 4096 (0 = off)",
       "first tokens of a sequence that stay in BF16",
       [](const Recipe& r) { return Json(r.sink_tokens); },
       [](const Json& v, Recipe* r) { return set_integer(v, 0, kMaxBf16Tokens, &r->sink_tokens); }},
      {"tail_tokens", "an integer from 0 to 4096 (0 = only the incomplete group)",
       "newest tokens of a sequence that stay in BF16",
       [](const Recipe& r) { return Json(r.tail_tokens); },
       [](const Json& v, Recipe* r) { return set_integer(v, 0, kMaxBf16Tokens, &r->tail_tokens); }},
      {"hadamard", "true or false", "rotates K and Q over head_dim before keys are quantized",
       [](const Recipe& r) { return Json(r.hadamard); },
       [](const Json& v, Recipe* r) { return set_bool(v, &r->hadamard); }},
      {"key_shift", "true or false", "subtracts calibrated key means before the rotation",
       [](const Recipe& r) { return Json(r.key_shift); },
       [](const Json& v, Recipe* r) { return set_bool(v, &r->key_shift); }},
      {"value_shift", "true or false",
       "keeps calibrated value means out of pages and adds them back to outputs",
       [](const Recipe& r) { return Json(r.value_shift); },
       [](const Json& v, Recipe* r) { return set_bool(v, &r->value_shift); }},
      {"key_shift_file", "the path of a key_shift.safetensors, or \"\" for none",
       "where the means of keys and values are; relative to the recipe's folder",
       [](const Recipe& r) { return Json(r.key_shift_file); },
       [](const Json& v, Recipe* r) { return set_path(v, &r->key_shift_file); }},
      {"outer_scale_file", "the path of a safetensors file with key_outer or value_outer, or \"\"",
       "powers of two above the block scales, one a layer and KV head; relative to the recipe's "
       "folder",
       [](const Recipe& r) { return Json(r.outer_scale_file); },
       [](const Json& v, Recipe* r) { return set_path(v, &r->outer_scale_file); }},
      {"key_rule", kRuleNames, "how the scale of a block of K is chosen",
       [](const Recipe& r) { return Json(scale_rule_name(r.key_rule)); },
       [](const Json& v, Recipe* r) { return set_name(v, parse_scale_rule, &r->key_rule); }},
      {"value_rule", kRuleNames, "how the scale of a block of V is chosen",
       [](const Recipe& r) { return Json(scale_rule_name(r.value_rule)); },
       [](const Json& v, Recipe* r) { return set_name(v, parse_scale_rule, &r->value_rule); }},
      {"query_terms", "1 or 2", "NVFP4 terms a query is split into; fp4 arithmetic only",
       [](const Recipe& r) { return Json(r.query_terms); },
       [](const Json& v, Recipe* r) { return set_integer(v, 1, 2, &r->query_terms); }},
      {"probability_c", "a number from 1 to 2688",
       "multiplies probabilities before they are quantized; fp4 arithmetic only",
       [](const Recipe& r) { return Json(r.probability_c); },
       [](const Json& v, Recipe* r) {
         const std::optional<double> c = number(v, 1.0, kMaxProbabilityFactor);
         if (c) r->probability_c = static_cast<float>(*c);
         return c.has_value();
       }},
      {"probability_tau", "a number from 0 to 448 (0 = amax6) or \"calibrate\"",
       "blocks of probabilities up to this maximum are scaled by max/2; fp4 arithmetic only",
       [](const Recipe& r) {
         return r.tau_calibrate ? Json("calibrate") : Json(r.probability_tau);
       },
       [](const Json& v, Recipe* r) { return set_tau(v, r); }},
      {"arithmetic", "\"wide\", \"int8\" or \"fp4\"", "precision of queries and probabilities",
       [](const Recipe& r) { return Json(arithmetic_name(r.arithmetic)); },
       [](const Json& v, Recipe* r) { return set_name(v, parse_arithmetic, &r->arithmetic); }},
      {"reproducible", "true or false",
       "makes results a function of the tokens alone, whatever the chunks, pages and prefix hits",
       [](const Recipe& r) { return Json(r.reproducible); },
       [](const Json& v, Recipe* r) { return set_bool(v, &r->reproducible); }},
      {"shadow_pool_share", "a number from 0 to 0.5",
       "part of the cache's bytes that the BF16 tokens may take; the floor may exceed it",
       [](const Recipe& r) { return Json(r.shadow_pool_share); },
       [](const Json& v, Recipe* r) {
         const std::optional<double> share = number(v, 0.0, kMaxPoolShare);
         if (share) r->shadow_pool_share = *share;
         return share.has_value();
       }},
      {"calibrate_file", "the path of a file to write, or \"\" for none",
       "observes keys while serving and writes their means here; relative to the recipe's folder",
       [](const Recipe& r) { return Json(r.calibrate_file); },
       [](const Json& v, Recipe* r) { return set_path(v, &r->calibrate_file); }},
  };
}

}  // namespace

const std::vector<RecipeField>& recipe_fields() {
  static const std::vector<RecipeField> fields = make_fields();
  return fields;
}

}  // namespace bitdecoding
