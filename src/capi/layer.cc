// SPDX-License-Identifier: Apache-2.0
// Layers: shapes, this rank's slice of the key means and outer scales, learned sinks.
#include <cmath>

#include "backend/validate.h"
#include "capi/cuda.h"
#include "capi/probe.h"
#include "io/model_limits.h"

namespace bitdecoding::capi {
namespace {

constexpr std::int64_t kMaxGroupSize = 64;

Status check_heads(const bd_layer_options& o) {
  if (Status s = check_range("num_kv_heads", o.num_kv_heads, 1, kMaxKvHeads); !s.ok()) return s;
  if (Status s = check_range("num_q_heads", o.num_q_heads, 1, kMaxKvHeads * kMaxGroupSize);
      !s.ok()) {
    return s;
  }
  if (Status s = check_range("total_kv_heads", o.total_kv_heads, o.num_kv_heads, kMaxKvHeads);
      !s.ok()) {
    return s;
  }
  if (Status s =
          check_range("first_kv_head", o.first_kv_head, 0, o.total_kv_heads - o.num_kv_heads);
      !s.ok()) {
    return s;
  }
  const std::int32_t group = o.num_q_heads / o.num_kv_heads;
  if (group * o.num_kv_heads != o.num_q_heads || group > kMaxGroupSize) {
    return invalid(
        "num_q_heads is {} and num_kv_heads {}; expected 1 to {} query heads for each "
        "KV head, the same number for all",
        o.num_q_heads, o.num_kv_heads, kMaxGroupSize);
  }
  return {};
}

Status check_options(const bd_layer_options& o) {
  if (Status s = check_range("num_layers", o.num_layers, 1, kMaxLayers); !s.ok()) return s;
  if (Status s = check_range("layer_index", o.layer_index, 0, o.num_layers - 1); !s.ok()) return s;
  if (Status s = check_heads(o); !s.ok()) return s;
  if (Status s = validate_score_scalars(o.sm_scale, o.softcap, o.window_left); !s.ok()) return s;
  for (std::int32_t h = 0; o.attn_sink != nullptr && h < o.num_q_heads; ++h) {
    if (std::isnan(o.attn_sink[h]) || o.attn_sink[h] == INFINITY) {
      return invalid("attn_sink of query head {} is {}; expected a logit", h, o.attn_sink[h]);
    }
  }
  return {};
}

Status take_key_shift(RuntimeState* runtime, const bd_layer_options& o, bd_layer* layer) {
  const std::lock_guard<std::mutex> lock(runtime->mutex);
  if (runtime->key_shift) {
    const KeyShift& sidecar = *runtime->key_shift;
    if (Status s = check_key_shift(sidecar, o.num_layers, o.total_kv_heads, o.head_dim); !s.ok()) {
      return s;
    }
    if (runtime->recipe.key_shift) {
      const auto slice = sidecar.slice(o.layer_index, o.first_kv_head, o.num_kv_heads);
      layer->key_shift.assign(slice.begin(), slice.end());
      layer->config.key_shift = layer->key_shift.data();
    }
    if (runtime->recipe.value_shift && !sidecar.value_means.empty()) {
      const auto slice = sidecar.value_slice(o.layer_index, o.first_kv_head, o.num_kv_heads);
      layer->value_shift.assign(slice.begin(), slice.end());
      layer->config.value_shift = layer->value_shift.data();
    }
  }
  if (!runtime->recipe.calibrate_file.empty()) {
    if (Status s = prepare_calibration(runtime, o); !s.ok()) return s;
    runtime->live_calibrated.insert(layer);
  }
  ++runtime->live_layers;
  return {};
}

// From the recipe's file or from the caller; both would have to be compared to mean anything.
Status take_outer_scales(const RuntimeState& runtime, const bd_layer_options& o, bd_layer* layer) {
  if (runtime.outer_scales) {
    const OuterScales& scales = *runtime.outer_scales;
    if (o.key_outer != nullptr || o.value_outer != nullptr) {
      return invalid(
          "key_outer and value_outer are given, and so is the recipe's outer_scale_file '{}'; "
          "leave out one of them",
          scales.path);
    }
    if (Status s = check_outer_scales(scales, o.num_layers, o.total_kv_heads); !s.ok()) return s;
    layer->key_outer = scales.slice(scales.key, o.layer_index, o.first_kv_head, o.num_kv_heads);
    layer->value_outer = scales.slice(scales.value, o.layer_index, o.first_kv_head, o.num_kv_heads);
  }
  if (o.key_outer != nullptr) layer->key_outer.assign(o.key_outer, o.key_outer + o.num_kv_heads);
  if (o.value_outer != nullptr) {
    layer->value_outer.assign(o.value_outer, o.value_outer + o.num_kv_heads);
  }
  if (!layer->key_outer.empty()) layer->config.key_outer = layer->key_outer.data();
  if (!layer->value_outer.empty()) layer->config.value_outer = layer->value_outer.data();
  if (Status s = validate_layer_shape(&layer->config); !s.ok()) return s;
  return validate_outer_scales(layer->config);
}

Status create(const std::shared_ptr<RuntimeState>& runtime, const bd_layer_options& o,
              bd_layer** out) {
  if (Status s = check_options(o); !s.ok()) return s;
  const Recipe& recipe = runtime->recipe;
  Result<PageGeometry> geometry = PageGeometry::make(
      recipe.format, runtime->backend->fragment_order(), o.head_dim, o.page_size);
  if (!geometry.ok()) return geometry.status();
  auto layer = std::make_unique<bd_layer>();
  layer->options = o;
  layer->options.attn_sink = nullptr;
  layer->options.key_outer = layer->options.value_outer = nullptr;
  layer->config.geometry = geometry.value();
  layer->config.num_kv_heads = o.num_kv_heads;
  layer->config.num_q_heads = o.num_q_heads;
  // Here and not at the first attention: a server must not load weights for it.
  if (Status s = validate_group_size(layer->config); !s.ok()) return s;
  layer->config.key_rule = recipe.key_rule;
  layer->config.value_rule = recipe.value_rule;
  layer->config.hadamard = recipe.hadamard;
  layer->layer_index = o.layer_index;
  layer->first_kv_head = o.first_kv_head;
  layer->sm_scale = o.sm_scale;
  layer->softcap = o.softcap;
  layer->window_left = o.window_left;
  if (o.attn_sink != nullptr) layer->attn_sink.assign(o.attn_sink, o.attn_sink + o.num_q_heads);
  if (Status s = take_outer_scales(*runtime, o, layer.get()); !s.ok()) return s;
  if (Status s = take_key_shift(runtime.get(), o, layer.get()); !s.ok()) return s;
  layer->runtime = runtime;
  if (Status s = place_layer(layer.get()); !s.ok()) {
    bd_layer_destroy(layer.release());
    return s;
  }
  *out = layer.release();
  return {};
}

}  // namespace
}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_layer_create(bd_runtime* runtime, const bd_layer_options* options, bd_layer** layer) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(options, "bd_layer_options"); !s.ok()) return s;
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (layer == nullptr) return capi::invalid("the pointer to the new layer is null");
    *layer = nullptr;
    return capi::create(runtime->state, *options, layer);
  });
}

void bd_layer_destroy(bd_layer* layer) {
  if (layer == nullptr) return;
  if (layer->runtime->probe != nullptr) layer->runtime->probe->forget(layer);
  {
    const std::lock_guard<std::mutex> lock(layer->runtime->mutex);
    --layer->runtime->live_layers;
    layer->runtime->live_calibrated.erase(layer);
  }
  delete layer;
}
