// SPDX-License-Identifier: Apache-2.0
#include "page/step_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace bitdecoding {
namespace {

Status check_input(const StepBounds& bounds, const StepInput& in) {
  if (in.num_requests < 0 || in.num_requests > bounds.max_requests) {
    return {StatusCode::kOutOfRange,
            fmt::format("the step has {} requests, but the directory was made for at most {}",
                        in.num_requests, bounds.max_requests)};
  }
  if (in.num_tokens < 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the step has {} tokens; expected 0 or more", in.num_tokens)};
  }
  if (in.num_pages < 0 || in.num_pages > bounds.num_pages) {
    return {StatusCode::kOutOfRange,
            fmt::format("the step's pool has {} pages, but the directory was made for {}",
                        in.num_pages, bounds.num_pages)};
  }
  if (in.num_requests > 0 && (in.query_start == nullptr || in.seq_lens == nullptr)) {
    return {StatusCode::kInvalidArgument,
            "query_start and seq_lens must not be null when the step has requests"};
  }
  if (in.num_tokens > 0 && in.slot_mapping == nullptr) {
    return {StatusCode::kInvalidArgument,
            "slot_mapping must not be null when the step has tokens; -1 skips a row"};
  }
  return {};
}

Status check_lengths(const StepBounds& bounds, const StepInput& in, int r) {
  const std::int64_t begin = in.query_start[r];
  const std::int64_t end = in.query_start[r + 1];
  if (begin < 0 || end < begin || end > in.num_tokens) {
    return {StatusCode::kOutOfRange,
            fmt::format("request {}: its query rows are [{}, {}), but the step has {} tokens and "
                        "query_start must not decrease",
                        r, begin, end, in.num_tokens)};
  }
  const std::int64_t seq_len = in.seq_lens[r];
  if (seq_len < 0) {
    return {StatusCode::kOutOfRange,
            fmt::format("request {}: its length is {}; expected 0 or more", r, seq_len)};
  }
  const std::int64_t pages = (seq_len + bounds.page_size - 1) / bounds.page_size;
  if (pages > in.block_table_stride) {
    return {StatusCode::kOutOfRange,
            fmt::format("request {}: {} tokens need {} pages, but a row of the block table has {} "
                        "entries",
                        r, seq_len, pages, in.block_table_stride)};
  }
  if (pages > 0 && in.block_table == nullptr) {
    return {StatusCode::kInvalidArgument,
            fmt::format("request {} has {} tokens, but block_table is null", r, seq_len)};
  }
  return {};
}

// Copies the entries that the length needs. Entries past it are never read; negative ones mean a
// page the engine has dropped (sliding window) and are kept as -1.
Status copy_pages(const StepBounds& bounds, const StepInput& in, int r, StepPlan* plan) {
  const std::int64_t pages =
      (in.seq_lens[r] + std::int64_t{bounds.page_size} - 1) / bounds.page_size;
  const std::int32_t* row =
      pages == 0 ? nullptr : in.block_table + std::int64_t{r} * in.block_table_stride;
  for (std::int64_t i = 0; i < pages; ++i) {
    if (row[i] >= in.num_pages) {
      return {StatusCode::kOutOfRange,
              fmt::format("request {}: entry {} of the block table is page {}, but the pool has {} "
                          "pages",
                          r, i, row[i], in.num_pages)};
    }
    plan->page_ids.push_back(row[i] < 0 ? -1 : row[i]);
  }
  return {};
}

Status check_slot(const StepBounds& bounds, const StepInput& in, int r, std::int64_t token,
                  std::int64_t position, const std::int32_t* pages) {
  const std::int64_t slot = in.slot_mapping[token];
  if (slot >= in.num_pages * bounds.page_size) {
    return {StatusCode::kOutOfRange,
            fmt::format("request {}: slot_mapping[{}] is {}, but the pool has {} slots", r, token,
                        slot, in.num_pages * bounds.page_size)};
  }
  if (position < 0) {
    return {
        StatusCode::kInvalidArgument,
        fmt::format("request {}: slot_mapping[{}] is {}, but the row lies before the sequence's "
                    "first token (it has more query rows than tokens); expected -1",
                    r, token, slot)};
  }
  const std::int64_t page = pages[position / bounds.page_size];
  const std::int64_t expected = page * bounds.page_size + position % bounds.page_size;
  if (page < 0 || slot != expected) {
    return {
        StatusCode::kInvalidArgument,
        fmt::format("request {}: slot_mapping[{}] is {}, but position {} lies in page {} of the "
                    "block table; expected {} or -1 (skip)",
                    r, token, slot, position, page, page < 0 ? -1 : expected)};
  }
  return {};
}

Status collect_writes(const StepBounds& bounds, const StepInput& in, int r,
                      const std::int32_t* pages, StepPlan* plan,
                      std::vector<std::int32_t>* write_request) {
  const std::int64_t begin = in.query_start[r];
  const std::int64_t end = in.query_start[r + 1];
  GroupWrite* open = nullptr;
  for (std::int64_t token = begin; token < end; ++token) {
    if (in.slot_mapping[token] < 0) {
      open = nullptr;
      continue;
    }
    const std::int64_t position = in.seq_lens[r] - (end - token);
    Status status = check_slot(bounds, in, r, token, position, pages);
    if (!status.ok()) return status;
    const auto in_page = static_cast<int>(position % bounds.page_size);
    if (open != nullptr && in_page % bounds.group_tokens != 0) {
      ++open->num_rows;
      continue;
    }
    GroupWrite write;
    write.page = pages[position / bounds.page_size];
    write.group = in_page / bounds.group_tokens;
    write.first_row = in_page % bounds.group_tokens;
    write.num_rows = 1;
    write.source = token;
    plan->writes.push_back(write);
    write_request->push_back(r);
    open = &plan->writes.back();
  }
  return {};
}

// Rows outside every request belong to nobody: an engine pads with -1 there.
Status check_padding(const StepInput& in) {
  const std::int64_t first = in.num_requests > 0 ? in.query_start[0] : in.num_tokens;
  const std::int64_t last = in.num_requests > 0 ? in.query_start[in.num_requests] : 0;
  for (std::int64_t token = 0; token < in.num_tokens; ++token) {
    if (token >= first && token < last) continue;
    if (in.slot_mapping[token] < 0) continue;
    return {StatusCode::kInvalidArgument,
            fmt::format("slot_mapping[{}] is {}, but the row belongs to no request; padding rows "
                        "must have -1",
                        token, in.slot_mapping[token])};
  }
  return {};
}

// One group is one write a step: backends quantize groups side by side.
Status check_unique(const StepPlan& plan, const std::vector<std::int32_t>& write_request) {
  std::vector<std::pair<std::pair<std::int64_t, std::int32_t>, std::size_t>> keys;
  keys.reserve(plan.writes.size());
  for (std::size_t i = 0; i < plan.writes.size(); ++i) {
    keys.push_back({{plan.writes[i].page, plan.writes[i].group}, i});
  }
  std::sort(keys.begin(), keys.end());
  for (std::size_t i = 1; i < keys.size(); ++i) {
    if (keys[i].first != keys[i - 1].first) continue;
    const int a = write_request[keys[i - 1].second];
    const int b = write_request[keys[i].second];
    return {
        StatusCode::kInvalidArgument,
        fmt::format("group {} of page {} is written twice in one step (requests {} and {}): two "
                    "requests share a page that is not complete, or skipped rows (-1) lie "
                    "between written rows of one group",
                    keys[i].first.second, keys[i].first.first, a, b)};
  }
  return {};
}

}  // namespace

