// SPDX-License-Identifier: Apache-2.0
// What this build can do on NVIDIA GPUs. cuda_build_with.cc is compiled with the CUDA backend,
// cuda_build_without.cc where it is left out.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bench_options.h"
#include "bitdecoding/status.h"

namespace bitdecoding::cli {

// What `doctor` says of a GPU.
struct GpuUse {
  bool decodes = false;  // this build has decode kernels for it
  std::string words;     // what it is used for, or how to get there
};

GpuUse gpu_use(const std::string& name, int major, int minor);

// `bench decode` and `bench write` with --backend cuda.
Result<nlohmann::ordered_json> bench_decode_cuda(const BenchOptions& options);
Result<nlohmann::ordered_json> bench_write_cuda(const BenchOptions& options);

}  // namespace bitdecoding::cli
