// SPDX-License-Identifier: Apache-2.0
// The C ABI over the CUDA backend.
#include "capi/cuda.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "capi/device_backend.h"

namespace bitdecoding::capi {

Result<CudaBackend*> DeviceBackend::of(int head_dim) {
  const std::lock_guard<std::mutex> lock(mutex);
  auto& backend = backends_[head_dim];
  if (backend == nullptr) {
    auto made = CudaBackend::make({device_.ordinal, head_dim});
    if (!made.ok()) {
      backends_.erase(head_dim);
      return made.status();
    }
    backend = made.take();
  }
  return backend.get();
}

namespace {

// What a layer keeps on the device, in place of the host's arrays.
struct DeviceLayer {
  LayerConfig config;
  cuda::DeviceArray<float> key_shift;
  cuda::DeviceArray<float> attn_sink;
  cuda::DeviceArray<std::int8_t> key_outer;
  cuda::DeviceArray<std::int8_t> value_outer;
};

template <class T>
Status to_device(const std::vector<T>& from, cuda::DeviceArray<T>* to) {
  if (from.empty()) return {};
  constexpr auto kDoing = "copying a layer's constants to the device";
  if (Status s = to->allocate(static_cast<std::int64_t>(from.size()), kDoing); !s.ok()) return s;
  return cuda::check(
      cudaMemcpy(to->get(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), kDoing);
}

DeviceBackend& device_of(const RuntimeState& runtime) {
  return static_cast<DeviceBackend&>(*runtime.backend);
}
const DeviceLayer& device_layer(const bd_layer& layer) {
  return *static_cast<const DeviceLayer*>(layer.device.get());
}
CudaPlan& plan_of(const bd_steps& steps) { return *static_cast<CudaPlan*>(steps.device.get()); }

Status check_runtime(const RuntimeState& runtime) {
  if (is_device(runtime)) return {};
  return {StatusCode::kUnsupported,
          fmt::format("the runtime's backend is {}; make it with the backend cuda for calls on "
                      "device memory",
                      runtime.backend->name())};
}

Result<CudaPlanLimits> limits_of(const RuntimeState& runtime, const bd_cuda_steps_options& o) {
  if (Status s = check_runtime(runtime); !s.ok()) return s;
  if (Status s = check_struct(&o.steps, "bd_steps_options"); !s.ok()) return s;
  if (Status s = check_steps_options(o.steps); !s.ok()) return s;
  if (Status s = check_range("num_windows", o.num_windows, 1, CudaPlanLimits::kMaxWindows);
      !s.ok()) {
    return s;
  }
  if (o.windows == nullptr) return invalid("windows is null, for {} of them", o.num_windows);
  auto geometry = PageGeometry::make(runtime.recipe.format, FragmentOrder::kFp16Mma,
                                     o.steps.head_dim, o.steps.page_size);
  if (!geometry.ok()) return geometry.status();
  CudaPlanLimits limits;
  limits.geometry = geometry.value();
  limits.rule = runtime.shadow_rule(limits.geometry);
  limits.num_pages = o.steps.num_pages;
  limits.num_slots = o.steps.num_slots;
  limits.max_requests = o.steps.max_requests;
  limits.max_step_tokens = o.max_step_tokens;
  limits.max_pages_per_request = o.max_pages_per_request;
  limits.num_q_heads = o.num_q_heads;
  limits.num_kv_heads = o.num_kv_heads;
  limits.windows.assign(o.windows, o.windows + o.num_windows);
  return limits;
}

Status memory(const RuntimeState& runtime, const bd_cuda_steps_options& o, bd_cuda_memory* out) {
  const auto limits = limits_of(runtime, o);
  if (!limits.ok()) return limits.status();
  const auto bytes = CudaPlan::bytes_for(limits.value());
  if (!bytes.ok()) return bytes.status();
  out->steps_bytes = bytes.value();
  out->attend_bytes = CudaBackend::bytes_for(device_of(runtime).device(), o.steps.head_dim);
  return {};
}

Status create(const std::shared_ptr<RuntimeState>& runtime, const bd_cuda_steps_options& o,
              bd_steps** out) {
  const auto limits = limits_of(*runtime, o);
  if (!limits.ok()) return limits.status();
  if (Status s =
          cuda::check(cudaSetDevice(device_of(*runtime).device().ordinal), "choosing the device");
      !s.ok()) {
    return s;
  }
  auto plan = CudaPlan::make(limits.value());
  if (!plan.ok()) return plan.status();
  auto steps = std::make_unique<bd_steps>();
  steps->device = std::shared_ptr<CudaPlan>(plan.take());
  steps->rule = limits.value().rule;
  steps->options = o.steps;
  steps->num_pages = o.steps.num_pages;
  steps->num_slots = o.steps.num_slots;
  steps->runtime = runtime;
  const std::lock_guard<std::mutex> lock(runtime->mutex);
  runtime->live_steps.insert(steps.get());
  *out = steps.release();
  return {};
}

Status check_steps(const bd_steps* steps) {
  if (steps == nullptr) return invalid("the steps are null");
  if (steps->device != nullptr) return {};
  return {StatusCode::kUnsupported, "the steps are on the host; make them by bd_cuda_steps_create"};
}

Status build(bd_steps* steps, const bd_step_input& in, int max_query_len, CudaStream stream) {
  if (Status s = check_step_input(in); !s.ok()) return s;
  const StepInput input = step_input(in, steps->num_pages);
  steps->built = false;
  if (Status s = plan_of(*steps).build(input, max_query_len, stream); !s.ok()) return s;
  steps->step_tokens = in.num_tokens;
  steps->built = true;
  const std::lock_guard<std::mutex> lock(steps->runtime->mutex);
  ++steps->runtime->builds;
  return {};
}

Status check_handles(const bd_layer* layer, const bd_steps* steps) {
  if (Status s = check_layer_and_steps(layer, steps); !s.ok()) return s;
  return check_steps(steps);
}

// The backend of a layer; place_layer has made it.
CudaBackend& backend_of(const bd_layer& layer) {
  return *device_of(*layer.runtime).made(layer.config.geometry.head_dim);
}

Status write(const bd_write_params& p, CudaStream stream) {
  if (Status s = check_handles(p.layer, p.steps); !s.ok()) return s;
  WriteParams params;
  if (Status s = check_write(p, p.steps->step_tokens, &params); !s.ok()) return s;
  params.layer = &device_layer(*p.layer).config;
  params.counters = &device_of(*p.layer->runtime).counters()->write;
  return backend_of(*p.layer).write(params, plan_of(*p.steps), stream);
}

Status attend(const bd_attend_params& p, CudaStream stream) {
  if (Status s = check_handles(p.layer, p.steps); !s.ok()) return s;
  AttendParams params;
  if (Status s = check_attend(p, p.steps->step_tokens, &params); !s.ok()) return s;
  const DeviceLayer& layer = device_layer(*p.layer);
  params.layer = &layer.config;
  params.attn_sink = layer.attn_sink.get();
  params.corrupt_scales = &device_of(*p.layer->runtime).counters()->corrupt_scales;
  return backend_of(*p.layer).attend(params, plan_of(*p.steps), stream);
}

Status gather(const bd_gather_params& p, CudaStream stream) {
  if (Status s = check_handles(p.layer, p.steps); !s.ok()) return s;
  const bd_layer& layer = *p.layer;
  if (Status s = check_step_cache(layer, *p.steps, p.cache); !s.ok()) return s;
  if (p.key.dtype != p.value.dtype || p.key.stride_token != p.value.stride_token ||
      p.key.stride_head != p.value.stride_head) {
    return invalid("key and value of a gather must have the same dtype and strides");
  }
  const std::int64_t tokens = p.end > p.begin ? p.end - p.begin : 0;
  const int heads = layer.config.num_kv_heads;
  const int head_dim = layer.config.geometry.head_dim;
  const auto key = check_tensor("key", p.key, tokens, heads, head_dim);
  if (!key.ok()) return key.status();
  const auto value = check_tensor("value", p.value, tokens, heads, head_dim);
  if (!value.ok()) return value.status();
  AttendParams params;
  params.layer = &device_layer(layer).config;
  params.cache = cache_view(p.cache);
  params.shadow = shadow_pool(p.cache);
  CudaGather what;
  what.request = p.request;
  what.begin = p.begin;
  what.end = p.end;
  what.with_shadow = p.with_shadow != 0;
  what.dtype = key.value().dtype;
  what.key = const_cast<void*>(p.key.data);
  what.value = const_cast<void*>(p.value.data);
  what.stride_token = p.key.stride_token;
  what.stride_head = p.key.stride_head;
  return backend_of(layer).gather(params, what, plan_of(*p.steps), stream);
}

Status merge(const bd_merge_params& p, CudaStream stream) {
  if (p.runtime == nullptr) return invalid("the runtime is null");
  if (Status s = check_runtime(*p.runtime->state); !s.ok()) return s;
  if (p.dtype != BD_F32 && p.dtype != BD_BF16 && p.dtype != BD_F16) {
    return invalid("the dtype of a merge is {}; expected BD_F32, BD_BF16 or BD_F16", p.dtype);
  }
  CudaBackend* backend = device_of(*p.runtime->state).any();
  if (backend == nullptr) return invalid("the runtime has had no layer; make one before a merge");
  CudaBackend::Merge merge;
  merge.tokens = p.num_tokens;
  merge.heads = p.num_heads;
  merge.head_dim = p.head_dim;
  merge.dtype = static_cast<DType>(p.dtype);
  merge.a = p.a;
  merge.b = p.b;
  merge.lse_a = p.lse_a;
  merge.lse_b = p.lse_b;
  merge.out = p.out;
  merge.lse = p.lse;
  return backend->merge(merge, stream);
}

}  // namespace

Result<std::unique_ptr<Backend>> make_device_backend(int device) {
  auto devices = cuda_devices();
  if (!devices.ok()) return devices.status();
  const auto count = static_cast<int>(devices.value().size());
  if (device < 0 || device >= count) {
    return Status(StatusCode::kOutOfRange,
                  fmt::format("device {} was asked for, but there are {}", device, count));
  }
  if (Status s = cuda::check(cudaSetDevice(device), "choosing the device"); !s.ok()) return s;
  auto backend =
      std::make_unique<DeviceBackend>(std::move(devices.value()[static_cast<std::size_t>(device)]));
  if (Status s = backend->allocate(); !s.ok()) return s;
  return std::unique_ptr<Backend>(std::move(backend));
}

Status place_layer(bd_layer* layer) {
  if (!is_device(*layer->runtime)) return {};
  auto backend = device_of(*layer->runtime).of(layer->config.geometry.head_dim);
  if (!backend.ok()) return backend.status();
  auto device = std::make_shared<DeviceLayer>();
  Status status = to_device(layer->key_shift, &device->key_shift);
  if (status.ok()) status = to_device(layer->attn_sink, &device->attn_sink);
  if (status.ok()) status = to_device(layer->key_outer, &device->key_outer);
  if (status.ok()) status = to_device(layer->value_outer, &device->value_outer);
  if (!status.ok()) return status;
  device->config = layer->config;
  device->config.key_shift = device->key_shift.get();
  device->config.key_outer = device->key_outer.get();
  device->config.value_outer = device->value_outer.get();
  layer->device = std::move(device);
  return {};
}

Status add_device_counters(const RuntimeState& runtime, bd_counters* out) {
  if (!is_device(runtime)) return {};
  DeviceBackend::Counters counters;
  if (Status s = cuda::check(cudaMemcpy(&counters, device_of(runtime).counters(), sizeof(counters),
                                        cudaMemcpyDeviceToHost),
                             "reading the counters");
      !s.ok()) {
    return s;
  }
  out->non_finite = counters.write.non_finite;
  out->saturated_blocks = counters.write.saturated_blocks;
  out->flushed_blocks = counters.write.flushed_blocks;
  out->requantized_prefix = counters.write.requantized_prefix;
  out->corrupt_scales = counters.corrupt_scales;
  for (const bd_steps* steps : runtime.live_steps) {
    if (steps->device == nullptr) continue;
    const auto plan = plan_of(*steps).counters(nullptr);
    if (!plan.ok()) return plan.status();
    out->evicted_slots += plan.value().step.evicted_slots;
    out->refused_groups += plan.value().step.refused_groups;
    out->missing_tokens += plan.value().step.missing_tokens;
    out->lost_partial_groups += plan.value().step.lost_partial_groups;
  }
  return {};
}

}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_cuda_memory_get(const bd_runtime* runtime, const bd_cuda_steps_options* options,
                             bd_cuda_memory* memory) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(options, "bd_cuda_steps_options"); !s.ok()) return s;
    if (Status s = capi::check_struct(memory, "bd_cuda_memory"); !s.ok()) return s;
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    return capi::memory(*runtime->state, *options, memory);
  });
}

