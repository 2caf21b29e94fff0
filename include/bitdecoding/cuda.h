// SPDX-License-Identifier: Apache-2.0
// The CUDA backend: the three verbs on device memory. No CUDA header is needed here: a stream is an
// opaque handle, device pointers are plain pointers. Library: bitdecoding_cuda.
//
// Every call below that takes a stream only enqueues work: no synchronisation, no allocation, no
// look at device data from the host. A step (build, then write and attend of every layer) can
// therefore be captured in a CUDA graph and replayed with other lengths, block tables and slot
// mappings in the same buffers.
//
// From 9.0 on, write and attend let their successor begin at once. A kernel that is launched with
// programmatic stream serialization after one of them must wait (griddepcontrol.wait) in every
// block, before it touches memory and before it ends. Ordinary launches, copies and events need
// nothing.
//
// Thread safety: calls on one CudaPlan or one CudaBackend must not overlap on the host; different
// streams must be ordered by the caller. Errors are found before a launch; what only the device
// can see (entries of a block table out of range) is never followed, counted, and reported by
// CudaPlan::counters.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bitdecoding/attend.h"
#include "bitdecoding/page.h"
#include "bitdecoding/quantize.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

using CudaStream = void*;  // a cudaStream_t; null = the default stream

struct CudaDevice {
  int ordinal = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::int64_t memory_bytes = 0;
  std::int64_t shared_bytes = 0;  // the most one block may ask for
  // Which decode kernels this library runs there: sm90, sm80. Empty = none: GPUs newer than those
  // still write, gather, merge and attend in fp4 arithmetic.
  std::string kernels;
};

// All devices that the driver shows. kUnsupported with the driver's words when there is no driver
// or it is too old for this library.
Result<std::vector<CudaDevice>> cuda_devices();

struct CudaPlanLimits {
  PageGeometry geometry;  // order kFp16Mma; tiled formats
  ShadowRule rule;
  std::int64_t num_pages = 0;
  std::int32_t num_slots = 0;
  int max_requests = 0;
  std::int64_t max_step_tokens = 0;  // rows of key and value in one step
  std::int64_t max_pages_per_request = 0;
  int num_q_heads = 0, num_kv_heads = 0;
  // window_left of the layers that use the plan, without repeats; at most kMaxWindows.
  std::vector<int> windows = {-1};

  static constexpr int kMaxWindows = 4;
};

struct CudaCounters {
  StepCounters step;              // summed since make()
  std::uint64_t bad_pages = 0;    // block table entries outside the pool that would have been read
  std::uint64_t bad_slots = 0;    // slot_mapping entries that contradict the block table: skipped
  std::uint64_t bad_lengths = 0;  // sequences longer than their row of the block table: cut there
};

// The plan of a step, in device memory, shared by all layers of the step. It also holds the shadow
// directory.
class CudaPlan {
 public:
  static Result<std::unique_ptr<CudaPlan>> make(const CudaPlanLimits& limits);
  // Device memory that make() takes; needs no device.
  static Result<std::int64_t> bytes_for(const CudaPlanLimits& limits);
  virtual ~CudaPlan() = default;

  // Updates the directory and plans the step, in one launch. All pointers of `input` are device
  // memory and stay borrowed until the step's last launch has run; num_requests and num_tokens are
  // host numbers (a padded batch has requests without query rows and tokens with slot -1).
  // max_query_len bounds the query rows of every request.
  virtual Status build(const StepInput& input, int max_query_len, CudaStream stream) = 0;

  // The same from a plan that a host directory made. Copies from pageable memory, and allocates
  // once: not for a stream that is captured. The host plan may go when it returns.
  virtual Status upload(const StepPlan& plan, CudaStream stream) = 0;

  // Drops every entry of a page whose codes were replaced from outside.
  virtual Status forget(std::int64_t page, CudaStream stream) = 0;

  // Waits for the stream. Not for use while it is captured.
  virtual Result<CudaCounters> counters(CudaStream stream) = 0;

  virtual const CudaPlanLimits& limits() const = 0;
  virtual std::int64_t device_bytes() const = 0;
};

// Positions [begin, end) of a request as rows of numbers: what a prefill kernel attends to.
struct CudaGather {
  int request = 0;
  std::int64_t begin = 0, end = 0;  // host numbers, within the request's length
  bool with_shadow = true;          // positions of shadow spans come from their BF16 rows
  DType dtype = DType::kBf16;       // of key and value
  void* key = nullptr;              // [end - begin][num_kv_heads][head_dim], original space
  void* value = nullptr;
  std::int64_t stride_token = 0, stride_head = 0;  // elements, of both
};

struct CudaBackendOptions {
  int device = 0;
  int head_dim = 0;  // the largest of any layer: the workspace is made for it
};

// WriteParams and AttendParams as for host backends, with device pointers everywhere (pages, rows,
// tensors, output, lse, attn_sink, counters, and key_shift, key_outer, value_outer of the layer)
// and `plan` null: the CudaPlan takes its place. Tensors are BF16, FP16 or FP32.
class CudaBackend {
 public:
  static Result<std::unique_ptr<CudaBackend>> make(const CudaBackendOptions& options);
  // Device memory that make() takes there.
  static std::int64_t bytes_for(const CudaDevice& device, int head_dim);
  virtual ~CudaBackend() = default;

  virtual const CudaDevice& device() const = 0;
  virtual std::int64_t device_bytes() const = 0;

  // One launch: shift, Hadamard, scale, pack, shadow rows.
  virtual Status write(const WriteParams& params, const CudaPlan& plan, CudaStream stream) = 0;
  // One launch (`fp4`: up to three): requests with at most kMaxDecodeQueries query rows. Others are
  // skipped: their chunk attends elsewhere, to gather()'s rows and to itself, and is merged by LSE.
  // Arithmetic: `wide`, and `fp4` emulated in integers and double precision.
  virtual Status attend(const AttendParams& params, const CudaPlan& plan, CudaStream stream) = 0;
  virtual Status gather(const AttendParams& params, const CudaGather& what, const CudaPlan& plan,
                        CudaStream stream) = 0;
  // out, lse = both parts, merged. Rows of [tokens][heads][head_dim]; lse [tokens][heads].
  struct Merge {
    std::int64_t tokens = 0;
    int heads = 0, head_dim = 0;
    DType dtype = DType::kBf16;
    const void* a = nullptr;
    const void* b = nullptr;
    const float* lse_a = nullptr;
    const float* lse_b = nullptr;
    void* out = nullptr;   // may be a or b
    float* lse = nullptr;  // nullable
  };
  virtual Status merge(const Merge& merge, CudaStream stream) = 0;
};

}  // namespace bitdecoding
#pragma GCC visibility pop
