// SPDX-License-Identifier: Apache-2.0
// Calibration while serving: bd_write feeds the sums, bd_calibration_save writes the means.
#include <algorithm>
#include <limits>

#include "capi/internal.h"

namespace bitdecoding::capi {

Status prepare_calibration(RuntimeState* runtime, const bd_layer_options& o) {
  if (runtime->key_means == nullptr) {
    Result<std::unique_ptr<KeyMeanAccumulator>> made =
        KeyMeanAccumulator::make(o.num_layers, o.total_kv_heads, o.head_dim);
    if (!made.ok()) return made.status();
    runtime->key_means = made.take();
    runtime->first_kv_head = o.first_kv_head;
    runtime->num_kv_heads = o.num_kv_heads;
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

namespace {

Result<KeyShift> collect(const RuntimeState& runtime, std::uint64_t* tokens) {
  const KeyMeanAccumulator& accumulator = *runtime.key_means;
  const std::vector<int> layers(runtime.calibrated_layers.begin(), runtime.calibrated_layers.end());
  *tokens = std::numeric_limits<std::uint64_t>::max();
  for (const int layer : layers) {
    *tokens =
        std::min(*tokens, accumulator.tokens(layer, runtime.first_kv_head, runtime.num_kv_heads));
  }
  Result<std::vector<float>> means =
      accumulator.means(layers, runtime.first_kv_head, runtime.num_kv_heads);
  if (!means.ok()) return means.status();
  KeyShift sidecar;
  sidecar.num_layers = accumulator.num_layers();
  sidecar.num_kv_heads = runtime.num_kv_heads;
  sidecar.head_dim = accumulator.head_dim();
  sidecar.values = means.take();
  sidecar.metadata["tokens"] = std::to_string(*tokens);
  sidecar.metadata["skipped_rows"] = std::to_string(accumulator.skipped_rows());
  sidecar.metadata["outlier_channels"] = std::to_string(accumulator.outliers().size());
  sidecar.metadata["library"] = BITDECODING_VERSION;
  if (runtime.recipe.tau_calibrate) {
    const TauChoice choice = runtime.tau.choose();
    sidecar.metadata["probability_tau"] = fmt::format("{}", choice.tau);
    sidecar.metadata["probability_c"] = fmt::format("{}", runtime.recipe.probability_c);
    sidecar.metadata["probability_blocks"] = std::to_string(choice.blocks);
  }
  if (!runtime.model.empty()) sidecar.metadata["model"] = runtime.model;
  return sidecar;
}

Status save(RuntimeState* runtime, const char* path, std::uint64_t* tokens) {
  const std::string& file = path != nullptr ? path : runtime->recipe.calibrate_file;
  if (runtime->recipe.calibrate_file.empty()) {
    return invalid(
        "the recipe has no calibrate_file, so no keys were observed; set it and serve "
        "some prompts first");
  }
  std::uint64_t seen = 0;
  KeyShift sidecar;
  std::string target = file;
  {
    const std::lock_guard<std::mutex> lock(runtime->mutex);
    if (runtime->key_means == nullptr) {
      return invalid("the runtime has no layers yet, so no keys were observed");
    }
    Result<KeyShift> collected = collect(*runtime, &seen);
    if (!collected.ok()) return collected.status();
    sidecar = collected.take();
    // A rank of a tensor-parallel model holds some heads only: its file says which, and cannot be
    // mistaken for the whole.
    if (runtime->num_kv_heads != runtime->key_means->num_kv_heads()) {
      const std::string range = fmt::format("{}-{}", runtime->first_kv_head,
                                            runtime->first_kv_head + runtime->num_kv_heads - 1);
      sidecar.metadata["kv_heads"] = range;
      sidecar.metadata["total_kv_heads"] = std::to_string(runtime->key_means->num_kv_heads());
      target += ".heads" + range;
    }
  }
  if (tokens != nullptr) *tokens = seen;
  return save_key_shift(sidecar, target);
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
