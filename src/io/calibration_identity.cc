// SPDX-License-Identifier: Apache-2.0
#include "io/calibration_identity.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "io/file.h"
#include "io/recipe_fields.h"

namespace bitdecoding {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kMaxConfigBytes = std::int64_t{16} << 20;
constexpr int kSamples = 64;
constexpr std::size_t kSampleBytes = 4096;

constexpr const char* kModelFields[] = {
    "model_type",           "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",  "head_dim",          "hidden_size",
    "vocab_size",           "rope_theta",        "rope_scaling",
    "rope_parameters",      "sliding_window",    "layer_types",
    "partial_rotary_factor"};

constexpr const char* kRecipeKeys[] = {"format",    "sink_tokens", "tail_tokens", "hadamard",
                                       "key_shift", "key_rule",    "reproducible"};

class Fnv {
 public:
  void add(std::string_view bytes) {
    for (const char c : bytes) {
      hash_ = (hash_ ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    }
  }
  std::string text() const { return fmt::format("{:016x}", hash_); }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

bool is_weight_file(const fs::path& path) {
  const std::string extension = path.extension().string();
  return extension == ".safetensors" || extension == ".bin" || extension == ".gguf";
}

// What lies evenly spread over a file, first and last block included.
std::string sample_hash(const fs::path& path, std::uint64_t size) {
  Fnv hash;
  std::ifstream file(path, std::ios::binary);
  std::string block(kSampleBytes, '\0');
  const std::uint64_t last = size > kSampleBytes ? size - kSampleBytes : 0;
  for (int i = 0; i < kSamples && file; ++i) {
    file.seekg(static_cast<std::streamoff>(last * static_cast<unsigned>(i) / (kSamples - 1)));
    file.read(block.data(), static_cast<std::streamsize>(block.size()));
    hash.add({block.data(), static_cast<std::size_t>(file.gcount())});
    if (last == 0) break;
  }
  return hash.text();
}

Result<std::string> weights_identity(const std::string& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (is_weight_file(entry.path())) files.push_back(entry.path());
  }
  if (files.empty()) {
    return Status(
        StatusCode::kNotFound,
        fmt::format("the model folder '{}' holds no weights (.safetensors, .bin or .gguf)",
                    folder));
  }
  std::sort(files.begin(), files.end());
  std::string text;
  for (const fs::path& file : files) {
    const std::uint64_t size = fs::file_size(file, error);
    text += fmt::format("{}{} {} {}", text.empty() ? "" : "; ", file.filename().string(), size,
                        sample_hash(file, size));
  }
  return text;
}

}  // namespace

std::string content_hash(std::string_view bytes) {
  Fnv hash;
  hash.add(bytes);
  return hash.text();
}

Result<Identity> model_identity(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const Result<std::string> text = read_file(path, kMaxConfigBytes);
  if (!text.ok()) return text.status();
  nlohmann::json config = nlohmann::json::parse(text.value(), nullptr, false);
  if (!config.is_object()) {
    return Status(StatusCode::kCorrupt, fmt::format("'{}' is no JSON object", path));
  }
  // Models with several parts describe the one that has a KV cache here.
  if (const auto inner = config.find("text_config"); inner != config.end() && inner->is_object()) {
    config = nlohmann::json(*inner);
  }
  Identity identity;
  for (const char* field : kModelFields) {
    const auto found = config.find(field);
    if (found != config.end() && !found->is_null()) {
      identity[fmt::format("model.{}", field)] =
          found->is_string() ? found->get<std::string>() : found->dump();
    }
  }
  Result<std::string> weights = weights_identity(folder);
  if (!weights.ok()) return weights.status();
  identity["model.weights"] = weights.take();
  return identity;
}

Identity recipe_identity(const Recipe& recipe) {
  Identity identity;
  for (const RecipeField& field : recipe_fields()) {
    for (const char* key : kRecipeKeys) {
      if (std::string_view(key) != field.name) continue;
      const nlohmann::json value = field.get(recipe);
      identity[fmt::format("recipe.{}", key)] =
          value.is_string() ? value.get<std::string>() : value.dump();
    }
  }
  return identity;
}

Status check_identity(const KeyShift& sidecar, const Identity& wanted) {
  if (sidecar.metadata.count("calibration_version") == 0) return {};
  for (const auto& [key, value] : wanted) {
    const auto found = sidecar.metadata.find(key);
    const std::string held = found == sidecar.metadata.end() ? "(nothing)" : found->second;
    if (held == value) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("the calibration '{}' does not belong here: its {} is {}, and this one is "
                        "{}",
                        sidecar.path, key, held, value)};
  }
  return {};
}

}  // namespace bitdecoding
