// SPDX-License-Identifier: Apache-2.0
// NVIDIA GPUs, asked of the driver's own library, which is loaded at run time: no CUDA toolkit is
// needed, and its absence is a fact like any other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace bitdecoding::cli {

struct GpuFacts {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  std::int64_t memory_bytes = 0;
};

struct GpuReport {
  bool driver = false;         // its library is installed
  std::string driver_version;  // of the kernel module; empty = unknown
  std::string cuda_version;    // the newest that the driver speaks
  std::string trouble;         // why there are no GPUs below, in the driver's words; may be empty
  std::vector<GpuFacts> gpus;
};

GpuReport gpu_report();

}  // namespace bitdecoding::cli
