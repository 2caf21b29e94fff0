// SPDX-License-Identifier: Apache-2.0
// Device memory that frees itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>
#include <utility>

#include "common/error.h"

namespace bitdecoding::cuda {

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  // Zeroed. Once an object.
  Status allocate(std::int64_t count, std::string_view what) {
    size_ = count;
    if (count == 0) return {};
    void* data = nullptr;
    Status status = check(cudaMalloc(&data, static_cast<std::size_t>(bytes())), what);
    if (!status.ok()) return status;
    data_ = static_cast<T*>(data);
    return check(cudaMemset(data_, 0, static_cast<std::size_t>(bytes())), what);
  }

  T* get() const { return data_; }
  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return size_ * static_cast<std::int64_t>(sizeof(T)); }

 private:
  T* data_ = nullptr;
  std::int64_t size_ = 0;
};

}  // namespace bitdecoding::cuda
