// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/write.h"

#include <atomic>

#include "backend/tensor.h"

namespace bitdecoding::cpu {
namespace {

// Below this many values a wake-up of the threads costs more than it saves.
constexpr std::int64_t kSerialValues = 16384;

void add_relaxed(std::uint64_t& counter, std::uint64_t n) {
  if (n != 0) std::atomic_ref<std::uint64_t>(counter).fetch_add(n, std::memory_order_relaxed);
}

void add_relaxed(WriteCounters* total, const WriteCounters& part) {
  if (total == nullptr) return;
  add_relaxed(total->non_finite, part.non_finite);
  add_relaxed(total->saturated_blocks, part.saturated_blocks);
  add_relaxed(total->flushed_blocks, part.flushed_blocks);
  add_relaxed(total->requantized_prefix, part.requantized_prefix);
}

void write_item(const WriteParams& params, const WriteKernels& kernels, std::int64_t item,
                WriteCounters* tally) {
  const LayerConfig& layer = *params.layer;
  const std::int64_t heads = layer.num_kv_heads;
  const GroupWrite& write = params.plan->writes[static_cast<std::size_t>(item / heads)];
  const auto head = static_cast<int>(item % heads);
  kernels.group(params, write, head, page_head(params.cache, write.page, head), tally);
  const bool requantized =
      is_tiled(layer.geometry.format) && write.first_row > 0 && !write.prefix_in_slot;
  if (head == 0 && requantized) ++tally->requantized_prefix;
}

}  // namespace

Status cpu_write(const WriteParams& params, const WriteKernels& kernels,
                 const ParallelFor& parallel) {
  const LayerConfig& layer = *params.layer;
  const PageGeometry& geometry = layer.geometry;
  if (geometry.order != FragmentOrder::kQuad) {
    return {StatusCode::kUnsupported,
            "the cpu backend writes pages in quad order only; make the geometry with "
            "FragmentOrder::kQuad, or convert pages with convert_fragment_order"};
  }
  const std::int64_t items =
      static_cast<std::int64_t>(params.plan->writes.size()) * layer.num_kv_heads;
  const std::int64_t values = items * geometry.group_tokens * geometry.head_dim;
  if (!parallel || items == 1 || values <= kSerialValues) {
    WriteCounters tally;
    for (std::int64_t item = 0; item < items; ++item) write_item(params, kernels, item, &tally);
    add_relaxed(params.counters, tally);
    return {};
  }
  parallel(items, [&params, &kernels](std::int64_t item, int) {
    WriteCounters tally;
    write_item(params, kernels, item, &tally);
    add_relaxed(params.counters, tally);
  });
  return {};
}

}  // namespace bitdecoding::cpu
