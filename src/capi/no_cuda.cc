// SPDX-License-Identifier: Apache-2.0
// A library without the CUDA backend: the same symbols, each with the reason.
#include "capi/cuda.h"

namespace bitdecoding::capi {
namespace {

Status without_cuda() {
  return {StatusCode::kUnsupported,
          "this library was built without CUDA; build it with -DBITDECODING_BUILD_CUDA=ON, or "
          "choose the backend cpu"};
}

}  // namespace

Result<std::unique_ptr<Backend>> make_device_backend(int /*device*/) { return without_cuda(); }
Status place_layer(bd_layer* /*layer*/) { return {}; }
Status add_device_counters(const RuntimeState& /*runtime*/, bd_counters* /*counters*/) {
  return {};
}

}  // namespace bitdecoding::capi

namespace capi = bitdecoding::capi;

bd_status bd_cuda_memory_get(const bd_runtime* /*runtime*/,
                             const bd_cuda_steps_options* /*options*/, bd_cuda_memory* /*memory*/) {
  return capi::guarded(capi::without_cuda);
}
bd_status bd_cuda_steps_create(bd_runtime* /*runtime*/, const bd_cuda_steps_options* /*options*/,
                               bd_steps** /*steps*/) {
  return capi::guarded(capi::without_cuda);
}
bd_status bd_cuda_steps_build(bd_steps* /*steps*/, const bd_step_input* /*input*/,
                              int32_t /*max_query_len*/, void* /*stream*/) {
  return capi::guarded(capi::without_cuda);
}
bd_status bd_cuda_steps_forget(bd_steps* /*steps*/, int64_t /*page*/, void* /*stream*/) {
  return capi::guarded(capi::without_cuda);
}
bd_status bd_cuda_write(const bd_write_params* /*params*/, void* /*stream*/) {
  return capi::guarded(capi::without_cuda);
}
bd_status bd_cuda_attend(const bd_attend_params* /*params*/, void* /*stream*/) {
  return capi::guarded(capi::without_cuda);
}
bd_status bd_cuda_gather(const bd_gather_params* /*params*/, void* /*stream*/) {
  return capi::guarded(capi::without_cuda);
}
bd_status bd_cuda_merge(const bd_merge_params* /*params*/, void* /*stream*/) {
  return capi::guarded(capi::without_cuda);
}
