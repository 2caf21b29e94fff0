// SPDX-License-Identifier: Apache-2.0
// The CUDA backend behind the host interface, for tests: copies pools and tensors to the device and
// back, so that the same World drives every backend.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bitdecoding/cuda.h"
#include "world.h"

namespace bitdecoding::test {

// Empty when a GPU with kernels is there; else why not.
std::string why_no_gpu();

// Bytes on the device.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();
  // Grows as needed, which moves it; returns the device address.
  void* put(const void* data, std::size_t bytes);
  void reserve(std::size_t bytes);
  void get(void* data, std::size_t bytes) const;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

// Who plans: the host's directory (uploaded), the device's own, or the device's inside a CUDA graph
// that holds the whole step. A graph is captured once for each shape of step and replayed with
// other lengths, tables and tensors in the same buffers.
enum class Planner { kHost, kDevice, kGraph };

class CudaHostBackend final : public Backend {
 public:
  // `world` outlives the backend and is the one that owns it.
  CudaHostBackend(World* world, Planner planner, std::int64_t max_pages_per_request = 16);

  ~CudaHostBackend() override;
  std::string_view name() const override { return "cuda"; }
  std::string isa() const override { return device_->device().kernels; }
  int num_threads() const override { return 1; }
  FragmentOrder fragment_order() const override { return FragmentOrder::kFp16Mma; }
  Status write(const WriteParams& params) override;
  // Rows of prefilled requests keep what they held.
  Status attend(const AttendParams& params) override;
  Status gather(const AttendParams& params, int request, int kv_head, std::int64_t begin,
                std::int64_t end, float* key, float* value) override;

  CudaCounters counters();

 private:
  LayerConfig device_layer(const LayerConfig& layer);
  Status plan_step(void* stream);
  Status replay();

  World* world_;
  Planner planner_;
  std::unique_ptr<CudaPlan> plan_;
  std::unique_ptr<CudaBackend> device_;
  std::size_t page_bytes_, row_bytes_;
  DeviceBuffer pages_, rows_, query_, key_, value_, output_, lse_, shift_, key_outer_, value_outer_;
  DeviceBuffer sink_, counters_, table_, starts_, lengths_, slots_;
  // kGraph: the newest step's calls, and the graph of each (requests, tokens, longest) seen.
  LayerConfig layer_;
  StepInput input_;
  WriteParams write_;
  AttendParams attend_;
  int longest_ = 0;
  WriteCounters* counters_of_write_ = nullptr;
  std::map<std::array<std::int64_t, 3>, void*> graphs_;
};

}  // namespace bitdecoding::test
