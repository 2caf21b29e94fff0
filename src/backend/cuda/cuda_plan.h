// SPDX-License-Identifier: Apache-2.0
// CudaPlan's implementation, for the backend beside it.
#pragma once

#include <memory>
#include <vector>

#include "bitdecoding/cuda.h"
#include "common/directory.h"
#include "common/memory.h"

namespace bitdecoding::cuda {

class Plan final : public CudaPlan {
 public:
  explicit Plan(const CudaPlanLimits& limits) : limits_(limits) {}
  Status allocate();

  Status build(const StepInput& input, int max_query_len, CudaStream stream) override;
  Status upload(const StepPlan& plan, CudaStream stream) override;
  Status forget(std::int64_t page, CudaStream stream) override;
  Result<CudaCounters> counters(CudaStream stream) override;
  const CudaPlanLimits& limits() const override { return limits_; }
  std::int64_t device_bytes() const override;

  // kInvalidArgument unless the window is one of the limits'. The newest build or upload.
  Result<PlanView> view(int window_left) const;
  int column_blocks() const { return args_.plan.columns / kColumns; }
  // Query rows that a block of rows has at the most.
  int rows_in_use() const;
  // Query rows that a request and KV head have at the most.
  int query_rows() const;
  // Where a launch goes: a stream, and its capture (0 outside one).
  struct Place {
    CudaStream stream = nullptr;
    unsigned long long capture = 0;
    bool operator==(const Place&) const = default;
  };
  // Whether a launch there may begin before its predecessor has ended: yes once a launch after
  // build() or upload() has gone there, since that one waited for the plan to be complete.
  bool followed(const Place& place) const { return followed_ && place_ == place; }
  void launched(const Place& place) const {
    followed_ = true;
    place_ = place;
  }

 private:
  void set_columns(int max_query_len);
  Status check_step(const StepInput& input, int max_query_len) const;
  Status check_upload(const StepPlan& plan) const;
  // Work::prefix.
  std::vector<std::int32_t> work_prefix(const std::vector<Request>& requests,
                                        int window_left) const;

  const CudaPlanLimits limits_;
  BuildArgs args_;  // filled by build() or upload(), read by view()
  int max_query_len_ = 0;
  mutable bool followed_ = false;
  mutable Place place_;
  DeviceArray<Request> requests_;
  DeviceArray<ShadowUnit> units_;
  DeviceArray<Write> writes_;
  DeviceArray<Want> wants_;
  DeviceArray<std::int32_t> index_;
  DeviceArray<SlotEntry> slots_;
  DeviceArray<std::int32_t> free_slots_;
  DeviceArray<DirectoryState> state_;
  DeviceArray<std::int32_t> pages_;  // of upload()
  DeviceArray<std::int32_t> prefix_[CudaPlanLimits::kMaxWindows];
};

}  // namespace bitdecoding::cuda
