// SPDX-License-Identifier: Apache-2.0
#include "cuda_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

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

// Entries of a plan's arrays.
struct Sizes {
  std::int64_t requests, units, writes, keys, slots, prefix;
};

Sizes sizes_of(const CudaPlanLimits& l) {
  const std::int64_t requests = l.max_requests;
  return {requests,
          requests * max_units(l.rule),
          l.max_step_tokens,  // every written token may begin a group of its own
          l.num_pages * l.geometry.groups_per_page,
          std::max(l.num_slots, 1),
          requests + 2};
}

}  // namespace

Status Plan::allocate() {
  const Sizes n = sizes_of(limits_);
  const int unit_stride = max_units(limits_.rule);
  Status status = requests_.allocate(n.requests, "allocating the plan's requests");
  const auto also = [&](Status next) {
    if (status.ok()) status = std::move(next);
  };
  also(units_.allocate(n.units, "allocating the plan's shadow units"));
  also(writes_.allocate(n.writes, "allocating the plan's writes"));
  also(wants_.allocate(n.writes, "allocating the plan's writes"));
  also(index_.allocate(n.keys, "allocating the shadow directory"));
  also(slots_.allocate(n.slots, "allocating the shadow directory"));
  also(free_slots_.allocate(n.slots, "allocating the shadow directory"));
  also(state_.allocate(1, "allocating the shadow directory"));
  for (std::size_t i = 0; i < limits_.windows.size(); ++i) {
    also(prefix_[i].allocate(n.prefix, "allocating the plan's work list"));
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

Result<std::int64_t> CudaPlan::bytes_for(const CudaPlanLimits& limits) {
  Status status = cuda::check_limits(limits);
  if (!status.ok()) return status;
  const auto of = []<class T>(std::int64_t count, const T*) {
    return count * static_cast<std::int64_t>(sizeof(T));
  };
  const cuda::Sizes n = cuda::sizes_of(limits);
  constexpr std::int32_t* kIndex = nullptr;
  const auto windows = static_cast<std::int64_t>(limits.windows.size());
  return of(n.requests, static_cast<cuda::Request*>(nullptr)) +
         of(n.units, static_cast<cuda::ShadowUnit*>(nullptr)) +
         of(n.writes, static_cast<cuda::Write*>(nullptr)) +
         of(n.writes, static_cast<cuda::Want*>(nullptr)) + of(n.keys, kIndex) +
         of(n.slots, static_cast<cuda::SlotEntry*>(nullptr)) + of(n.slots, kIndex) +
         of(1, static_cast<cuda::DirectoryState*>(nullptr)) + of(windows * n.prefix, kIndex);
}

Result<std::unique_ptr<CudaPlan>> CudaPlan::make(const CudaPlanLimits& limits) {
  Status status = cuda::check_limits(limits);
  if (!status.ok()) return status;
  auto plan = std::make_unique<cuda::Plan>(limits);
  status = plan->allocate();
  if (!status.ok()) return status;
  return std::unique_ptr<CudaPlan>(std::move(plan));
}

}  // namespace bitdecoding
