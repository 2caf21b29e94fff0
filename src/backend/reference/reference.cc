// SPDX-License-Identifier: Apache-2.0
#include "backend/reference/reference.h"

#include <new>

#include "backend/reference/verbs.h"
#include "backend/validate.h"

namespace bitdecoding {
namespace {

class ReferenceBackend final : public Backend {
 public:
  explicit ReferenceBackend(FragmentOrder order) : order_(order) {}

  std::string_view name() const override { return "reference"; }
  std::string isa() const override { return "scalar"; }
  int num_threads() const override { return 1; }
  FragmentOrder fragment_order() const override { return order_; }

  Status write(const WriteParams& params) override {
    Status status = validate_write(params);
    if (status.ok()) reference::write(params);
    return status;
  }

  Status attend(const AttendParams& params) override {
    try {
      Status status = validate_attend(params);
      if (status.ok()) reference::attend(params);
      return status;
    } catch (const std::bad_alloc&) {
      return {StatusCode::kResourceExhausted,
              "no memory is left for a sequence's dequantized rows; use the backend 'cpu' for long "
              "sequences"};
    }
  }

  Status gather(const AttendParams& params, int request, int kv_head, std::int64_t begin,
                std::int64_t end, float* key, float* value) override {
    Status status = validate_gather(params, request, kv_head, begin, end, key, value);
    if (!status.ok()) return status;
    const RequestPlan& r = params.plan->requests[static_cast<std::size_t>(request)];
    reference::gather(params, r, kv_head, begin, end, key, value);
    return status;
  }

 private:
  const FragmentOrder order_;
};

}  // namespace

Result<std::unique_ptr<Backend>> make_reference_backend(const BackendOptions& options,
                                                        FragmentOrder order) {
  if (!options.isa.empty()) {
    return Status(
        StatusCode::kInvalidArgument,
        "the backend 'reference' has no ISA to choose; leave isa empty, not '" + options.isa + "'");
  }
  return std::unique_ptr<Backend>(std::make_unique<ReferenceBackend>(order));
}

}  // namespace bitdecoding
