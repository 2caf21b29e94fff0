// SPDX-License-Identifier: Apache-2.0
// Layers of a served model in device memory, on made-up data: pages in a shuffled order, BF16
// slots, a plan, and N(0, 1) queries, keys and values. Several layers, so that what one replay
// reads is not in the cache of the next.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "bench_measure.h"
#include "bench_options.h"
#include "bitdecoding/cuda.h"
#include "bitdecoding/recipe.h"

namespace bitdecoding::cli {

// Device memory that frees itself.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();
  Status allocate(std::int64_t bytes);
  Status put(const void* data, std::size_t bytes);
  Status get(void* data, std::size_t bytes) const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

class CudaScene {
 public:
  static Result<std::unique_ptr<CudaScene>> make(const BenchOptions& options);

  // Writes positions [0, tokens) of all sequences, in all layers.
  Status fill(std::int64_t tokens);
  // Plans a step in which every sequence adds `count` tokens from position `first` on.
  Status begin_step(std::int64_t first, std::int64_t count);

  // Median and so on of one layer's call, from replays of a graph of all layers' calls.
  Result<Timing> time_attend(int repeat);
  Result<Timing> time_write(int repeat);
  Result<Timing> time_plan(int repeat);

  // Relative L2 error of request 0's rows of KV head 0 in the first layer, against double precision
  // over what gather() says of its keys and values.
  Result<double> attend_error();
  // The same of the newest step's keys and values as gather() reads them back.
  Result<double> write_error();

  const CudaDevice& device() const { return backend_->device(); }
  const Recipe& recipe() const { return recipe_; }
  const LayerConfig& layer() const { return layer_; }
  // Bytes of pages that one layer's attend reads.
  std::int64_t bytes_read() const;
  int layers() const { return layers_; }

 private:
  explicit CudaScene(const BenchOptions& options) : options_(options) {}

  Status open();
  Status make_plan();
  Status make_data();
  Result<StepInput> upload_step(std::int64_t first, std::int64_t count);
  WriteParams write_params(int layer) const;
  AttendParams attend_params(int layer) const;
  CacheView cache(int layer) const;
  ShadowPool shadow(int layer) const;
  Status gather(std::int64_t begin, std::int64_t end, bool with_shadow, std::vector<float>* key,
                std::vector<float>* value);
  Result<Timing> time(int repeat, int per, const std::function<Status(void*)>& enqueue);

  const BenchOptions options_;
  Recipe recipe_;
  LayerConfig layer_;
  DType dtype_ = DType::kF32;
  int layers_ = 1;
  std::int64_t per_sequence_ = 0, num_pages_ = 0;  // pages
  std::int64_t layer_bytes_ = 0, layer_rows_ = 0;
  std::int64_t chunk_ = 0;  // tokens of a step at the most
  std::int32_t num_slots_ = 0;
  std::int64_t first_ = 0, count_ = 0;  // of the newest step
  std::vector<std::int32_t> table_;
  std::vector<float> key_, value_, query_, shift_;  // as they are on the device
  std::unique_ptr<CudaPlan> plan_;
  std::unique_ptr<CudaBackend> backend_;
  DeviceMemory pages_, rows_, device_key_, device_value_, device_query_, device_shift_, output_;
  DeviceMemory device_table_, starts_, lengths_, slots_, gathered_;
};

}  // namespace bitdecoding::cli
