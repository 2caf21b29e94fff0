// SPDX-License-Identifier: Apache-2.0
#include "cuda_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <type_traits>

namespace bitdecoding {
namespace cuda {
namespace {

// The most shadow units a request can have: its sink, and a tail that begins up to a group early
// and, while drafts are verified, for the shortest length; in reproducible mode up to a page.
int max_units(const ShadowRule& rule) {
  const auto parts = [](std::int64_t tokens) {
    return static_cast<int>((tokens + kUnitRows - 1) / kUnitRows);
  };
  const int tail = std::max(rule.tail_tokens, 0) + rule.group_tokens + kMaxDecodeQueries;
  return parts(rule.sink_tokens) + parts(tail) + 2;
}

Status check_limits(const CudaPlanLimits& l) {
  const auto geometry = PageGeometry::make(l.geometry.format, l.geometry.order, l.geometry.head_dim,
                                           l.geometry.page_size);
  if (!geometry.ok()) return geometry.status();
  if (!is_tiled(l.geometry.format) || l.geometry.order != FragmentOrder::kFp16Mma) {
    return {
        StatusCode::kUnsupported,
        fmt::format("the CUDA backend reads nvfp4 and mxfp4 pages in the {} order, but the plan is "
                    "for {} pages in the {} order",
                    fragment_order_name(FragmentOrder::kFp16Mma), format_name(l.geometry.format),
                    fragment_order_name(l.geometry.order))};
  }
  if (l.rule.group_tokens != l.geometry.group_tokens || l.rule.page_size != l.geometry.page_size ||
      l.rule.sink_tokens < 0 || l.rule.tail_tokens < 0) {
    return {StatusCode::kInvalidArgument,
            "the BF16 rule does not fit the pages; make it with make_shadow_rule"};
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  if (l.num_pages < 1 || l.num_pages * l.geometry.groups_per_page >= kMost || l.num_slots < 0 ||
      l.max_requests < 1 || l.max_step_tokens < 1 || l.max_step_tokens >= kMost ||
      l.max_pages_per_request < 1 || l.max_pages_per_request * l.geometry.page_size >= kMost) {
    return {
        StatusCode::kInvalidArgument,
        fmt::format("a plan needs 1 or more pages (fewer than 2^31 groups in all), requests, step "
                    "tokens and pages a request (fewer than 2^31 tokens), and 0 or more slots, but "
                    "got {} pages, {} requests, {} tokens, {} pages a request and {} slots",
                    l.num_pages, l.max_requests, l.max_step_tokens, l.max_pages_per_request,
                    l.num_slots)};
  }
  if (l.num_kv_heads < 1 || l.num_q_heads < 1 || l.num_q_heads % l.num_kv_heads != 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{} query heads cannot share {} KV heads; expected a whole multiple",
                        l.num_q_heads, l.num_kv_heads)};
  }
  if (l.windows.empty() || l.windows.size() > CudaPlanLimits::kMaxWindows) {
    return {StatusCode::kInvalidArgument,
            fmt::format("a plan serves layers of 1 to {} different windows, but got {}",
                        CudaPlanLimits::kMaxWindows, l.windows.size())};
  }
  return {};
}

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

Status Plan::allocate() {
  const std::int64_t requests = limits_.max_requests;
  const int unit_stride = max_units(limits_.rule);
  // Every written token may begin a group of its own.
  const std::int64_t writes = limits_.max_step_tokens;
  const std::int64_t keys = limits_.num_pages * limits_.geometry.groups_per_page;
  Status status = requests_.allocate(requests, "allocating the plan's requests");
  const auto also = [&](Status next) {
    if (status.ok()) status = std::move(next);
  };
  also(units_.allocate(requests * unit_stride, "allocating the plan's shadow units"));
  also(writes_.allocate(writes, "allocating the plan's writes"));
  also(wants_.allocate(writes, "allocating the plan's writes"));
  also(index_.allocate(keys, "allocating the shadow directory"));
  also(slots_.allocate(std::max(limits_.num_slots, 1), "allocating the shadow directory"));
  also(free_slots_.allocate(std::max(limits_.num_slots, 1), "allocating the shadow directory"));
  also(state_.allocate(1, "allocating the shadow directory"));
  for (std::size_t i = 0; i < limits_.windows.size(); ++i) {
    also(prefix_[i].allocate(requests + 2, "allocating the plan's work list"));
  }
  if (!status.ok()) return status;

  PlanView& p = args_.plan;
  int device = 0;
  also(check(cudaGetDevice(&device), "asking for the device"));
  also(check(cudaDeviceGetAttribute(&p.num_blocks, cudaDevAttrMultiProcessorCount, device),
             "asking for multiprocessors"));
  if (!status.ok()) return status;
  p.unit_stride = unit_stride;
  p.requests = requests_.get();
  p.units = units_.get();
  p.writes = writes_.get();
  p.num_writes = &state_.get()->num_writes;
  p.bad_pages = &state_.get()->bad_pages;
  p.num_pages = limits_.num_pages;
  p.page_size = limits_.geometry.page_size;
  p.tiles_per_page = limits_.geometry.page_size / kTileTokens;
  p.page_reciprocal = static_cast<std::uint32_t>(
      ((std::uint64_t{1} << 32) + static_cast<std::uint64_t>(p.tiles_per_page) - 1) /
      static_cast<std::uint64_t>(p.tiles_per_page));
  p.sink_tokens = limits_.rule.sink_tokens;
  p.tail_tokens = limits_.rule.tail_tokens;
  p.group_tokens = limits_.rule.group_tokens;
  p.reproducible = limits_.rule.reproducible ? 1 : 0;
  args_.groups_per_page = limits_.geometry.groups_per_page;
  args_.num_slots = limits_.num_slots;
  args_.num_q_per_kv = limits_.num_q_heads / limits_.num_kv_heads;
  args_.num_kv_heads = limits_.num_kv_heads;
  args_.index = index_.get();
  args_.slots = slots_.get();
  args_.free_slots = free_slots_.get();
  args_.state = state_.get();
  args_.requests = requests_.get();
  args_.units = units_.get();
  args_.writes = writes_.get();
  args_.wants = wants_.get();
  args_.num_work = static_cast<std::int32_t>(limits_.windows.size());
  for (std::size_t i = 0; i < limits_.windows.size(); ++i) {
    args_.work[i] = {limits_.windows[i], prefix_[i].get()};
  }
  launch_reset(args_, nullptr);
  status = check(cudaGetLastError(), "launching the directory's reset");
  if (!status.ok()) return status;
  return check(cudaStreamSynchronize(nullptr), "resetting the directory");
}

void Plan::set_columns(int max_query_len) {
  const int rows = std::min(max_query_len, kMaxDecodeQueries) * args_.num_q_per_kv;
  const int blocks = most_column_blocks(limits_.geometry.head_dim);
  args_.plan.columns = rows <= kColumns ? kColumns : blocks * kColumns;
  max_query_len_ = max_query_len;
}

int Plan::query_rows() const {
  return std::clamp(max_query_len_, 1, kMaxDecodeQueries) * args_.num_q_per_kv;
}

int Plan::rows_in_use() const { return std::min(query_rows(), args_.plan.columns); }

Status Plan::check_step(const StepInput& in, int max_query_len) const {
  if (in.num_requests < 0 || in.num_requests > limits_.max_requests || in.num_tokens < 0 ||
      in.num_tokens > limits_.max_step_tokens) {
    return {
        StatusCode::kOutOfRange,
        fmt::format("the step has {} requests and {} tokens, but the plan was made for at most {} "
                    "and {}",
                    in.num_requests, in.num_tokens, limits_.max_requests, limits_.max_step_tokens)};
  }
  if (in.num_pages < 0 || in.num_pages > limits_.num_pages) {
    return {StatusCode::kOutOfRange,
            fmt::format("the step's pool has {} pages, but the plan was made for {}", in.num_pages,
                        limits_.num_pages)};
  }
  if (in.num_requests > 0 &&
      (in.query_start == nullptr || in.seq_lens == nullptr || in.block_table == nullptr)) {
    return {StatusCode::kInvalidArgument,
            "block_table, query_start and seq_lens must not be null when the step has requests"};
  }
  if (in.num_tokens > 0 && in.slot_mapping == nullptr) {
    return {StatusCode::kInvalidArgument,
            "slot_mapping must not be null when the step has tokens; -1 skips a row"};
  }
  if (in.block_table_stride < 1 || in.block_table_stride > limits_.max_pages_per_request) {
    return {
        StatusCode::kOutOfRange,
        fmt::format("a row of the block table has {} entries, but the plan was made for 1 to {}",
                    in.block_table_stride, limits_.max_pages_per_request)};
  }
  if (max_query_len < 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("max_query_len is {}; expected 0 or more", max_query_len)};
  }
  return {};
}

Status Plan::build(const StepInput& in, int max_query_len, CudaStream stream) {
  Status status = check_step(in, max_query_len);
  if (!status.ok()) return status;
  set_columns(max_query_len);
  PlanView& p = args_.plan;
  p.num_requests = in.num_requests;
  p.pages = in.block_table;
  p.page_stride = in.block_table_stride;
  p.num_pages = in.num_pages;
  // A request's rows begin and end inside groups; skipped rows can make more writes than that,
  // which the kernel then takes in turns.
  p.max_writes = static_cast<std::int32_t>(
      std::min<std::int64_t>(in.num_tokens, in.num_tokens / p.group_tokens + 2 * in.num_requests));
  args_.query_start = in.query_start;
  args_.seq_lens = in.seq_lens;
  args_.slot_mapping = in.slot_mapping;
  args_.num_tokens = static_cast<std::int32_t>(in.num_tokens);
  launch_build(args_, stream);
  followed_ = false;
  return check(cudaGetLastError(), "launching the plan");
}

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

Status Plan::forget(std::int64_t page, CudaStream stream) {
  if (page < 0 || page >= limits_.num_pages) {
    return {StatusCode::kOutOfRange,
            fmt::format("page {} does not exist; the pool has {}", page, limits_.num_pages)};
  }
  launch_forget(args_, page, stream);
  return check(cudaGetLastError(), "launching the directory's update");
}

Result<CudaCounters> Plan::counters(CudaStream stream) {
  DirectoryState state;
  const auto stream_of = static_cast<cudaStream_t>(stream);
  Status status =
      check(cudaMemcpyAsync(&state, state_.get(), sizeof(state), cudaMemcpyDeviceToHost, stream_of),
            "reading the counters");
  if (status.ok()) status = check(cudaStreamSynchronize(stream_of), "reading the counters");
  if (!status.ok()) return status;
  CudaCounters c;
  c.step.evicted_slots = state.evicted_slots;
  c.step.refused_groups = state.refused_groups;
  c.step.missing_tokens = state.missing_tokens;
  c.step.lost_partial_groups = state.lost_partial_groups;
  c.bad_pages = state.bad_pages;
  c.bad_slots = state.bad_slots;
  c.bad_lengths = state.bad_lengths;
  return c;
}

std::int64_t Plan::device_bytes() const {
  std::int64_t bytes = requests_.bytes() + units_.bytes() + writes_.bytes() + wants_.bytes() +
                       index_.bytes() + slots_.bytes() + free_slots_.bytes() + state_.bytes() +
                       pages_.bytes();
  for (const auto& prefix : prefix_) bytes += prefix.bytes();
  return bytes;
}

Result<PlanView> Plan::view(int window_left) const {
  for (int i = 0; i < args_.num_work; ++i) {
    if (args_.work[i].window_left != window_left) continue;
    PlanView view = args_.plan;
    view.prefix = args_.work[i].prefix;
    return view;
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("the plan has no work for window_left {}; it was made for {}",
                            window_left, fmt::join(limits_.windows, ", ")));
}

}  // namespace cuda

Result<std::unique_ptr<CudaPlan>> CudaPlan::make(const CudaPlanLimits& limits) {
  Status status = cuda::check_limits(limits);
  if (!status.ok()) return status;
  auto plan = std::make_unique<cuda::Plan>(limits);
  status = plan->allocate();
  if (!status.ok()) return status;
  return std::unique_ptr<CudaPlan>(std::move(plan));
}

}  // namespace bitdecoding
