// SPDX-License-Identifier: Apache-2.0
// Steps: the shadow directory of a group of layers and the plan of its current step.
#include <algorithm>
#include <limits>

#include "capi/cuda.h"
#include "capi/probe.h"

namespace bitdecoding::capi {
namespace {

void add(StepCounters* total, const StepCounters& c) {
  total->evicted_slots += c.evicted_slots;
  total->refused_groups += c.refused_groups;
  total->missing_tokens += c.missing_tokens;
  total->lost_partial_groups += c.lost_partial_groups;
}

Status create(const std::shared_ptr<RuntimeState>& runtime, const bd_steps_options& o,
              bd_steps** out) {
  if (Status s = refuse_device(*runtime, "bd_steps_create", "call bd_cuda_steps_create"); !s.ok()) {
    return s;
  }
  if (Status s = check_steps_options(o); !s.ok()) return s;
  Result<PageGeometry> geometry = PageGeometry::make(
      runtime->recipe.format, runtime->backend->fragment_order(), o.head_dim, o.page_size);
  if (!geometry.ok()) return geometry.status();
  auto steps = std::make_unique<bd_steps>();
  steps->rule = runtime->shadow_rule(geometry.value());
  ShadowDirectory::Limits limits;
  limits.num_pages = o.num_pages;
  limits.num_slots = o.num_slots;
  limits.max_requests = o.max_requests;
  Result<std::unique_ptr<ShadowDirectory>> directory =
      ShadowDirectory::make(geometry.value(), steps->rule, limits);
  if (!directory.ok()) return directory.status();
  steps->directory = directory.take();
  steps->options = o;
  steps->num_pages = o.num_pages;
  steps->num_slots = o.num_slots;
  steps->runtime = runtime;
  const std::lock_guard<std::mutex> lock(runtime->mutex);
  runtime->live_steps.insert(steps.get());
  *out = steps.release();
  return {};
}

// Rows that calibration does not observe are padding to it.
void leave_out_sinks(const StepPlan& plan, std::vector<std::int64_t>* slots) {
  for (const RequestPlan& request : plan.requests) {
    const std::int64_t first = request.seq_len - request.query_len;  // position of its first row
    const std::int64_t count =
        std::clamp<std::int64_t>(plan.rule.sink_tokens - first, 0, request.query_len);
    std::fill_n(slots->begin() + request.query_begin, count, -1);
  }
}

Status build(bd_steps* steps, const bd_step_input& in) {
  if (steps->device != nullptr) {
    return refuse_device(*steps->runtime, "bd_steps_build", "call bd_cuda_steps_build");
  }
  if (Status s = check_step_input(in); !s.ok()) return s;
  const StepInput input = step_input(in, steps->num_pages);
  steps->built = false;  // a failed build leaves no half-filled plan behind
  if (Status s = steps->directory->build(input, &steps->plan); !s.ok()) return s;
  if (!steps->runtime->recipe.calibrate_file.empty()) {
    steps->slots.assign(in.slot_mapping, in.slot_mapping + in.num_tokens);
    leave_out_sinks(steps->plan, &steps->slots);
  }
  if (steps->runtime->probe != nullptr) {
    if (Status s = steps->runtime->probe->build(steps, steps->options, in); !s.ok()) return s;
  }
  steps->built = true;
  const std::lock_guard<std::mutex> lock(steps->runtime->mutex);
  steps->snapshot = {steps->directory->totals(), steps->directory->used_slots()};
  ++steps->runtime->builds;
  return {};
}

Status forget(bd_steps* steps, std::int64_t page) {
  if (steps->device != nullptr) {
    return refuse_device(*steps->runtime, "bd_steps_forget", "call bd_cuda_steps_forget");
  }
  if (page < 0 || page >= steps->num_pages) {
    return {StatusCode::kOutOfRange, fmt::format("page is {}; expected 0 to {}, the pages that the "
                                                 "steps were made for",
                                                 page, steps->num_pages - 1)};
  }
  steps->built = false;  // a plan may name the page's slots
  steps->directory->forget(page);
  const std::lock_guard<std::mutex> lock(steps->runtime->mutex);
  steps->snapshot.used_slots = steps->directory->used_slots();
  return {};
}

std::uint64_t relaxed(const std::uint64_t& counter) {
  return __atomic_load_n(&counter, __ATOMIC_RELAXED);
}

Status counters(RuntimeState* runtime, bd_counters* out) {
  const WriteCounters& write = runtime->write_counters;
  out->non_finite = relaxed(write.non_finite);
  out->saturated_blocks = relaxed(write.saturated_blocks);
  out->flushed_blocks = relaxed(write.flushed_blocks);
  out->requantized_prefix = relaxed(write.requantized_prefix);
  out->corrupt_scales = relaxed(runtime->corrupt_scales);
  const std::lock_guard<std::mutex> lock(runtime->mutex);
  StepCounters total = runtime->ended_steps;
  out->used_slots = 0;
  for (const bd_steps* steps : runtime->live_steps) {
    add(&total, steps->snapshot.counters);
    out->used_slots += static_cast<std::uint64_t>(steps->snapshot.used_slots);
  }
  out->steps = runtime->builds;
  out->evicted_slots = total.evicted_slots;
  out->refused_groups = total.refused_groups;
  out->missing_tokens = total.missing_tokens;
  out->lost_partial_groups = total.lost_partial_groups;
  return add_device_counters(*runtime, out);
}

}  // namespace

Status check_step_input(const bd_step_input& in) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (Status s = check_range("num_requests", in.num_requests, 0, kMost); !s.ok()) return s;
  if (Status s = check_range("num_tokens", in.num_tokens, 0, kMost); !s.ok()) return s;
  if (in.num_requests > 0) {
    if (Status s = check_range("block_table_stride", in.block_table_stride, 1, kMost); !s.ok()) {
      return s;
    }
    if (in.block_table == nullptr)
      return invalid("block_table is null, for {} requests", in.num_requests);
    if (in.query_start == nullptr)
      return invalid("query_start is null, for {} requests", in.num_requests);
    if (in.seq_lens == nullptr)
      return invalid("seq_lens is null, for {} requests", in.num_requests);
  }
  if (in.num_tokens > 0 && in.slot_mapping == nullptr) {
    return invalid("slot_mapping is null, for {} tokens", in.num_tokens);
  }
  return {};
}

