// SPDX-License-Identifier: Apache-2.0
// Query rows made ready for the kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/cpu/decode_kernels.h"
#include "bitdecoding/attend.h"

namespace bitdecoding::cpu {

float dot(const float* a, const float* b, int n);

// One row of a tensor as float, not scaled.
void load_row(const TensorView& tensor, std::int64_t token, int head, int head_dim, float* out);
bool row_is_finite(const TensorView& tensor, std::int64_t token, int head, int head_dim);
// Writes head_dim floats, times `scale`, to row (token, head) of the output.
void store_row(const AttendParams& params, std::int64_t token, int head, const float* in,
               float scale);

// Rows [first, first + rows) of a request's KV head, each head_dim floats, times `scale`.
void load_query_rows(const AttendParams& params, const RequestPlan& request, int kv_head,
                     std::int64_t first, int rows, float scale, float* out);

// The integer form of up to max_work / terms rows for the decode kernel.
class QuadQuery {
 public:
  // rows: head_dim floats each, sm_scale included. Rotates and shifts as the layer says.
  void prepare(const LayerConfig& layer, int kv_head, const float* rows, int num_rows, int terms);
  // Adds the form that these kernels read fastest; `prepare` drops it.
  void widen(const DecodeKernels& kernels, int head_dim);
  const DecodeQuery& query() const { return query_; }

 private:
  DecodeQuery query_;
  std::vector<std::int32_t> quads_, bias_;
  std::vector<std::uint8_t> wide_;
  float scale_[kMaxWork] = {};
  float offset_[kMaxWork] = {};
};

}  // namespace bitdecoding::cpu
