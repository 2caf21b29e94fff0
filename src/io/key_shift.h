// SPDX-License-Identifier: Apache-2.0
// The sidecar key_shift.safetensors: calibrated means of K after RoPE, a tensor `key_shift`
// [layers][kv_heads][head_dim], those of V, a tensor `value_shift` of the same shape (others' files
// have none), and metadata that says what they were made from.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding {

// The one sentence on how to get a sidecar; every error about a missing one ends with it.
inline constexpr const char* kMakeKeyShift =
    "Make one with `bitdecoding calibrate MODEL`, which `bitdecoding serve` finds by itself "
    "(elsewhere name it as \"key_shift_file\"), or serve without key means: \"key_shift\": false";

struct KeyShift {
  std::string path;
  int num_layers = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  std::vector<float> values;                    // [num_layers][num_kv_heads][head_dim]
  std::vector<float> value_means;               // of V, the same shape; empty: none
  std::map<std::string, std::string> metadata;  // model, config_hash, tokens, version, ...
  std::vector<std::string> warnings;            // "looks uncalibrated", ...

  // Heads [first_head, first_head + num_heads) of a layer; the caller has checked the ranges.
  std::span<const float> slice(int layer, int first_head, int num_heads) const;
  // The same of V; empty without value means.
  std::span<const float> value_slice(int layer, int first_head, int num_heads) const;
};

// kNotFound with the path and the command that makes one; kCorrupt and kInvalidArgument with what
// is wrong in the file.
Result<KeyShift> load_key_shift(const std::string& path);
// The same from memory.
Result<KeyShift> parse_key_shift(const std::string& name, std::span<const std::uint8_t> bytes);

// A sidecar of another model: layers, KV heads or head_dim differ.
Status check_key_shift(const KeyShift& sidecar, int num_layers, int total_kv_heads, int head_dim);

// One sidecar of the parts that the ranks of a tensor-parallel model wrote, each some heads of all
// layers (metadata "kv_heads" and "total_kv_heads"), in any order. Ranks that share a head wrote
// the same means: the first part counts, and another that differs is refused, as are parts of
// different models and a head that no part has.
Result<KeyShift> join_key_shift(const std::vector<KeyShift>& parts);

// Writes values and metadata (with "version" set) through a temporary file.
Status save_key_shift(const KeyShift& sidecar, const std::string& path);

}  // namespace bitdecoding
