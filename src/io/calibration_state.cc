// SPDX-License-Identifier: Apache-2.0
#include "io/calibration_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>

#include "io/model_limits.h"
#include "io/safetensors.h"

namespace bitdecoding {
namespace {

constexpr const char* kVersion = "2";
constexpr std::size_t kFactors = kCalibratedFactors.size();
constexpr std::size_t kHistogram = ProbabilityHistogram::kRows * kE4m3Codes;

Status corrupt(const std::string& path, const std::string& what) {
  return {
      StatusCode::kCorrupt,
      fmt::format("'{}' is no state of a calibration: {}. Delete it and begin anew", path, what)};
}

std::size_t size(int n) { return static_cast<std::size_t>(n); }

// The histograms as two tensors, without the padding that a struct may have.
void flatten(const std::vector<ProbabilityHistogram>& histograms, std::vector<double>* codes,
             std::vector<double>* mass) {
  for (const ProbabilityHistogram& histogram : histograms) {
    for (const auto& row : histogram.rows) codes->insert(codes->end(), row.begin(), row.end());
    mass->push_back(histogram.mass);
  }
}

std::vector<ProbabilityHistogram> unflatten(const std::vector<double>& codes,
                                            const std::vector<double>& mass) {
  std::vector<ProbabilityHistogram> out(mass.size());
  auto from = codes.begin();
  for (std::size_t i = 0; i < out.size(); ++i) {
    for (auto& row : out[i].rows) {
      std::copy_n(from, kE4m3Codes, row.begin());
      from += kE4m3Codes;
    }
    out[i].mass = mass[i];
  }
  return out;
}

bool read_int(const SafetensorsIndex& index, const char* key, std::int64_t low, std::int64_t high,
              int* value) {
  const auto found = index.metadata.find(key);
  if (found == index.metadata.end()) return false;
  const char* end = found->second.data() + found->second.size();
  const auto [stop, error] = std::from_chars(found->second.data(), end, *value);
  return error == std::errc() && stop == end && *value >= low && *value <= high;
}

Status read_sizes(const ByteSource& source, const SafetensorsIndex& index,
                  CalibrationState* state) {
  const auto version = index.metadata.find("state_version");
  if (version == index.metadata.end() || version->second != kVersion) {
    return corrupt(source.name(), fmt::format("it has no state_version {}", kVersion));
  }
  const bool sizes =
      read_int(index, "num_layers", 1, kMaxLayers, &state->num_layers) &&
      read_int(index, "head_dim", 1, 4096, &state->head_dim) &&
      read_int(index, "total_kv_heads", 1, kMaxKvHeads, &state->total_kv_heads) &&
      read_int(index, "num_kv_heads", 1, state->total_kv_heads, &state->num_kv_heads) &&
      read_int(index, "first_kv_head", 0, state->total_kv_heads - state->num_kv_heads,
               &state->first_kv_head);
  return sizes ? Status() : corrupt(source.name(), "its sizes are missing or impossible");
}

}  // namespace

std::string rank_suffix(int first_kv_head, int num_kv_heads, int total_kv_heads) {
  if (num_kv_heads == total_kv_heads) return "";
  return fmt::format(".heads{}-{}", first_kv_head, first_kv_head + num_kv_heads - 1);
}

Status save_calibration_state(const CalibrationState& state, const std::string& path) {
  std::map<std::string, std::string> metadata = state.metadata;
  metadata.insert_or_assign("state_version", std::string(kVersion));
  for (const auto& [key, value] : {std::pair("num_layers", state.num_layers),
                                   {"head_dim", state.head_dim},
                                   {"first_kv_head", state.first_kv_head},
                                   {"num_kv_heads", state.num_kv_heads},
                                   {"total_kv_heads", state.total_kv_heads}}) {
    metadata[key] = std::to_string(value);
  }
  std::vector<double> layers(size(state.num_layers), 0.0);
  for (const int layer : state.layers) layers[size(layer)] = 1.0;
  std::vector<double> codes;
  std::vector<double> mass;
  flatten(state.probabilities, &codes, &mass);
  std::vector<SafetensorsTensor> tensors;
  const std::vector<std::pair<const char*, const std::vector<double>*>> all = {
      {"layers", &layers},
      {"key_rows", &state.keys.rows},
      {"key_skipped", &state.keys.skipped},
      {"key_sums", &state.keys.sums},
      {"key_squares", &state.keys.squares},
      {"value_rows", &state.values.rows},
      {"value_skipped", &state.values.skipped},
      {"value_sums", &state.values.sums},
      {"value_squares", &state.values.squares},
      {"probability_codes", &codes},
      {"probability_mass", &mass}};
  tensors.reserve(all.size());
  for (const auto& [name, values] : all) {
    tensors.push_back({name,
                       "F64",
                       {static_cast<std::int64_t>(values->size())},
                       std::as_bytes(std::span(*values))});
  }
  return write_safetensors(path, tensors, metadata);
}

Result<CalibrationState> load_calibration_state(const std::string& path) {
  Result<std::unique_ptr<ByteSource>> source = open_byte_source(path);
  if (!source.ok()) return source.status();
  Result<SafetensorsIndex> index = read_safetensors_index(*source.value());
  if (!index.ok()) return index.status();
  CalibrationState state;
  state.path = path;
  state.metadata = index.value().metadata;
  if (Status s = read_sizes(*source.value(), index.value(), &state); !s.ok()) return s;
  const std::size_t heads = size(state.num_layers) * size(state.num_kv_heads);
  const std::size_t factors = size(state.num_layers) * kFactors;
  std::vector<double> layers;
  std::vector<double> codes;
  std::vector<double> mass;
  const struct {
    const char* name;
    std::size_t count;
    std::vector<double>* values;
  } tensors[] = {{"layers", size(state.num_layers), &layers},
                 {"key_rows", heads, &state.keys.rows},
                 {"key_skipped", heads, &state.keys.skipped},
                 {"key_sums", heads * size(state.head_dim), &state.keys.sums},
                 {"key_squares", heads * size(state.head_dim), &state.keys.squares},
                 {"value_rows", heads, &state.values.rows},
                 {"value_skipped", heads, &state.values.skipped},
                 {"value_sums", heads * size(state.head_dim), &state.values.sums},
                 {"value_squares", heads * size(state.head_dim), &state.values.squares},
                 {"probability_codes", factors * kHistogram, &codes},
                 {"probability_mass", factors, &mass}};
  for (const auto& tensor : tensors) {
    const SafetensorsEntry* entry = index.value().find(tensor.name);
    if (entry == nullptr || entry->bytes != tensor.count * sizeof(double)) {
      return corrupt(path, fmt::format("tensor '{}' is missing or of another size", tensor.name));
    }
    Result<std::vector<double>> values = read_double_tensor(*source.value(), *entry);
    if (!values.ok()) return values.status();
    *tensor.values = values.take();
  }
  for (int layer = 0; layer < state.num_layers; ++layer) {
    if (layers[size(layer)] != 0.0) state.layers.push_back(layer);
  }
  state.probabilities = unflatten(codes, mass);
  return state;
}

namespace {

Status check_same(const CalibrationState& a, const CalibrationState& b) {
  const auto note = [](const CalibrationState& state) {
    const auto found = state.metadata.find("note");
    return found == state.metadata.end() ? std::string() : found->second;
  };
  if (a.num_layers == b.num_layers && a.head_dim == b.head_dim &&
      a.total_kv_heads == b.total_kv_heads && a.layers == b.layers && note(a) == note(b)) {
    return {};
  }
  return {StatusCode::kInvalidArgument,
          fmt::format("'{}' and '{}' are not parts of one calibration: their model, their layers "
                      "or how far they are differ",
                      a.path, b.path)};
}

void copy_head(const KeySums& in, std::size_t from, std::size_t dim, std::size_t to, KeySums* out) {
  out->rows[to] = in.rows[from];
  out->skipped[to] = in.skipped[from];
  for (std::size_t d = 0; d < dim; ++d) {
    out->sums[to * dim + d] = in.sums[from * dim + d];
    out->squares[to * dim + d] = in.squares[from * dim + d];
  }
}

void take_heads(const CalibrationState& part, std::vector<char>* held, CalibrationState* joined) {
  const std::size_t dim = size(part.head_dim);
  for (int h = 0; h < part.num_kv_heads; ++h) {
    char& taken = (*held)[size(part.first_kv_head + h)];
    if (taken != 0) continue;
    taken = 1;
    for (int layer = 0; layer < part.num_layers; ++layer) {
      const std::size_t from = size(layer) * size(part.num_kv_heads) + size(h);
      const std::size_t to =
          size(layer) * size(joined->total_kv_heads) + size(part.first_kv_head + h);
      copy_head(part.keys, from, dim, to, &joined->keys);
      copy_head(part.values, from, dim, to, &joined->values);
    }
  }
}

}  // namespace

Result<CalibrationState> join_calibration_states(const std::vector<CalibrationState>& parts) {
  if (parts.empty()) return Status(StatusCode::kInvalidArgument, "there are no states to join");
  std::int64_t held_heads = 0;
  for (const CalibrationState& part : parts) {
    if (Status s = check_same(parts.front(), part); !s.ok()) return s;
    held_heads += part.num_kv_heads;
  }
  CalibrationState joined = parts.front();
  joined.first_kv_head = 0;
  joined.num_kv_heads = joined.total_kv_heads;
  std::vector<char> held(size(joined.total_kv_heads), 0);
  // Before anything is allocated: the total is a file's word.
  if (held_heads >= joined.total_kv_heads) {
    const std::size_t heads = size(joined.num_layers) * size(joined.total_kv_heads);
    for (KeySums* sums : {&joined.keys, &joined.values}) {
      sums->rows.assign(heads, 0);
      sums->skipped.assign(heads, 0);
      sums->sums.assign(heads * size(joined.head_dim), 0);
      sums->squares.assign(heads * size(joined.head_dim), 0);
    }
    for (const CalibrationState& part : parts) take_heads(part, &held, &joined);
  }
  const auto missing = std::count(held.begin(), held.end(), 0);
  if (missing > 0) {
    return Status(StatusCode::kNotFound,
                  fmt::format("the states hold {} of the model's {} KV heads; a rank's is missing",
                              joined.total_kv_heads - missing, joined.total_kv_heads));
  }
  for (std::size_t p = 1; p < parts.size(); ++p) {
    for (std::size_t i = 0; i < joined.probabilities.size(); ++i) {
      joined.probabilities[i].add(parts[p].probabilities[i]);
    }
  }
  return joined;
}

}  // namespace bitdecoding