bd_status bd_cuda_steps_create(bd_runtime* runtime, const bd_cuda_steps_options* options,
                               bd_steps** steps) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(options, "bd_cuda_steps_options"); !s.ok()) return s;
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (steps == nullptr) return capi::invalid("the pointer to the new steps is null");
    *steps = nullptr;
    return capi::create(runtime->state, *options, steps);
  });
}

bd_status bd_cuda_steps_build(bd_steps* steps, const bd_step_input* input, int32_t max_query_len,
                              void* stream) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(input, "bd_step_input"); !s.ok()) return s;
    if (Status s = capi::check_steps(steps); !s.ok()) return s;
    return capi::build(steps, *input, max_query_len, stream);
  });
}

bd_status bd_cuda_steps_forget(bd_steps* steps, int64_t page, void* stream) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_steps(steps); !s.ok()) return s;
    steps->built = false;
    return capi::plan_of(*steps).forget(page, stream);
  });
}

bd_status bd_cuda_write(const bd_write_params* params, void* stream) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(params, "bd_write_params"); !s.ok()) return s;
    return capi::write(*params, stream);
  });
}

bd_status bd_cuda_attend(const bd_attend_params* params, void* stream) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(params, "bd_attend_params"); !s.ok()) return s;
    return capi::attend(*params, stream);
  });
}

bd_status bd_cuda_gather(const bd_gather_params* params, void* stream) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(params, "bd_gather_params"); !s.ok()) return s;
    return capi::gather(*params, stream);
  });
}

bd_status bd_cuda_merge(const bd_merge_params* params, void* stream) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(params, "bd_merge_params"); !s.ok()) return s;
    return capi::merge(*params, stream);
  });
}