StepInput step_input(const bd_step_input& in, std::int64_t num_pages) {
  StepInput input;
  input.num_requests = in.num_requests;
  input.block_table = in.block_table;
  input.block_table_stride = in.block_table_stride;
  input.query_start = in.query_start;
  input.seq_lens = in.seq_lens;
  input.slot_mapping = in.slot_mapping;
  input.num_tokens = in.num_tokens;
  input.num_pages = num_pages;
  return input;
}

Status check_steps_options(const bd_steps_options& o) {
  constexpr std::int64_t kMaxPages = std::numeric_limits<std::int32_t>::max();
  if (Status s = check_range("num_pages", o.num_pages, 1, kMaxPages); !s.ok()) return s;
  if (Status s = check_range("num_slots", o.num_slots, 0, kMaxPages); !s.ok()) return s;
  return check_range("max_requests", o.max_requests, 1, 1 << 20);
}
}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_steps_create(bd_runtime* runtime, const bd_steps_options* options, bd_steps** steps) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(options, "bd_steps_options"); !s.ok()) return s;
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (steps == nullptr) return capi::invalid("the pointer to the new steps is null");
    *steps = nullptr;
    return capi::create(runtime->state, *options, steps);
  });
}

void bd_steps_destroy(bd_steps* steps) {
  if (steps == nullptr) return;
  if (steps->runtime->probe != nullptr) steps->runtime->probe->forget(steps);
  {
    const std::lock_guard<std::mutex> lock(steps->runtime->mutex);
    steps->runtime->live_steps.erase(steps);
    capi::add(&steps->runtime->ended_steps, steps->snapshot.counters);
  }
  delete steps;
}

bd_status bd_steps_build(bd_steps* steps, const bd_step_input* input) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(input, "bd_step_input"); !s.ok()) return s;
    if (steps == nullptr) return capi::invalid("the steps are null");
    return capi::build(steps, *input);
  });
}

bd_status bd_steps_forget(bd_steps* steps, int64_t page) {
  return capi::guarded([&]() -> Status {
    if (steps == nullptr) return capi::invalid("the steps are null");
    return capi::forget(steps, page);
  });
}

bd_status bd_counters_get(const bd_runtime* runtime, bd_counters* counters) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(counters, "bd_counters"); !s.ok()) return s;
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    return capi::counters(runtime->state.get(), counters);
  });
}
