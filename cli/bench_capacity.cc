// SPDX-License-Identifier: Apache-2.0
// How many tokens a cache holds in each mode, with the BF16 slots counted.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "bench_measure.h"
#include "bench_verbs.h"
#include "bitdecoding/backend.h"
#include "bitdecoding/page.h"
#include "bitdecoding/recipe.h"

namespace bitdecoding::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Capacity {
  std::int64_t tokens = 0;
  std::int64_t slots = 0;
  std::int64_t pool_bytes = 0;
};

// Slots for `pages` pages: the floor, above it the recipe's share of the pages' bytes, and never
// more than there are groups.
std::int64_t slots_of(std::int64_t pages, std::int64_t page_bytes, std::int64_t slot_bytes,
                      std::int64_t floor, double share, int groups_per_page) {
  const auto affordable = static_cast<std::int64_t>(
      share * static_cast<double>(pages * page_bytes) / static_cast<double>(slot_bytes));
  return std::min(std::max(floor, affordable), pages * groups_per_page);
}

// The largest number of pages whose bytes, with their slots' bytes, fit into `bytes` of one layer.
Capacity fit(const BenchOptions& o, const Recipe& recipe, const PageGeometry& geometry,
             double bytes) {
  ShadowRule rule;
  rule.sink_tokens = recipe.sink_tokens;
  rule.tail_tokens = recipe.tail_tokens;
  rule.group_tokens = geometry.group_tokens;
  rule.reproducible = recipe.reproducible;
  rule.page_size = geometry.page_size;
  // A baseline's cache is the engine's own and has no BF16 rows beside it.
  const bool has_pool = is_tiled(geometry.format);
  const std::int64_t page_bytes = geometry.head_bytes * o.kv_heads;
  const std::int64_t slot_bytes =
      shadow_slot_bytes(o.kv_heads, geometry.group_tokens, geometry.head_dim);
  const std::int64_t floor = min_shadow_slots(rule, o.max_requests);
  const auto used = [&](std::int64_t pages) {
    const std::int64_t slots = has_pool
                                   ? slots_of(pages, page_bytes, slot_bytes, floor,
                                              recipe.shadow_pool_share, geometry.groups_per_page)
                                   : 0;
    return std::pair<std::int64_t, std::int64_t>(pages * page_bytes + slots * slot_bytes, slots);
  };
  std::int64_t low = 0;
  auto high = static_cast<std::int64_t>(bytes / static_cast<double>(page_bytes)) + 1;
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (static_cast<double>(used(middle).first) <= bytes ? low : high) = middle;
  }
  const std::int64_t slots = used(low).second;
  return {low * geometry.page_size, slots, slots * slot_bytes};
}

}  // namespace

Result<Json> bench_capacity(const BenchOptions& o) {
  if (!(o.gib > 0) || o.layers < 1 || o.kv_heads < 1 || o.max_requests < 1) {
    return Status(StatusCode::kInvalidArgument,
                  "--gib, --layers, --kv-heads and --max-requests must be above 0");
  }
  Json row;
  row["bench"] = "capacity";
  row["gib"] = o.gib;
  row["layers"] = o.layers;
  row["kv_heads"] = o.kv_heads;
  row["head_dim"] = o.head_dim;
  row["page_size"] = o.page_size;
  row["max_requests"] = o.max_requests;
  const double layer_bytes = o.gib * 1024 * 1024 * 1024 / o.layers;
  double bf16_tokens = 0;
  for (const std::string& mode : mode_names()) {
    Result<Recipe> recipe = mode_recipe(mode);
    if (recipe.status().code() == StatusCode::kUnsupported) continue;  // vLLM's own, on CUDA
    if (!recipe.ok()) return recipe.status();
    Result<PageGeometry> geometry =
        PageGeometry::make(recipe.value().format, FragmentOrder::kQuad, o.head_dim, o.page_size);
    if (!geometry.ok()) return geometry.status();
    const Capacity capacity = fit(o, recipe.value(), geometry.value(), layer_bytes);
    const auto tokens = static_cast<double>(capacity.tokens);
    if (mode == "bf16") bf16_tokens = tokens;
    Json entry;
    entry["tokens"] = capacity.tokens;
    entry["tokens_per_gib"] = std::floor(tokens / o.gib);
    entry["bf16_slots"] = capacity.slots;
    entry["bf16_pool_mib"] =
        round_to(static_cast<double>(capacity.pool_bytes * o.layers) / (1 << 20), 2);
    entry["times_bf16"] = bf16_tokens > 0 ? round_to(tokens / bf16_tokens, 4) : 0.0;
    row[mode] = entry;
  }
  add_machine(&row);
  return row;
}

}  // namespace bitdecoding::cli
