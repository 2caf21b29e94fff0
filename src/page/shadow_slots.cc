// SPDX-License-Identifier: Apache-2.0
#include "page/shadow_slots.h"

namespace bitdecoding {

ShadowSlots::ShadowSlots(std::int64_t num_keys, std::int32_t num_slots)
    : index_(static_cast<std::size_t>(num_keys), -1),
      entries_(static_cast<std::size_t>(num_slots)) {
  free_.reserve(static_cast<std::size_t>(num_slots));
  for (std::int32_t slot = num_slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

void ShadowSlots::link(std::int32_t slot) {
  ShadowEntry& e = entry(slot);
  Order& order = order_of(e);
  e.newer = -1;
  e.older = order.newest;
  if (order.newest >= 0) entry(order.newest).newer = slot;
  order.newest = slot;
  if (order.oldest < 0) order.oldest = slot;
}

void ShadowSlots::unlink(std::int32_t slot) {
  ShadowEntry& e = entry(slot);
  Order& order = order_of(e);
  if (e.newer >= 0) {
    entry(e.newer).older = e.older;
  } else {
    order.newest = e.older;
  }
  if (e.older >= 0) {
    entry(e.older).newer = e.newer;
  } else {
    order.oldest = e.newer;
  }
}

void ShadowSlots::touch(std::int32_t slot) {
  unlink(slot);
  link(slot);
}

void ShadowSlots::pin(std::int32_t slot, std::uint64_t step, Pin why, std::int64_t distance) {
  touch(slot);
  ShadowEntry& e = entry(slot);
  if (e.pin_step != step || e.pin < why) e.pin = why;
  e.pin_step = step;
  e.distance = distance;
}

void ShadowSlots::set_sink(std::int32_t slot, bool sink) {
  if (entry(slot).sink == sink) return;
  unlink(slot);
  entry(slot).sink = sink;
  link(slot);
}

void ShadowSlots::erase(std::int32_t slot) {
  unlink(slot);
  index_[static_cast<std::size_t>(entry(slot).key)] = -1;
  entry(slot) = ShadowEntry();
  free_.push_back(slot);
  --used_;
}

std::int32_t ShadowSlots::victim(std::uint64_t step, Pin why) const {
  // Pinned entries were touched in this step, so an order's oldest is pinned only if all are.
  for (const Order& order : orders_) {
    if (order.oldest >= 0 && entries_[static_cast<std::size_t>(order.oldest)].pin_step != step) {
      return order.oldest;
    }
  }
  if (why != Pin::kSink && why != Pin::kPartial) return -1;
  std::int32_t best = -1;
  std::int64_t farthest = -1;
  for (std::size_t slot = 0; slot < entries_.size(); ++slot) {
    const ShadowEntry& e = entries_[slot];
    if (e.key < 0 || e.pin_step != step || e.pin != Pin::kTail || e.distance <= farthest) continue;
    farthest = e.distance;
    best = static_cast<std::int32_t>(slot);
  }
  return best;
}

std::int32_t ShadowSlots::insert(std::int64_t key, std::uint64_t step, Pin why,
                                 std::uint64_t* evicted) {
  if (free_.empty()) {
    const std::int32_t drop = victim(step, why);
    if (drop < 0) return -1;
    erase(drop);
    ++*evicted;
  }
  const std::int32_t slot = free_.back();
  free_.pop_back();
  entry(slot) = ShadowEntry();
  entry(slot).key = key;
  index_[static_cast<std::size_t>(key)] = slot;
  link(slot);
  ++used_;
  return slot;
}

}  // namespace bitdecoding
