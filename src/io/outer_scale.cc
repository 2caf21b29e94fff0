// SPDX-License-Identifier: Apache-2.0
#include "io/outer_scale.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <utility>

#include "bitdecoding/format.h"
#include "io/model_limits.h"
#include "io/safetensors.h"

namespace bitdecoding {
namespace {

constexpr const char* kKeyName = "key_outer";
constexpr const char* kValueName = "value_outer";

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

Status check_shape(const std::string& file, const SafetensorsEntry& entry,
                   const OuterScales& scales) {
  const std::vector<std::int64_t>& s = entry.shape;
  if (s.size() != 2 || s[0] < 1 || s[0] > kMaxLayers || s[1] < 1 || s[1] > kMaxKvHeads) {
    return invalid(fmt::format("'{}': tensor '{}' has shape [{}]; expected [layers, kv_heads]",
                               file, entry.name, fmt::join(s, ", ")));
  }
  if (scales.num_layers != 0 && (s[0] != scales.num_layers || s[1] != scales.num_kv_heads)) {
    return invalid(fmt::format(
        "'{}': tensor '{}' has shape [{}], and '{}' has [{}, {}]; both are "
        "of the same layers and KV heads",
        file, entry.name, fmt::join(s, ", "), kKeyName, scales.num_layers, scales.num_kv_heads));
  }
  return {};
}

Status check_exponents(const std::string& file, const SafetensorsEntry& entry,
                       const std::vector<std::int8_t>& exponents) {
  const auto heads = static_cast<std::size_t>(entry.shape[1]);
  for (std::size_t i = 0; i < exponents.size(); ++i) {
    if (std::abs(int{exponents[i]}) <= kMaxOuterExponent) continue;
    return invalid(
        fmt::format("'{}': tensor '{}' has the exponent {} at layer {}, KV head {}; "
                    "expected -{} to {}",
                    file, entry.name, exponents[i], i / heads, i % heads, kMaxOuterExponent,
                    kMaxOuterExponent));
  }
  return {};
}

Status read_side(const ByteSource& source, const SafetensorsIndex& index, const char* name,
                 OuterScales* scales, std::vector<std::int8_t>* side) {
  const SafetensorsEntry* entry = index.find(name);
  if (entry == nullptr) return {};
  if (Status s = check_shape(source.name(), *entry, *scales); !s.ok()) return s;
  Result<std::vector<std::int8_t>> exponents = read_int8_tensor(source, *entry);
  if (!exponents.ok()) return exponents.status();
  if (Status s = check_exponents(source.name(), *entry, exponents.value()); !s.ok()) return s;
  scales->num_layers = static_cast<int>(entry->shape[0]);
  scales->num_kv_heads = static_cast<int>(entry->shape[1]);
  *side = exponents.take();
  return {};
}

Result<OuterScales> read_outer_scales(const ByteSource& source) {
  Result<SafetensorsIndex> index = read_safetensors_index(source);
  if (!index.ok()) return index.status();
  OuterScales scales;
  scales.path = source.name();
  scales.metadata = index.value().metadata;
  for (auto [name, side] : {std::pair(kKeyName, &scales.key), {kValueName, &scales.value}}) {
    if (Status s = read_side(source, index.value(), name, &scales, side); !s.ok()) return s;
  }
  if (scales.num_layers != 0) return scales;
  return Status(StatusCode::kNotFound,
                fmt::format("'{}' holds no outer scales; expected I8 tensors '{}' or '{}' or both, "
                            "[layers, kv_heads], or \"outer_scale_file\": \"\" in the recipe",
                            source.name(), kKeyName, kValueName));
}

}  // namespace

std::vector<std::int8_t> OuterScales::slice(const std::vector<std::int8_t>& side, int layer,
                                            int first_head, int num_heads) const {
  if (side.empty()) return {};
  const auto begin = side.begin() + std::ptrdiff_t{layer} * num_kv_heads + first_head;
  return {begin, begin + num_heads};
}

Result<OuterScales> load_outer_scales(const std::string& path) {
  Result<std::unique_ptr<ByteSource>> source = open_byte_source(path);
  if (!source.ok()) {
    return Status(source.status().code(), "the outer scales: " + source.status().message());
  }
  return read_outer_scales(*source.value());
}

Result<OuterScales> parse_outer_scales(const std::string& name,
                                       std::span<const std::uint8_t> bytes) {
  return read_outer_scales(*memory_byte_source(name, bytes));
}

Status check_outer_scales(const OuterScales& scales, int num_layers, int total_kv_heads) {
  if (scales.num_layers == num_layers && scales.num_kv_heads == total_kv_heads) return {};
  return invalid(
      fmt::format("'{}' holds outer scales of {} layers and {} KV heads, and the model "
                  "has {} layers and {} KV heads: they belong to another model",
                  scales.path, scales.num_layers, scales.num_kv_heads, num_layers, total_kv_heads));
}

Status save_outer_scales(const OuterScales& scales, const std::string& path) {
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, side] : {std::pair(kKeyName, &scales.key), {kValueName, &scales.value}}) {
    if (side->empty()) continue;
    tensors.push_back(
        {name, "I8", {scales.num_layers, scales.num_kv_heads}, std::as_bytes(std::span(*side))});
  }
  return write_safetensors(path, tensors, scales.metadata);
}

}  // namespace bitdecoding
