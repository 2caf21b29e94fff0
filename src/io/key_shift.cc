// SPDX-License-Identifier: Apache-2.0
#include "io/key_shift.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "bitdecoding/format.h"
#include "io/model_limits.h"
#include "io/safetensors.h"
#include "io/suggest.h"

namespace bitdecoding {
namespace {

constexpr const char* kTensorName = "key_shift";
constexpr const char* kValueTensorName = "value_shift";
constexpr const char* kVersion = "1";

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

Status missing_tensor(const std::string& name, const SafetensorsIndex& index) {
  constexpr std::size_t kListed = 8;
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : index.tensors) {
    if (names.size() < kListed) names.push_back("'" + entry.name + "'");
  }
  const std::string held = names.empty() ? "no tensor at all"
                                         : fmt::format("{} tensors, among them {}",
                                                       index.tensors.size(), join_or(names));
  return {StatusCode::kNotFound,
          fmt::format("'{}' holds {}; expected one tensor 'key_shift' [layers, kv_heads, "
                      "head_dim]. {}",
                      name, held, kMakeKeyShift)};
}

Status check_shape(const std::string& name, const SafetensorsEntry& entry) {
  const std::vector<std::int64_t>& s = entry.shape;
  const bool three = s.size() == 3;
  if (!three || s[0] < 1 || s[0] > kMaxLayers || s[1] < 1 || s[1] > kMaxKvHeads ||
      std::find(kHeadDims.begin(), kHeadDims.end(), s[2]) == kHeadDims.end()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("'{}': tensor 'key_shift' has shape {}; expected [layers, kv_heads, "
                        "head_dim] with head_dim 64, 96, 128, 192 or 256",
                        name, shape_text(s))};
  }
  return {};
}

bool all_equal(std::span<const float> values) {
  return std::all_of(values.begin(), values.end(), [&](float v) { return v == values[0]; });
}

void find_warnings(KeyShift* sidecar) {
  if (all_equal(sidecar->values)) {
    sidecar->warnings.push_back(fmt::format("'{}' looks uncalibrated: all {} key means are {}",
                                            sidecar->path, sidecar->values.size(),
                                            sidecar->values[0]));
    return;
  }
  std::string layers;
  for (int layer = 0; layer < sidecar->num_layers; ++layer) {
    if (all_equal(sidecar->slice(layer, 0, sidecar->num_kv_heads))) {
      layers += (layers.empty() ? "" : ", ") + std::to_string(layer);
    }
  }
  if (!layers.empty()) {
    sidecar->warnings.push_back(
        fmt::format("'{}' looks uncalibrated in layers {}: their key means are all equal",
                    sidecar->path, layers));
  }
}

Status read_value_means(const ByteSource& source, const SafetensorsIndex& index,
                        const SafetensorsEntry& keys, std::vector<float>* means) {
  const SafetensorsEntry* entry = index.find(kValueTensorName);
  if (entry == nullptr) return {};
  if (entry->shape != keys.shape) {
    return {StatusCode::kInvalidArgument,
            fmt::format("'{}': tensor 'value_shift' has shape {}; expected that of 'key_shift', {}",
                        source.name(), shape_text(entry->shape), shape_text(keys.shape))};
  }
  Result<std::vector<float>> values = read_float_tensor(source, *entry);
  if (values.ok()) *means = values.take();
  return values.ok() ? Status() : values.status();
}

