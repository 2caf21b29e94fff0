// SPDX-License-Identifier: Apache-2.0
// bd_write and bd_attend: every pointer, count, dtype and stride is checked before the backend sees
// it.
#include <limits>

#include "capi/cuda.h"
#include "capi/probe.h"

namespace bitdecoding::capi {
namespace {

// Two nested dimensions of `inner` elements each: neither may step into the other's elements, in
// whichever order they lie in memory. The extent must fit 62 bits, so that sums of two do not
// overflow either.
Status check_strides(const std::string& what, std::int64_t inner, const char* name_a,
                     std::int64_t count_a, std::int64_t stride_a, const char* name_b,
                     std::int64_t count_b, std::int64_t stride_b) {
  // A dimension of one entry has no step; its stride may hold anything.
  if (count_a <= 1) stride_a = inner;
  if (count_b <= 1) stride_b = inner;
  if (stride_a < inner || stride_b < inner) {
    return invalid("{} has {} {} and {} {}; both must be at least {}", what, name_a, stride_a,
                   name_b, stride_b, inner);
  }
  std::int64_t span_a = 0;
  std::int64_t span_b = 0;
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max() / 4;
  if (__builtin_mul_overflow(count_a, stride_a, &span_a) ||
      __builtin_mul_overflow(count_b, stride_b, &span_b) || span_a > kMost || span_b > kMost) {
    return invalid("{} with {} {} and {} {} leaves the address space", what, name_a, stride_a,
                   name_b, stride_b);
  }
  if (count_a > 1 && count_b > 1 && stride_a < span_b && stride_b < span_a) {
    return invalid("{} overlaps itself: {} is {} for {} entries and {} is {} for {} entries", what,
                   name_a, stride_a, count_a, name_b, stride_b, count_b);
  }
  return {};
}

Status check_tokens(std::int64_t step_tokens, std::int64_t num_tokens) {
  if (num_tokens >= step_tokens) return {};
  return {StatusCode::kOutOfRange,
          fmt::format("the tensors have {} tokens, and the step has {}", num_tokens, step_tokens)};
}

Status check_host(const bd_steps& steps, const char* call, const char* instead) {
  return steps.device == nullptr ? Status() : refuse_device(*steps.runtime, call, instead);
}

Status write(const bd_write_params& p) {
  if (Status s = check_layer_and_steps(p.layer, p.steps); !s.ok()) return s;
  if (Status s = check_host(*p.steps, "bd_write", "call bd_cuda_write"); !s.ok()) return s;
  const bd_layer& layer = *p.layer;
  WriteParams params;
  if (Status s = check_write(p, p.steps->plan.num_tokens, &params); !s.ok()) return s;
  params.layer = &layer.config;
  params.plan = &p.steps->plan;
  params.counters = &layer.runtime->write_counters;
  if (Status s = layer.runtime->backend->write(params); !s.ok()) return s;
  if (layer.runtime->probe != nullptr) {
    if (Status s = layer.runtime->probe->write(p); !s.ok()) return s;
  }
  return observe_rows(layer, *p.steps, params.key, params.value);
}

Status attend(const bd_attend_params& p) {
  if (Status s = check_layer_and_steps(p.layer, p.steps); !s.ok()) return s;
  if (Status s = check_host(*p.steps, "bd_attend", "call bd_cuda_attend"); !s.ok()) return s;
  const bd_layer& layer = *p.layer;
  AttendParams params;
  if (Status s = check_attend(p, p.steps->plan.num_tokens, &params); !s.ok()) return s;
  params.layer = &layer.config;
  params.plan = &p.steps->plan;
  params.attn_sink = layer.attn_sink.empty() ? nullptr : layer.attn_sink.data();
  params.corrupt_scales = &layer.runtime->corrupt_scales;
  if (Status s = layer.runtime->backend->attend(params); !s.ok()) return s;
  if (layer.runtime->probe != nullptr) {
    if (Status s = layer.runtime->probe->attend(p, params, *layer.runtime); !s.ok()) return s;
  }
  return observe_probabilities(layer, params);
}

}  // namespace

Result<TensorView> check_tensor(const char* name, const bd_tensor& tensor, std::int64_t tokens,
                                int heads, int head_dim) {
  if (tensor.dtype != BD_F32 && tensor.dtype != BD_BF16 && tensor.dtype != BD_F16) {
    return invalid("the dtype of {} is {}; expected BD_F32 ({}), BD_BF16 ({}) or BD_F16 ({})", name,
                   tensor.dtype, static_cast<int>(BD_F32), static_cast<int>(BD_BF16),
                   static_cast<int>(BD_F16));
  }
  const auto dtype = static_cast<DType>(tensor.dtype);
  TensorView view{tensor.data, dtype, tensor.stride_token, tensor.stride_head};
  if (tokens == 0) return view;
  if (tensor.data == nullptr) return invalid("the data of {} is null, for {} tokens", name, tokens);
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % dtype_bytes(dtype) != 0) {
    return invalid("the data of {} is not aligned to its {} elements", name, dtype_name(dtype));
  }
  if (Status s = check_strides(name, head_dim, "stride_token", tokens, tensor.stride_token,
                               "stride_head", heads, tensor.stride_head);
      !s.ok()) {
    return s;
  }
  return view;
}

