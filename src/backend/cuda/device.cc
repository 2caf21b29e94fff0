// SPDX-License-Identifier: Apache-2.0
// What devices there are, and which kernels run on them.
#include "device.h"

#include <fmt/format.h>

#include "bitdecoding/cuda.h"
#include "common/error.h"

namespace bitdecoding {
namespace cuda {

std::string kernels_of(int major, int minor) {
#ifdef BITDECODING_CUDA_SM90
  // sm_90a code runs on 9.0 alone; sm_80 code on all of major 8.
  if (major == 9 && minor == 0) return "sm90";
#endif
#ifdef BITDECODING_CUDA_SM80
  if (major == 8 && minor >= 0) return "sm80";
#endif
  return "";
}

Status no_decode_kernels(const CudaDevice& device) {
  if (device.major == 8 || (device.major == 9 && device.minor == 0)) {
    return {StatusCode::kUnsupported,
            fmt::format("this library was built without the decode kernels that {} (compute "
                        "capability {}.{}) needs; add {} to BITDECODING_CUDA_ARCHITECTURES and "
                        "build again",
                        device.name, device.major, device.minor, device.major == 8 ? "80" : "90a")};
  }
  return {
      StatusCode::kUnsupported,
      fmt::format("{} has compute capability {}.{}, and there are decode kernels for 8.0 to 8.9 "
                  "and 9.0; write, gather, merge and fp4 arithmetic run on it",
                  device.name, device.major, device.minor)};
}

}  // namespace cuda

Result<std::vector<CudaDevice>> cuda_devices() {
  int driver = 0;
  int runtime = 0;
  Status status = cuda::check(cudaDriverGetVersion(&driver), "asking for the driver's version");
  if (status.ok()) status = cuda::check(cudaRuntimeGetVersion(&runtime), "asking for the runtime");
  if (!status.ok()) return status;
  if (driver == 0) {
    return Status(StatusCode::kUnsupported,
                  "no NVIDIA driver is loaded; install one, or use the cpu backend");
  }
  // Minor versions of one major version are compatible both ways.
  if (driver / 1000 < runtime / 1000) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("the NVIDIA driver speaks CUDA {}.{}, but this library was built with {}.{}; "
                    "update the driver",
                    driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10));
  }
  int count = 0;
  status = cuda::check(cudaGetDeviceCount(&count), "counting the devices");
  if (!status.ok()) return status;
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    status = cuda::check(cudaGetDeviceProperties(&properties, i), "reading a device's properties");
    if (!status.ok()) return status;
    CudaDevice d;
    d.ordinal = i;
    d.name = properties.name;
    d.major = properties.major;
    d.minor = properties.minor;
    d.multiprocessors = properties.multiProcessorCount;
    d.memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
    d.shared_bytes = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin);
    d.kernels = cuda::kernels_of(d.major, d.minor);
    devices.push_back(std::move(d));
  }
  return devices;
}

}  // namespace bitdecoding
