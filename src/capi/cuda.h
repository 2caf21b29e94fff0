// SPDX-License-Identifier: Apache-2.0
// The seam between the C ABI and the CUDA backend, which a library may be built without: cuda.cc
// implements it, or no_cuda.cc does with refusals.
#pragma once

#include "capi/internal.h"

namespace bitdecoding::capi {

// A Backend that answers for a device: its name, page order and ISA. Its verbs refuse host memory.
Result<std::unique_ptr<Backend>> make_device_backend(int device);
// Copies to the device what a layer keeps there, and makes the workspace of its head size.
Status place_layer(bd_layer* layer);
// Adds the counters that are kept on the device; waits for it.
Status add_device_counters(const RuntimeState& runtime, bd_counters* counters);

bool is_device(const RuntimeState& runtime);
// A call that reads host memory, for handles of a device's runtime.
Status refuse_device(const RuntimeState& runtime, const char* call, const char* instead);

// Checks that host and device share; `tokens` are those of the step.
Status check_write(const bd_write_params& params, std::int64_t tokens, WriteParams* out);
Status check_attend(const bd_attend_params& params, std::int64_t tokens, AttendParams* out);
Status check_step_cache(const bd_layer& layer, const bd_steps& steps, const bd_cache& cache);
Status check_layer_and_steps(const bd_layer* layer, const bd_steps* steps);
Result<TensorView> check_tensor(const char* name, const bd_tensor& tensor, std::int64_t tokens,
                                int heads, int head_dim);
Status check_step_input(const bd_step_input& input);
// What the library calls it; `input` has been checked.
StepInput step_input(const bd_step_input& input, std::int64_t num_pages);
Status check_steps_options(const bd_steps_options& options);

}  // namespace bitdecoding::capi
