// SPDX-License-Identifier: Apache-2.0
#include "cuda_build.h"

namespace bitdecoding::cli {
namespace {

Status no_backend() {
  return {StatusCode::kUnsupported,
          "this build has no CUDA backend; build with -DBITDECODING_BUILD_CUDA=ON (CUDA toolkit "
          "13.0 or later) to bench on a GPU, or pass --backend cpu"};
}

}  // namespace

GpuUse gpu_use(const std::string&, int, int) {
  return {false,
          "this build has no CUDA backend and works on the CPU; build with "
          "-DBITDECODING_BUILD_CUDA=ON (CUDA toolkit 13.0 or later) for `bench --backend cuda`"};
}

Result<nlohmann::ordered_json> bench_decode_cuda(const BenchOptions&) { return no_backend(); }
Result<nlohmann::ordered_json> bench_write_cuda(const BenchOptions&) { return no_backend(); }

}  // namespace bitdecoding::cli
