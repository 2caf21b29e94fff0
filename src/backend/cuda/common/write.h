// SPDX-License-Identifier: Apache-2.0
// What the host side needs of the quantizing and dequantizing kernels.
#pragma once

#include <cstdint>

#include "bitdecoding/cuda.h"
#include "common/plan.h"

namespace bitdecoding::cuda {

struct Tensor {
  const void* data = nullptr;
  DType dtype = DType::kBf16;
  std::int64_t stride_token = 0, stride_head = 0;
  bool vectors = false;  // 16-bit elements; data and strides are multiples of 16 bytes
};

// CudaPlan::make refuses pages of any other.
inline constexpr FragmentOrder kOrder = FragmentOrder::kFp16Mma;

struct LayerView {
  Format format = Format::kNvfp4;
  std::int32_t head_dim = 0, num_kv_heads = 0;
  ScaleRule key_rule = ScaleRule::kFourSix, value_rule = ScaleRule::kAmax6;
  bool hadamard = true;
  const float* key_shift = nullptr;
  const std::int8_t* key_outer = nullptr;
  const std::int8_t* value_outer = nullptr;
  std::uint8_t* pages = nullptr;
  std::int64_t stride_page = 0, stride_head = 0;
  std::uint16_t* shadow = nullptr;
};

struct WriteArgs {
  PlanView plan;
  LayerView layer;
  Tensor key, value;
  WriteCounters* counters = nullptr;
};

struct GatherArgs {
  PlanView plan;
  LayerView layer;
  CudaGather what;
};

// Whether the current device can run the kernels of `any`.
bool has_any_kernels();
// Dependent: may begin before its predecessor on the stream has ended.
Status launch_write(const WriteArgs& args, void* stream, bool dependent);
Status launch_gather(const GatherArgs& args, void* stream);
Status launch_merge(const CudaBackend::Merge& merge, void* stream);

}  // namespace bitdecoding::cuda