Status lay_out_step(const StepBounds& bounds, const StepInput& input, StepPlan* plan,
                    std::vector<std::int32_t>* write_request) {
  Status status = check_input(bounds, input);
  if (!status.ok()) return status;
  plan->num_tokens = input.num_tokens;
  for (int r = 0; r < input.num_requests; ++r) {
    status = check_lengths(bounds, input, r);
    if (!status.ok()) return status;
    RequestPlan request;
    request.seq_len = input.seq_lens[r];
    request.query_begin = input.query_start[r];
    request.query_len = std::int64_t{input.query_start[r + 1]} - input.query_start[r];
    request.num_pages = (request.seq_len + bounds.page_size - 1) / bounds.page_size;
    status = copy_pages(bounds, input, r, plan);
    if (!status.ok()) return status;
    const std::int32_t* pages =
        plan->page_ids.data() + plan->page_ids.size() - static_cast<std::size_t>(request.num_pages);
    status = collect_writes(bounds, input, r, pages, plan, write_request);
    if (!status.ok()) return status;
    plan->requests.push_back(request);
  }
  const std::int32_t* pages = plan->page_ids.data();
  for (RequestPlan& request : plan->requests) {
    request.pages = pages;
    pages += request.num_pages;
  }
  status = check_padding(input);
  if (status.ok()) status = check_unique(*plan, *write_request);
  return status;
}

}  // namespace bitdecoding
