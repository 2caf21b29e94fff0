// SPDX-License-Identifier: Apache-2.0
// The Backend of a runtime whose pages are on a GPU.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "backend/cuda/common/memory.h"
#include "bitdecoding/backend.h"
#include "bitdecoding/cuda.h"

namespace bitdecoding::capi {

// One a runtime. The verbs of Backend are for host memory, so they refuse.
class DeviceBackend final : public Backend {
 public:
  explicit DeviceBackend(CudaDevice device) : device_(std::move(device)) {}
  Status allocate() { return counters_.allocate(1, "allocating the counters"); }

  std::string_view name() const override { return "cuda"; }
  std::string isa() const override {
    return device_.kernels.empty() ? "no decode kernels" : device_.kernels;
  }
  int num_threads() const override { return 0; }
  FragmentOrder fragment_order() const override { return FragmentOrder::kFp16Mma; }
  Status write(const WriteParams& /*params*/) override { return host_memory(); }
  Status attend(const AttendParams& /*params*/) override { return host_memory(); }
  Status gather(const AttendParams& /*params*/, int /*request*/, int /*kv_head*/,
                std::int64_t /*begin*/, std::int64_t /*end*/, float* /*key*/,
                float* /*value*/) override {
    return host_memory();
  }

  // The backend that works on layers of this head size. Its workspace is one step's at a time.
  Result<CudaBackend*> of(int head_dim);
  CudaBackend* made(int head_dim) const {
    const auto found = backends_.find(head_dim);
    return found == backends_.end() ? nullptr : found->second.get();
  }
  CudaBackend* any() const { return backends_.empty() ? nullptr : backends_.begin()->second.get(); }
  const CudaDevice& device() const { return device_; }

  struct Counters {
    WriteCounters write;
    std::uint64_t corrupt_scales = 0;
  };
  Counters* counters() const { return counters_.get(); }
  mutable std::mutex mutex;  // of calls that may come from any thread

 private:
  static Status host_memory() {
    return {StatusCode::kUnsupported,
            "the cuda backend works on device memory; call bd_cuda_write and bd_cuda_attend"};
  }
  const CudaDevice device_;
  std::map<int, std::unique_ptr<CudaBackend>> backends_;
  cuda::DeviceArray<Counters> counters_;
};

}  // namespace bitdecoding::capi
