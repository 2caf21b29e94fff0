// SPDX-License-Identifier: Apache-2.0
// A backend implements the verbs on one kind of machine. `reference` is the oracle: plain loops in
// double precision, never optimised. `cpu` is SIMD with run-time dispatch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bitdecoding/attend.h"
#include "bitdecoding/quantize.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

struct BackendOptions {
  int num_threads = 0;  // 0 = the CPUs of the caller's affinity mask
  // Runs body(i) for i in [0, n) on the caller's threads and returns when all are done; empty =
  // the backend's own pool.
  std::function<void(std::int64_t n, const std::function<void(std::int64_t)>& body)> parallel_for;
  std::string isa;  // `cpu`: empty = best of this machine; else a name of supported_isas()
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual std::string isa() const = 0;  // what really runs, e.g. "AVX2"
  virtual int num_threads() const = 0;
  virtual FragmentOrder fragment_order() const = 0;  // of the pages it reads and writes

  // write, attend and gather validate their params before they touch memory and may be called at
  // once for different layers; calls for one layer are the caller's to order. Workspace grows to
  // the largest step seen and is kept; kResourceExhausted when there is no memory for it.

  // All plan.writes of one layer.
  virtual Status write(const WriteParams& params) = 0;
  // All plan.requests of one layer. Rows of `output` outside every request are left alone.
  virtual Status attend(const AttendParams& params) = 0;
  // Dequantizes positions [begin, end) of request r, head h into key/value rows of head_dim
  // floats in the original space (rotated back, shift added); pages only, shadow ignored.
  virtual Status gather(const AttendParams& params, int request, int kv_head, std::int64_t begin,
                        std::int64_t end, float* key, float* value) = 0;
};

const std::vector<std::string>& backend_names();
std::vector<std::string> supported_isas();  // of this machine and build, best first
// kInvalidArgument for an unknown backend or ISA name, with the known ones.
Result<std::unique_ptr<Backend>> make_backend(std::string_view name, const BackendOptions& options);

}  // namespace bitdecoding
#pragma GCC visibility pop