Status check_layer_and_steps(const bd_layer* layer, const bd_steps* steps) {
  if (layer == nullptr) return invalid("the layer is null");
  if (steps == nullptr) return invalid("the steps are null");
  if (layer->runtime != steps->runtime) {
    return invalid("the layer and the steps belong to different runtimes");
  }
  if (!steps->built) {
    return invalid("the steps have no plan; call bd_steps_build first, and see its error");
  }
  const PageGeometry& geometry = layer->config.geometry;
  if (geometry.page_size != steps->rule.page_size) {
    return invalid(
        "the layer has pages of {} tokens and the steps have pages of {}; make one "
        "bd_steps for each group of layers",
        geometry.page_size, steps->rule.page_size);
  }
  return {};
}

Status check_step_cache(const bd_layer& layer, const bd_steps& steps, const bd_cache& cache) {
  if (cache.num_pages < steps.num_pages) {
    return {StatusCode::kOutOfRange,
            fmt::format("the cache has {} pages, and the steps were made for {}", cache.num_pages,
                        steps.num_pages)};
  }
  if (Status s = check_pages(layer, cache); !s.ok()) return s;
  if (cache.num_slots < steps.num_slots) {
    return {StatusCode::kOutOfRange,
            fmt::format("the shadow pool has {} slots, and the steps were made for {}",
                        cache.num_slots, steps.num_slots)};
  }
  if (steps.num_slots > 0 && cache.shadow == nullptr) {
    return invalid("the shadow pool is null, for {} slots", steps.num_slots);
  }
  if (reinterpret_cast<std::uintptr_t>(cache.shadow) % 2 != 0) {
    return invalid("the shadow pool is not aligned to its BF16 elements");
  }
  return {};
}

CacheView cache_view(const bd_cache& cache) {
  return {static_cast<std::uint8_t*>(cache.pages), cache.num_pages, cache.stride_page,
          cache.stride_head};
}

ShadowPool shadow_pool(const bd_cache& cache) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  return {static_cast<std::uint16_t*>(cache.shadow),
          static_cast<std::int32_t>(cache.num_slots < kMost ? cache.num_slots : kMost)};
}

Status check_write(const bd_write_params& p, std::int64_t tokens, WriteParams* out) {
  const bd_layer& layer = *p.layer;
  const LayerConfig& config = layer.config;
  if (Status s = check_tokens(tokens, p.num_tokens); !s.ok()) return s;
  if (Status s = check_step_cache(layer, *p.steps, p.cache); !s.ok()) return s;
  const int head_dim = config.geometry.head_dim;
  Result<TensorView> key = check_tensor("key", p.key, p.num_tokens, config.num_kv_heads, head_dim);
  if (!key.ok()) return key.status();
  Result<TensorView> value =
      check_tensor("value", p.value, p.num_tokens, config.num_kv_heads, head_dim);
  if (!value.ok()) return value.status();
  out->cache = cache_view(p.cache);
  out->shadow = shadow_pool(p.cache);
  out->key = key.value();
  out->value = value.value();
  return {};
}

Status check_attend(const bd_attend_params& p, std::int64_t tokens, AttendParams* out) {
  const bd_layer& layer = *p.layer;
  const LayerConfig& config = layer.config;
  const Recipe& recipe = layer.runtime->recipe;
  const int head_dim = config.geometry.head_dim;
  if (Status s = check_tokens(tokens, p.num_tokens); !s.ok()) return s;
  if (Status s = check_step_cache(layer, *p.steps, p.cache); !s.ok()) return s;
  AttendParams& params = *out;
  const struct {
    const char* name;
    const bd_tensor& tensor;
    int heads;
    TensorView* view;
  } tensors[] = {{"query", p.query, config.num_q_heads, &params.query},
                 {"key", p.key, config.num_kv_heads, &params.key},
                 {"value", p.value, config.num_kv_heads, &params.value}};
  for (const auto& t : tensors) {
    Result<TensorView> view = check_tensor(t.name, t.tensor, p.num_tokens, t.heads, head_dim);
    if (!view.ok()) return view.status();
    *t.view = view.value();
  }
  Result<TensorView> output =
      check_tensor("output", p.output, p.num_tokens, config.num_q_heads, head_dim);
  if (!output.ok()) return output.status();
  params.cache = cache_view(p.cache);
  params.shadow = shadow_pool(p.cache);
  params.output = const_cast<void*>(p.output.data);
  params.output_dtype = output.value().dtype;
  params.stride_output_token = p.output.stride_token;
  params.stride_output_head = p.output.stride_head;
  params.lse = p.lse;
  params.sm_scale = layer.sm_scale;
  params.softcap = layer.softcap;
  params.window_left = layer.window_left;
  params.arithmetic = recipe.arithmetic;
  params.query_terms = recipe.query_terms;
  params.probability_c = recipe.probability_c;
  params.probability_tau = recipe.probability_tau;
  return {};
}

Status check_pages(const bd_layer& layer, const bd_cache& cache) {
  if (cache.pages == nullptr) return invalid("the pages of the cache are null");
  return check_strides("the cache", layer.config.geometry.head_bytes, "stride_page",
                       cache.num_pages, cache.stride_page, "stride_head", layer.config.num_kv_heads,
                       cache.stride_head);
}

}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_write(const bd_write_params* params) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(params, "bd_write_params"); !s.ok()) return s;
    return capi::write(*params);
  });
}

bd_status bd_attend(const bd_attend_params* params) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(params, "bd_attend_params"); !s.ok()) return s;
    return capi::attend(*params);
  });
}