Result<KeyShift> read_key_shift(const ByteSource& source) {
  Result<SafetensorsIndex> index = read_safetensors_index(source);
  if (!index.ok()) return index.status();
  const SafetensorsEntry* entry = index.value().find(kTensorName);
  if (entry == nullptr) return missing_tensor(source.name(), index.value());
  const auto version = index.value().metadata.find("version");
  if (version != index.value().metadata.end() && version->second != kVersion) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("'{}' is a sidecar of version {}; this library reads version {}",
                              source.name(), version->second, kVersion));
  }
  if (Status s = check_shape(source.name(), *entry); !s.ok()) return s;
  Result<std::vector<float>> values = read_float_tensor(source, *entry);
  if (!values.ok()) return values.status();
  KeyShift sidecar;
  sidecar.path = source.name();
  sidecar.num_layers = static_cast<int>(entry->shape[0]);
  sidecar.num_kv_heads = static_cast<int>(entry->shape[1]);
  sidecar.head_dim = static_cast<int>(entry->shape[2]);
  sidecar.values = values.take();
  if (Status s = read_value_means(source, index.value(), *entry, &sidecar.value_means); !s.ok()) {
    return s;
  }
  sidecar.metadata = index.value().metadata;
  find_warnings(&sidecar);
  return sidecar;
}

std::span<const float> slice_of(const KeyShift& sidecar, const std::vector<float>& values,
                                int layer, int first_head, int num_heads) {
  const auto heads = static_cast<std::size_t>(sidecar.num_kv_heads);
  const auto dim = static_cast<std::size_t>(sidecar.head_dim);
  const std::size_t begin =
      (static_cast<std::size_t>(layer) * heads + static_cast<std::size_t>(first_head)) * dim;
  return {values.data() + begin, static_cast<std::size_t>(num_heads) * dim};
}

}  // namespace

std::span<const float> KeyShift::slice(int layer, int first_head, int num_heads) const {
  return slice_of(*this, values, layer, first_head, num_heads);
}

std::span<const float> KeyShift::value_slice(int layer, int first_head, int num_heads) const {
  if (value_means.empty()) return {};
  return slice_of(*this, value_means, layer, first_head, num_heads);
}

Result<KeyShift> load_key_shift(const std::string& path) {
  Result<std::unique_ptr<ByteSource>> source = open_byte_source(path);
  if (!source.ok()) {
    const bool missing = source.status().code() == StatusCode::kNotFound;
    return Status(
        source.status().code(),
        missing ? fmt::format("there is no sidecar of key means at '{}'. {}", path, kMakeKeyShift)
                : "the sidecar of key means: " + source.status().message());
  }
  return read_key_shift(*source.value());
}

Result<KeyShift> parse_key_shift(const std::string& name, std::span<const std::uint8_t> bytes) {
  return read_key_shift(*memory_byte_source(name, bytes));
}

Status check_key_shift(const KeyShift& sidecar, int num_layers, int total_kv_heads, int head_dim) {
  if (sidecar.num_layers == num_layers && sidecar.num_kv_heads == total_kv_heads &&
      sidecar.head_dim == head_dim) {
    return {};
  }
  const auto model = sidecar.metadata.find("model");
  return {StatusCode::kInvalidArgument,
          fmt::format("the sidecar '{}'{} holds key means of {} layers, {} KV heads and head_dim "
                      "{}, and the model has {} layers, {} KV heads and head_dim {}: it belongs to "
                      "another model. {}",
                      sidecar.path,
                      model == sidecar.metadata.end() ? "" : " (of " + model->second + ")",
                      sidecar.num_layers, sidecar.num_kv_heads, sidecar.head_dim, num_layers,
                      total_kv_heads, head_dim, kMakeKeyShift)};
}

Status save_key_shift(const KeyShift& sidecar, const std::string& path) {
  std::map<std::string, std::string> metadata = sidecar.metadata;
  metadata["version"] = kVersion;
  const std::vector<std::int64_t> shape = {sidecar.num_layers, sidecar.num_kv_heads,
                                           sidecar.head_dim};
  std::vector<SafetensorsTensor> tensors = {
      {kTensorName, "F32", shape, std::as_bytes(std::span(sidecar.values))}};
  if (!sidecar.value_means.empty()) {
    tensors.push_back(
        {kValueTensorName, "F32", shape, std::as_bytes(std::span(sidecar.value_means))});
  }
  return write_safetensors(path, tensors, metadata);
}

}  // namespace bitdecoding
