// SPDX-License-Identifier: Apache-2.0
// The shadow directory in device memory: which (page, group) has BF16 rows in which slot.
// page/shadow_directory.cc states the rules; this is the same in a shape that a block of threads
// can update at once. Recency is a stamp instead of a list, so entries last used in the same step
// are equally old.
#pragma once

#include <cstdint>

#include "common/plan.h"

namespace bitdecoding::cuda {

struct SlotEntry {
  std::int32_t key = -1;                        // page * groups_per_page + group; -1 = free
  std::int16_t valid_begin = 0, valid_end = 0;  // rows of the group that are in the slot
  std::uint32_t stamp = 0;                      // 2 * step (soft touch) or 2 * step + 1
  std::int32_t sink = 0;
  // step << 32 | pin << 30 | (kFarthest - distance): the largest wins.
  unsigned long long pin = 0;
};

inline constexpr std::uint32_t kFarthest = (1U << 30) - 1;

struct DirectoryState {
  std::uint32_t step = 0;
  std::int32_t free_count = 0;
  std::int32_t num_writes = 0;
  std::int32_t reserved = 0;
  unsigned long long evicted_slots = 0;
  unsigned long long refused_groups = 0;
  unsigned long long missing_tokens = 0;
  unsigned long long lost_partial_groups = 0;
  unsigned long long bad_pages = 0;
  unsigned long long bad_slots = 0;
  unsigned long long bad_lengths = 0;
};

struct Want {
  std::int32_t write = 0;
  std::int32_t key = 0;
  std::int32_t distance = 0;
  std::int16_t pin = 0;  // Pin; 0 = no shadow wanted
  std::int8_t asked = 0, sink = 0;
  std::int8_t takes = 0;  // a slot in this step
};

struct BuildArgs {
  PlanView plan;  // rule, sizes
  std::int32_t groups_per_page = 0;
  std::int32_t num_slots = 0;
  std::int32_t num_q_per_kv = 1, num_kv_heads = 1;
  // The engine's arrays.
  const std::int32_t* query_start = nullptr;
  const std::int32_t* seq_lens = nullptr;
  const std::int64_t* slot_mapping = nullptr;
  std::int32_t num_tokens = 0;
  // The directory.
  std::int32_t* index = nullptr;  // [num_pages * groups_per_page]: slot or -1
  SlotEntry* slots = nullptr;
  std::int32_t* free_slots = nullptr;
  DirectoryState* state = nullptr;
  // What is filled.
  Request* requests = nullptr;
  ShadowUnit* units = nullptr;
  Write* writes = nullptr;
  Want* wants = nullptr;
  Work work[CudaPlanLimits::kMaxWindows];
  std::int32_t num_work = 0;
};

void launch_build(const BuildArgs& args, void* stream);
void launch_forget(const BuildArgs& args, std::int64_t page, void* stream);
void launch_reset(const BuildArgs& args, void* stream);

}  // namespace bitdecoding::cuda
