// SPDX-License-Identifier: Apache-2.0
// Outer scales: a power of two for each layer, KV head and side (K, V), above the block scales. I8
// tensors `key_outer` and `value_outer` [layers][kv_heads] of a safetensors file hold the
// exponents; they may lie beside `key_shift` in the sidecar of key means. A side without a tensor
// has 2^0.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding {

struct OuterScales {
  std::string path;
  int num_layers = 0;
  int num_kv_heads = 0;
  std::vector<std::int8_t> key;    // [num_layers][num_kv_heads], or empty
  std::vector<std::int8_t> value;  // the same
  std::map<std::string, std::string> metadata;

  // Heads [first_head, first_head + num_heads) of a layer, of `key` or `value`; empty when that is.
  // The caller has checked the ranges.
  std::vector<std::int8_t> slice(const std::vector<std::int8_t>& side, int layer, int first_head,
                                 int num_heads) const;
};

// kNotFound with the path, or when the file has neither tensor; kInvalidArgument for a shape, dtype
// or exponent that cannot be, with the layer and head.
Result<OuterScales> load_outer_scales(const std::string& path);
// The same from memory.
Result<OuterScales> parse_outer_scales(const std::string& name,
                                       std::span<const std::uint8_t> bytes);

// Exponents of another model: layers or KV heads differ.
Status check_outer_scales(const OuterScales& scales, int num_layers, int total_kv_heads);

// Writes what is there of both sides, and metadata, through a temporary file.
Status save_outer_scales(const OuterScales& scales, const std::string& path);

}  // namespace bitdecoding
