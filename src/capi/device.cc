// SPDX-License-Identifier: Apache-2.0
// What is said of runtimes that live on a device, whether or not there is one.
#include "capi/cuda.h"

namespace bitdecoding::capi {

bool is_device(const RuntimeState& runtime) { return runtime.backend->name() == "cuda"; }

Status refuse_device(const RuntimeState& runtime, const char* call, const char* instead) {
  if (!is_device(runtime)) return {};
  return {StatusCode::kUnsupported,
          fmt::format("{} reads host memory, and this runtime's pages are on a GPU; {}", call,
                      instead)};
}

}  // namespace bitdecoding::capi
