// SPDX-License-Identifier: Apache-2.0
// What the C handles hold, and how a Status or an exception becomes a bd_status.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bitdecoding/backend.h"
#include "bitdecoding/bitdecoding.h"
#include "bitdecoding/calibrate.h"
#include "bitdecoding/recipe.h"
#include "io/key_shift.h"
#include "io/outer_scale.h"

namespace bitdecoding::capi {

std::string& last_error();  // of the calling thread

bd_status report(const Status& status) noexcept;

// Runs a function that returns Status; nothing it throws goes further.
template <class F>
bd_status guarded(F&& body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report(Status(StatusCode::kResourceExhausted, "out of memory"));
  } catch (const std::exception& error) {
    return report(
        Status(StatusCode::kInternal,
               std::string("a defect of the library, please report it: ") + error.what()));
  } catch (...) {
    return report(Status(StatusCode::kInternal, "a defect of the library, please report it"));
  }
}

template <class... Args>
Status invalid(fmt::format_string<Args...> text, Args&&... args) {
  return {StatusCode::kInvalidArgument, fmt::format(text, std::forward<Args>(args)...)};
}

// A struct of the caller: there, and of the layout this library was built with.
template <class T>
Status check_struct(const T* params, const char* type) {
  if (params == nullptr) return invalid("the pointer to {} is null", type);
  if (params->struct_size == sizeof(T)) return {};
  return invalid(
      "{}.struct_size is {}, and this library's {} has {} bytes (ABI version {}); set it to "
      "sizeof({}) and build the caller against the same bitdecoding.h",
      type, params->struct_size, type, sizeof(T), BD_ABI_VERSION, type);
}

// An index or count that a caller hands over, compared with its range.
Status check_range(const char* what, std::int64_t value, std::int64_t low, std::int64_t high);

// The pages of a cache as a layer lays them out: there, and not one inside another.
Status check_pages(const bd_layer& layer, const bd_cache& cache);

CacheView cache_view(const bd_cache& cache);
ShadowPool shadow_pool(const bd_cache& cache);

struct StepsSnapshot {
  StepCounters counters;
  std::int32_t used_slots = 0;
};

class Probe;

// What bd_write and bd_attend observe while the recipe's calibrate_file is set.
enum class CalibrationPhase { kAll, kOff, kKeys, kProbabilities };

// Shared by the runtime's handle and by every layer and steps made from it, so that handles may be
// destroyed in any order.
struct RuntimeState {
  Recipe recipe;
  std::string model;
  std::unique_ptr<Backend> backend;
  WriteCounters write_counters;             // relaxed atomics
  std::uint64_t corrupt_scales = 0;         // the same
  std::optional<OuterScales> outer_scales;  // of the recipe's file

  std::mutex mutex;  // guards what follows
  std::optional<KeyShift> key_shift;
  std::string describe;
  std::map<std::string, std::string, std::less<>> recipe_values;
  bool tau_from_sidecar = false;  // the recipe said "calibrate"
  int live_layers = 0;
  std::set<const bd_steps*> live_steps;
  StepCounters ended_steps;  // of destroyed bd_steps
  std::uint64_t builds = 0;
  std::unique_ptr<KeyMeanAccumulator> key_means;
  std::unique_ptr<KeyMeanAccumulator> value_means;  // where key_means is
  std::set<int> calibrated_layers;
  std::set<bd_layer*> live_calibrated;  // the layers behind them
  int first_kv_head = 0;                // of this rank
  int num_kv_heads = 0;
  CalibrationPhase phase = CalibrationPhase::kAll;
  std::vector<TauCalibrator> taus;  // [num_layers][kCalibratedFactors]
  std::string calibration_text;     // of bd_calibration_describe
  std::shared_ptr<Probe> probe;     // not guarded: set between steps only
  std::string probe_text;           // of bd_probe_describe

  ShadowRule shadow_rule(const PageGeometry& geometry) const;
};

// Accumulators for a layer of a runtime that calibrates; all layers must agree on the shape.
Status prepare_calibration(RuntimeState* runtime, const bd_layer_options& options);
// Keys of this step's rows, except padding and sinks.
Status observe_rows(const bd_layer& layer, const bd_steps& steps, const TensorView& key,
                    const TensorView& value);
// Probabilities of some rows of this step, while they are being observed.
Status observe_probabilities(const bd_layer& layer, const AttendParams& params);
// Takes tau from the sidecar when the recipe leaves it to calibration and none is under way; a
// later sidecar must bring its own. On an error nothing has changed.
Status take_calibrated_tau(const KeyShift& sidecar, RuntimeState* runtime);

}  // namespace bitdecoding::capi

struct bd_runtime {
  std::shared_ptr<bitdecoding::capi::RuntimeState> state;
};

struct bd_layer {
  std::shared_ptr<bitdecoding::capi::RuntimeState> runtime;
  bd_layer_options options{};  // as it was made, but for pointers, which are not kept
  bitdecoding::LayerConfig config;
  int layer_index = 0;
  int first_kv_head = 0;
  float sm_scale = 1.0F;
  float softcap = 0.0F;
  int window_left = -1;
  std::vector<float> key_shift;
  std::vector<float> value_shift;
  std::vector<float> attn_sink;
  std::vector<std::int8_t> key_outer;
  std::vector<std::int8_t> value_outer;
  std::shared_ptr<const void> device;  // of a cuda runtime: what the layer keeps on the GPU
};

struct bd_steps {
  std::shared_ptr<bitdecoding::capi::RuntimeState> runtime;
  bd_steps_options options{};
  std::unique_ptr<bitdecoding::ShadowDirectory> directory;  // null for steps on a GPU
  std::shared_ptr<void> device;                             // a CudaPlan in its place
  std::int64_t step_tokens = 0;                             // of the plan there
  bitdecoding::StepPlan plan;
  bool built = false;
  bitdecoding::ShadowRule rule;
  std::int64_t num_pages = 0;
  std::int32_t num_slots = 0;
  std::vector<std::int64_t> slots;  // of the step, < 0 for rows that calibration leaves out
  bitdecoding::capi::StepsSnapshot snapshot;  // guarded by the runtime's mutex
};
