// SPDX-License-Identifier: Apache-2.0
// The slots of the BF16 pool: which (page, group) each holds, in order of use. Two orders are kept,
// because sinks are dropped after everything else.
#pragma once

#include <cstdint>
#include <vector>

namespace bitdecoding {

// Why an entry may not be dropped in this step; a higher one wins.
enum class Pin : std::uint8_t { kNone = 0, kTail = 1, kSink = 2, kPartial = 3 };

struct ShadowEntry {
  std::int64_t key = -1;  // page * groups_per_page + group
  std::int32_t newer = -1, older = -1;
  std::int32_t valid_begin = 0, valid_end = 0;  // rows of the group that are in the slot
  std::int64_t distance = 0;  // of a pinned tail: tokens from the group's start to the end
  std::uint64_t pin_step = 0;
  Pin pin = Pin::kNone;  // of pin_step
  bool sink = false;
};

class ShadowSlots {
 public:
  ShadowSlots(std::int64_t num_keys, std::int32_t num_slots);

  std::int32_t find(std::int64_t key) const { return index_[static_cast<std::size_t>(key)]; }
  ShadowEntry& entry(std::int32_t slot) { return entries_[static_cast<std::size_t>(slot)]; }
  std::int32_t used() const { return used_; }

  // Moves an entry to the newest end.
  void touch(std::int32_t slot);
  // touch, and keeps it from being dropped in `step`.
  void pin(std::int32_t slot, std::uint64_t step, Pin why, std::int64_t distance);
  void set_sink(std::int32_t slot, bool sink);
  void erase(std::int32_t slot);
  // A slot for `key`, or -1. Takes a free slot, else the oldest entry that is not pinned (sinks
  // last), else, for a sink or a partial group, the pinned tail group farthest from its sequence's
  // end. `evicted` is incremented when a live entry was dropped.
  std::int32_t insert(std::int64_t key, std::uint64_t step, Pin why, std::uint64_t* evicted);

 private:
  struct Order {
    std::int32_t newest = -1, oldest = -1;
  };

  Order& order_of(const ShadowEntry& e) { return orders_[e.sink ? 1 : 0]; }
  void link(std::int32_t slot);
  void unlink(std::int32_t slot);
  std::int32_t victim(std::uint64_t step, Pin why) const;

  std::vector<std::int32_t> index_;  // key -> slot or -1
  std::vector<ShadowEntry> entries_;
  std::vector<std::int32_t> free_;
  Order orders_[2];  // others, sinks
  std::int32_t used_ = 0;
};

}  // namespace bitdecoding
