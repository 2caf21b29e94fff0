// SPDX-License-Identifier: Apache-2.0
// Calibration while serving: bd_write feeds the sums of keys and bd_attend the histograms of
// probabilities; phases, saving and loading.
#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "calibrate/finish.h"
#include "capi/internal.h"

namespace bitdecoding::capi {

Status prepare_calibration(RuntimeState* runtime, const bd_layer_options& o) {
  if (runtime->key_means == nullptr) {
    Result<std::unique_ptr<KeyMeanAccumulator>> made =
        KeyMeanAccumulator::make(o.num_layers, o.total_kv_heads, o.head_dim);
    if (!made.ok()) return made.status();
    runtime->key_means = made.take();
    made = KeyMeanAccumulator::make(o.num_layers, o.total_kv_heads, o.head_dim);
    if (!made.ok()) return made.status();
    runtime->value_means = made.take();
    runtime->first_kv_head = o.first_kv_head;
    runtime->num_kv_heads = o.num_kv_heads;
    for (int layer = 0; layer < o.num_layers; ++layer) {
      for (const float c : kCalibratedFactors) runtime->taus.emplace_back(c);
    }
  }
  const KeyMeanAccumulator& means = *runtime->key_means;
  if (means.num_layers() != o.num_layers || means.num_kv_heads() != o.total_kv_heads ||
      means.head_dim() != o.head_dim || runtime->first_kv_head != o.first_kv_head ||
      runtime->num_kv_heads != o.num_kv_heads) {
    return {StatusCode::kUnsupported,
            fmt::format("layer {} has {} KV heads and head_dim {}, and the layers before it have "
                        "{} and {}; one sidecar holds layers of one shape only, so this model "
                        "cannot be calibrated",
                        o.layer_index, o.total_kv_heads, o.head_dim, means.num_kv_heads(),
                        means.head_dim())};
  }
  runtime->calibrated_layers.insert(o.layer_index);
  return {};
}

Status observe_rows(const bd_layer& layer, const bd_steps& steps, const TensorView& key,
                    const TensorView& value) {
  RuntimeState& runtime = *layer.runtime;
  if (runtime.recipe.calibrate_file.empty()) return {};
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  if (runtime.phase != CalibrationPhase::kAll && runtime.phase != CalibrationPhase::kKeys) {
    return {};
  }
  const auto add = [&](KeyMeanAccumulator* means, const TensorView& rows) {
    return means->add(layer.layer_index, layer.first_kv_head, layer.config.num_kv_heads, rows,
                      steps.plan.num_tokens, steps.slots.data());
  };
  if (Status s = add(runtime.key_means.get(), key); !s.ok()) return s;
  return add(runtime.value_means.get(), value);
}

namespace {

constexpr std::array<std::pair<const char*, CalibrationPhase>, 4> kPhases = {{
    {"all", CalibrationPhase::kAll},
    {"off", CalibrationPhase::kOff},
    {"keys", CalibrationPhase::kKeys},
    {"probabilities", CalibrationPhase::kProbabilities},
}};

// The caller holds the mutex.
Status check_calibrating(const RuntimeState& runtime) {
  if (runtime.recipe.calibrate_file.empty()) {
    return invalid(
        "the recipe has no calibrate_file, so no keys were observed; set it and serve some prompts "
        "first");
  }
  if (runtime.key_means == nullptr) {
    return invalid("the runtime has no layers yet, so no keys were observed");
  }
  return {};
}

CalibrationState state_of(const RuntimeState& runtime) {
  CalibrationState state;
  const KeyMeanAccumulator& means = *runtime.key_means;
  state.num_layers = means.num_layers();
  state.head_dim = means.head_dim();
  state.first_kv_head = runtime.first_kv_head;
  state.num_kv_heads = runtime.num_kv_heads;
  state.total_kv_heads = means.num_kv_heads();
  state.layers.assign(runtime.calibrated_layers.begin(), runtime.calibrated_layers.end());
  state.keys = means.state(runtime.first_kv_head, runtime.num_kv_heads);
  state.values = runtime.value_means->state(runtime.first_kv_head, runtime.num_kv_heads);
  for (const TauCalibrator& tau : runtime.taus) state.probabilities.push_back(tau.histogram());
  return state;
}

// The sidecar of what was observed so far, of this rank's heads.
Result<KeyShift> collect(const RuntimeState& runtime) {
  Result<KeyShift> sidecar = finish_calibration(state_of(runtime));
  if (!sidecar.ok()) return sidecar;
  std::map<std::string, std::string>& metadata = sidecar.value().metadata;
  if (!runtime.model.empty()) metadata["model"] = runtime.model;
  // A rank of a tensor-parallel model holds some heads only: its file says which, and cannot be
  // mistaken for the whole.
  const int total = runtime.key_means->num_kv_heads();
  if (runtime.num_kv_heads != total) {
    metadata["kv_heads"] = fmt::format("{}-{}", runtime.first_kv_head,
                                       runtime.first_kv_head + runtime.num_kv_heads - 1);
    metadata["total_kv_heads"] = std::to_string(total);
  }
  return sidecar;
}

std::string rank_path(const RuntimeState& runtime, const std::string& path) {
  return path + rank_suffix(runtime.first_kv_head, runtime.num_kv_heads,
                            runtime.key_means->num_kv_heads());
}

Status save(RuntimeState* runtime, const char* path, std::uint64_t* tokens) {
  const std::string& file = path != nullptr ? path : runtime->recipe.calibrate_file;
  KeyShift sidecar;
  std::string target;
  {
    const std::lock_guard<std::mutex> lock(runtime->mutex);
    if (Status s = check_calibrating(*runtime); !s.ok()) return s;
    Result<KeyShift> collected = collect(*runtime);
    if (!collected.ok()) return collected.status();
    sidecar = collected.take();
    target = rank_path(*runtime, file);
  }
  if (tokens != nullptr) *tokens = std::stoull(sidecar.metadata.at("tokens"));
  return save_key_shift(sidecar, target);
}

// The layers take the means observed so far, each side as the recipe says.
Status adopt_means(RuntimeState* runtime) {
  const std::vector<int> layers(runtime->calibrated_layers.begin(),
                                runtime->calibrated_layers.end());
  const auto size = static_cast<std::ptrdiff_t>(runtime->num_kv_heads) *
                    static_cast<std::ptrdiff_t>(runtime->key_means->head_dim());
  const auto take = [&](const KeyMeanAccumulator& from, std::vector<float> bd_layer::*rows,
                        const float* LayerConfig::*shift) -> Status {
    const Result<std::vector<float>> means =
        from.means(layers, runtime->first_kv_head, runtime->num_kv_heads);
    if (!means.ok()) return means.status();
    for (bd_layer* layer : runtime->live_calibrated) {
      const auto begin = means.value().begin() + layer->layer_index * size;
      (layer->*rows).assign(begin, begin + size);
      layer->config.*shift = (layer->*rows).data();
    }
    return {};
  };
  if (runtime->recipe.key_shift) {
    if (Status s = take(*runtime->key_means, &bd_layer::key_shift, &LayerConfig::key_shift);
        !s.ok()) {
      return s;
    }
  }
  if (!runtime->recipe.value_shift) return {};
  return take(*runtime->value_means, &bd_layer::value_shift, &LayerConfig::value_shift);
}

Status set_phase(RuntimeState* runtime, std::string_view name) {
  const std::lock_guard<std::mutex> lock(runtime->mutex);
  if (Status s = check_calibrating(*runtime); !s.ok()) return s;
  for (const auto& [known, phase] : kPhases) {
    if (name != known) continue;
    if (phase == CalibrationPhase::kProbabilities) {
      if (Status s = adopt_means(runtime); !s.ok()) return s;
    }
    runtime->phase = phase;
    return {};
  }
  return invalid("unknown phase '{}' of a calibration; expected all, off, keys or probabilities",
                 name);
}

Status save_state(RuntimeState* runtime, const std::string& path, const char* note) {
  CalibrationState state;
  std::string target;
  {
    const std::lock_guard<std::mutex> lock(runtime->mutex);
    if (Status s = check_calibrating(*runtime); !s.ok()) return s;
    state = state_of(*runtime);
    target = rank_path(*runtime, path);
  }
  if (note != nullptr) state.metadata["note"] = note;
  return save_calibration_state(state, target);
}

Status load_state(RuntimeState* runtime, const std::string& path) {
  const std::lock_guard<std::mutex> lock(runtime->mutex);
  if (Status s = check_calibrating(*runtime); !s.ok()) return s;
  const Result<CalibrationState> loaded = load_calibration_state(rank_path(*runtime, path));
  if (!loaded.ok()) return loaded.status();
  const CalibrationState& state = loaded.value();
  KeyMeanAccumulator& means = *runtime->key_means;
  if (state.num_layers != means.num_layers() || state.head_dim != means.head_dim() ||
      state.total_kv_heads != means.num_kv_heads() ||
      state.first_kv_head != runtime->first_kv_head ||
      state.num_kv_heads != runtime->num_kv_heads ||
      state.probabilities.size() != runtime->taus.size()) {
    return invalid("'{}' is the state of a calibration of another model", state.path);
  }
  if (Status s = means.restore(state.keys, state.first_kv_head, state.num_kv_heads); !s.ok()) {
    return s;
  }
  if (Status s =
          runtime->value_means->restore(state.values, state.first_kv_head, state.num_kv_heads);
      !s.ok()) {
    return s;
  }
  for (std::size_t i = 0; i < runtime->taus.size(); ++i) {
    runtime->taus[i].histogram() = state.probabilities[i];
  }
  return {};
}

std::string describe(RuntimeState& runtime) {
  KeyMeanAccumulator& means = *runtime.key_means;
  std::uint64_t tokens = std::numeric_limits<std::uint64_t>::max();
  for (const int layer : runtime.calibrated_layers) {
    tokens = std::min(tokens, means.tokens(layer, runtime.first_kv_head, runtime.num_kv_heads));
  }
  double blocks = 0;
  for (std::size_t i = 0; i < runtime.taus.size(); i += kCalibratedFactors.size()) {
    blocks += static_cast<double>(runtime.taus[i].choose().blocks);
  }
  nlohmann::ordered_json json;
  for (const auto& [name, phase] : kPhases) {
    if (phase == runtime.phase) json["phase"] = name;
  }
  json["tokens"] = runtime.calibrated_layers.empty() ? 0 : tokens;
  json["skipped_rows"] = means.skipped_rows() + runtime.value_means->skipped_rows();
  json["non_finite"] = nullptr;
  // One a call: the other side keeps its own for the next.
  for (const auto& [side, of] : {std::pair("key", &means), {"value", runtime.value_means.get()}}) {
    if (const std::optional<NonFiniteKey> at = of->take_non_finite(); at) {
      json["non_finite"] = {{"side", side}, {"layer", at->layer}, {"kv_head", at->kv_head}};
      break;
    }
  }
  json["blocks"] = static_cast<std::uint64_t>(blocks);
  return json.dump();
}

}  // namespace
}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_calibration_save(bd_runtime* runtime, const char* path, uint64_t* tokens) {
  return capi::guarded([&]() -> Status {
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (tokens != nullptr) *tokens = 0;
    return capi::save(runtime->state.get(), path, tokens);
  });
}

bd_status bd_calibration_phase(bd_runtime* runtime, const char* phase) {
  return capi::guarded([&]() -> Status {
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (phase == nullptr) return capi::invalid("the phase of the calibration is null");
    return capi::set_phase(runtime->state.get(), phase);
  });
}

bd_status bd_calibration_state_save(bd_runtime* runtime, const char* path, const char* note) {
  return capi::guarded([&]() -> Status {
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (path == nullptr) return capi::invalid("the path of the calibration's state is null");
    return capi::save_state(runtime->state.get(), path, note);
  });
}

bd_status bd_calibration_state_load(bd_runtime* runtime, const char* path) {
  return capi::guarded([&]() -> Status {
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (path == nullptr) return capi::invalid("the path of the calibration's state is null");
    return capi::load_state(runtime->state.get(), path);
  });
}

const char* bd_calibration_describe(bd_runtime* runtime) {
  if (runtime == nullptr) return "{}";
  capi::RuntimeState& state = *runtime->state;
  const std::lock_guard<std::mutex> lock(state.mutex);
  try {
    state.calibration_text = state.key_means == nullptr ? "{}" : capi::describe(state);
  } catch (...) {
    return "{}";
  }
  return state.calibration_text.c_str();
}
