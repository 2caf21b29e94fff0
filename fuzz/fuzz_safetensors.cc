// SPDX-License-Identifier: Apache-2.0
// Any bytes: an index whose tensors lie inside the file, or a sentence.
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "io/key_shift.h"
#include "io/outer_scale.h"
#include "io/safetensors.h"
#include "require.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using bitdecoding::require;
  const auto source = bitdecoding::memory_byte_source("fuzz", {data, size});
  const auto index = bitdecoding::read_safetensors_index(*source);
  if (!index.ok()) {
    require(!index.status().message().empty(), "an error has a sentence");
    return 0;
  }
  std::uint64_t bytes = 0;
  for (const auto& entry : index.value().tensors) {
    require(entry.offset <= size && entry.bytes <= size - entry.offset,
            "a tensor lies in the file");
    bytes += entry.bytes;
    const auto values = bitdecoding::read_float_tensor(*source, entry);
    if (!values.ok()) continue;
    for (const float v : values.value()) require(std::isfinite(v), "values are finite");
  }
  require(bytes < size, "tensors do not overlap");
  const auto scales = bitdecoding::parse_outer_scales("fuzz", {data, size});
  if (scales.ok()) {
    const auto& o = scales.value();
    const auto all =
        static_cast<std::size_t>(o.num_layers) * static_cast<std::size_t>(o.num_kv_heads);
    require(all > 0 && (o.key.size() == all || o.value.size() == all), "a side has all heads");
  }
  const auto sidecar = bitdecoding::parse_key_shift("fuzz", {data, size});
  if (!sidecar.ok()) return 0;
  const auto& s = sidecar.value();
  const auto slice = s.slice(s.num_layers - 1, 0, s.num_kv_heads);
  require(slice.data() + slice.size() == s.values.data() + s.values.size(),
          "slices end the tensor");
  return 0;
}
