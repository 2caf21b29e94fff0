// SPDX-License-Identifier: Apache-2.0
// Plans that a host directory made.
#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <type_traits>

#include "cuda_plan.h"

namespace bitdecoding::cuda {
namespace {

// A host plan in the shape of the device's arrays.
struct HostPlan {
  std::vector<Request> requests;
  std::vector<ShadowUnit> units;    // [requests][unit_stride]
  std::vector<std::int32_t> pages;  // [requests][page_stride]
  std::vector<Write> writes;
  int longest = 1;  // query rows of a request that is decoded
};

// Appends a span to a request's units, cut where a slot's sixteen-row parts end. Longer than
// `most` units are the spans of a prefilled chunk alone, and its own rows are not read here.
void add_span(const ShadowSpan& span, int most, ShadowUnit* units, std::int32_t* num_units) {
  for (std::int64_t at = span.begin; at < span.end && *num_units < most;) {
    const auto row = static_cast<std::int32_t>(span.row + at - span.begin);
    const std::int64_t end = std::min<std::int64_t>(span.end, at + kUnitRows - row % kUnitRows);
    units[(*num_units)++] = {static_cast<std::int32_t>(at), static_cast<std::int32_t>(end),
                             span.slot, row};
    at = end;
  }
}

HostPlan flatten(const StepPlan& plan, int unit_stride, std::int64_t page_stride) {
  HostPlan host;
  const std::size_t n = plan.requests.size();
  host.units.resize(n * static_cast<std::size_t>(unit_stride));
  host.pages.assign(n * static_cast<std::size_t>(page_stride), -1);
  for (std::size_t i = 0; i < n; ++i) {
    const RequestPlan& from = plan.requests[i];
    Request r;
    r.seq_len = static_cast<std::int32_t>(from.seq_len);
    r.query_begin = static_cast<std::int32_t>(from.query_begin);
    r.query_len = static_cast<std::int32_t>(from.query_len);
    if (from.query_len <= kMaxDecodeQueries) host.longest = std::max(host.longest, r.query_len);
    ShadowUnit* units = host.units.data() + i * static_cast<std::size_t>(unit_stride);
    for (std::int64_t s = 0; s < from.num_spans; ++s) {
      add_span(from.spans[s], unit_stride, units, &r.num_units);
    }
    std::copy_n(from.pages, from.num_pages,
                host.pages.data() + i * static_cast<std::size_t>(page_stride));
    host.requests.push_back(r);
  }
  for (const GroupWrite& w : plan.writes) {
    host.writes.push_back({static_cast<std::int32_t>(w.page), w.group, w.first_row, w.num_rows,
                           static_cast<std::int32_t>(w.source), w.slot, w.prefix_in_slot ? 1 : 0,
                           0});
  }
  return host;
}

// Copies from pageable memory: it may go when copy() returns. The first error stays.
class Uploader {
 public:
  explicit Uploader(CudaStream stream) : stream_(static_cast<cudaStream_t>(stream)) {}

  template <class To, class From>
  void copy(To* to, const From& from) {
    static_assert(
        std::is_same_v<To, std::remove_cv_t<std::remove_pointer_t<decltype(from.data())>>>);
    if (!status_.ok() || from.empty()) return;
    status_ = check(
        cudaMemcpyAsync(to, from.data(), from.size() * sizeof(To), cudaMemcpyHostToDevice, stream_),
        "copying a plan to the device");
  }
  const Status& status() const { return status_; }

 private:
  const cudaStream_t stream_;
  Status status_;
};

}  // namespace

Status Plan::check_upload(const StepPlan& plan) const {
  const auto n = static_cast<std::int64_t>(plan.requests.size());
  if (n > limits_.max_requests ||
      static_cast<std::int64_t>(plan.writes.size()) > limits_.max_step_tokens) {
    return {StatusCode::kOutOfRange,
            fmt::format("the plan has {} requests and {} writes, but there is room for {} and {}",
                        n, plan.writes.size(), limits_.max_requests, limits_.max_step_tokens)};
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int64_t pages = plan.requests[static_cast<std::size_t>(i)].num_pages;
    if (pages <= limits_.max_pages_per_request) continue;
    return {StatusCode::kOutOfRange,
            fmt::format("request {} has {} pages, but there is room for {}", i, pages,
                        limits_.max_pages_per_request)};
  }
  return {};
}

Status Plan::upload(const StepPlan& plan, CudaStream stream) {
  Status status = check_upload(plan);
  if (!status.ok()) return status;
  if (pages_.get() == nullptr) {
    status = pages_.allocate(std::int64_t{limits_.max_requests} * limits_.max_pages_per_request,
                             "allocating the uploaded block table");
    if (!status.ok()) return status;
  }
  const HostPlan host = flatten(plan, args_.plan.unit_stride, limits_.max_pages_per_request);
  set_columns(host.longest);
  PlanView& p = args_.plan;
  p.num_requests = static_cast<std::int32_t>(host.requests.size());
  p.pages = pages_.get();
  p.page_stride = limits_.max_pages_per_request;
  p.num_pages = limits_.num_pages;
  p.max_writes = static_cast<std::int32_t>(host.writes.size());
  Uploader to_device(stream);
  to_device.copy(requests_.get(), host.requests);
  to_device.copy(units_.get(), host.units);
  to_device.copy(pages_.get(), host.pages);
  to_device.copy(writes_.get(), host.writes);
  to_device.copy(&state_.get()->num_writes, std::span(&p.max_writes, 1));
  for (int w = 0; w < args_.num_work; ++w) {
    to_device.copy(args_.work[w].prefix, work_prefix(host.requests, args_.work[w].window_left));
  }
  followed_ = false;
  return to_device.status();
}

}  // namespace bitdecoding::cuda
