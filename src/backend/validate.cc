// SPDX-License-Identifier: Apache-2.0
#include "backend/validate.h"

#include <fmt/format.h>

#include <cmath>
#include <vector>

#include "attend/visibility.h"
#include "scale/rules.h"

namespace bitdecoding {
namespace {

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

Status check_geometry(const PageGeometry& g) {
  const auto made = PageGeometry::make(g.format, g.order, g.head_dim, g.page_size);
  if (!made.ok()) return made.status();
  if (made.value().head_bytes != g.head_bytes || made.value().tile_bytes != g.tile_bytes ||
      made.value().group_tokens != g.group_tokens) {
    return invalid("the layer's page geometry was not made by PageGeometry::make; make it there");
  }
  return {};
}

Status check_outer(const char* side, const std::int8_t* exponents, int heads) {
  if (exponents == nullptr) return {};
  for (int h = 0; h < heads; ++h) {
    if (exponents[h] >= -kMaxOuterExponent && exponents[h] <= kMaxOuterExponent) continue;
    return invalid(
        fmt::format("the {} outer scale of KV head {} is 2^{}; expected exponents from "
                    "-{} to {}",
                    side, h, exponents[h], kMaxOuterExponent, kMaxOuterExponent));
  }
  return {};
}

Status check_layer(const LayerConfig* layer) {
  Status status = validate_layer_shape(layer);
  return status.ok() ? validate_outer_scales(*layer) : status;
}

Status check_alignment(const char* what, const void* data, std::size_t bytes) {
  if (reinterpret_cast<std::uintptr_t>(data) % bytes == 0) return {};
  return invalid(fmt::format("{} must be aligned to its element size of {} bytes", what, bytes));
}

Status check_dtype(const char* what, DType dtype) {
  if (dtype == DType::kF32 || dtype == DType::kBf16 || dtype == DType::kF16) return {};
  return invalid(
      fmt::format("{} has dtype number {}; expected 1 (float32), 2 (bfloat16) or 3 "
                  "(float16)",
                  what, static_cast<int>(dtype)));
}

Status check_plan(const StepPlan* plan, const LayerConfig& layer, const CacheView& cache) {
  if (plan == nullptr) return invalid("the step's plan must not be null");
  const PageGeometry& g = layer.geometry;
  if (plan->rule.page_size != g.page_size || plan->rule.group_tokens != g.group_tokens) {
    return invalid(
        fmt::format("the plan is for pages of {} and groups of {} tokens, but the layer "
                    "has {} and {}; layers of different geometry need their own plan",
                    plan->rule.page_size, plan->rule.group_tokens, g.page_size, g.group_tokens));
  }
  for (const std::int32_t page : plan->page_ids) {
    if (page < cache.num_pages) continue;
    return {
        StatusCode::kOutOfRange,
        fmt::format("the plan names page {}, but the cache has {} pages", page, cache.num_pages)};
  }
  return {};
}

Status check_shadow(const ShadowPool& pool, std::int32_t highest_slot) {
  if (highest_slot < 0) return {};
  if (pool.rows == nullptr || highest_slot >= pool.num_slots) {
    return {StatusCode::kOutOfRange,
            fmt::format("the plan names shadow slot {}, but the pool has {} slots{}", highest_slot,
                        pool.num_slots, pool.rows == nullptr ? " and no memory" : "")};
  }
  return check_alignment("the shadow pool", pool.rows, sizeof(std::uint16_t));
}

Status check_output(const AttendParams& p, std::int64_t tokens) {
  const TensorView view{p.output, p.output_dtype, p.stride_output_token, p.stride_output_head};
  const LayerConfig& layer = *p.layer;
  const int head_dim = layer.geometry.head_dim;
  Status status = validate_tensor("output", view, tokens, layer.num_q_heads, head_dim);
  if (!status.ok()) return status;
  const bool head_inner =
      view.stride_token >= (layer.num_q_heads - 1) * view.stride_head + head_dim;
  const bool token_inner = view.stride_head >= (tokens - 1) * view.stride_token + head_dim;
  if (tokens > 1 && layer.num_q_heads > 1 && !head_inner && !token_inner) {
    return invalid(
        fmt::format("output has strides {} (token) and {} (head) elements, so its rows "
                    "overlap: {} heads of {} elements need more",
                    view.stride_token, view.stride_head, layer.num_q_heads, head_dim));
  }
  return p.lse == nullptr ? Status() : check_alignment("lse", p.lse, sizeof(float));
}

Status check_fp4(const AttendParams& p) {
  if (!is_tiled(p.layer->geometry.format)) {
    return {StatusCode::kUnsupported,
            fmt::format("fp4 arithmetic needs values blocked along tokens (nvfp4, mxfp4), not {} "
                        "pages; use wide or int8",
                        format_name(p.layer->geometry.format))};
  }
  if (p.query_terms != 1 && p.query_terms != 2) {
    return invalid(fmt::format("query_terms is {}; expected 1 or 2", p.query_terms));
  }
  if (!(p.probability_c > 0.0F && p.probability_c <= kE2m1Max * kE4m3Max)) {
    return invalid(fmt::format("probability_c is {}; expected a factor above 0 and at most {}",
                               p.probability_c, kE2m1Max * kE4m3Max));
  }
  if (!(p.probability_tau >= 0.0F && p.probability_tau <= kE4m3Max)) {
    return invalid(
        fmt::format("probability_tau is {}; expected 0 (off) to {}", p.probability_tau, kE4m3Max));
  }
  return {};
}

Status check_sinks(const AttendParams& p) {
  if (p.attn_sink == nullptr) return {};
  for (int h = 0; h < p.layer->num_q_heads; ++h) {
    if (p.attn_sink[h] < std::numeric_limits<float>::infinity()) continue;
    return invalid(fmt::format("attn_sink of query head {} is {}; expected a finite logit", h,
                               p.attn_sink[h]));
  }
  return {};
}

// A dropped page may be listed as -1, but then no query may read it.
Status check_dropped_pages(const AttendParams& p) {
  std::vector<Segment> segments;
  const int page_size = p.layer->geometry.page_size;
  for (std::size_t r = 0; r < p.plan->requests.size(); ++r) {
    const RequestPlan& request = p.plan->requests[r];
    const std::int64_t first = std::max<std::int64_t>(query_position(request, 0), 0);
    bool dropped = false;
    for (std::int64_t i = visible_begin(first, p.window_left) / page_size; i < request.num_pages;
         ++i) {
      dropped = dropped || request.pages[i] < 0;
    }
    for (std::int64_t i = 0; dropped && i < request.query_len; ++i) {
      visible_segments(p.plan->rule, request, query_position(request, i), p.window_left, &segments);
      for (const Segment& s : segments) {
        if (s.source != Source::kPage) continue;
        for (std::int64_t page = s.begin / page_size; page <= (s.end - 1) / page_size; ++page) {
          if (request.pages[page] >= 0) continue;
          return {
              StatusCode::kOutOfRange,
              fmt::format("request {}: query row {} sees position {}, but entry {} of its block "
                          "table is negative (a dropped page); check window_left",
                          r, i, std::max(s.begin, page * page_size), page)};
        }
      }
    }
  }
  return {};
}

}  // namespace

Status validate_layer_shape(const LayerConfig* layer) {
  if (layer == nullptr) return invalid("the layer must not be null");
  const PageGeometry& g = layer->geometry;
  Status status = check_geometry(g);
  if (!status.ok()) return status;
  if (layer->num_kv_heads < 1 || layer->num_kv_heads > 0xFFFF) {
    return invalid(
        fmt::format("the layer has {} KV heads; expected 1 to 65535", layer->num_kv_heads));
  }
  if (!rule_fits(g.format, layer->key_rule) || !rule_fits(g.format, layer->value_rule)) {
    return invalid(
        fmt::format("the layer's scale rules do not fit its format {}: mxfp4 takes "
                    "mxfp4_search and mxfp4_floor, nvfp4 and nvfp4_rows take amax6, "
                    "four_six and code_search",
                    format_name(g.format)));
  }
  if (!is_tiled(g.format) && layer->key_shift != nullptr) {
    return invalid(
        fmt::format("{} pages have no key shift; pass a null key_shift", format_name(g.format)));
  }
  if (!is_tiled(g.format) && layer->value_shift != nullptr) {
    return invalid(fmt::format("{} pages have no value means; pass a null value_shift",
                               format_name(g.format)));
  }
  if (scale_block(g.format) == 0 &&
      (layer->key_outer != nullptr || layer->value_outer != nullptr)) {
    return invalid(
        fmt::format("{} pages have no scales; pass null outer scales", format_name(g.format)));
  }
  return {};
}

Status validate_outer_scales(const LayerConfig& layer) {
  Status status = check_outer("key", layer.key_outer, layer.num_kv_heads);
  return status.ok() ? check_outer("value", layer.value_outer, layer.num_kv_heads) : status;
}

Status validate_group_size(const LayerConfig& layer) {
  if (layer.num_q_heads < 1 || layer.num_q_heads % layer.num_kv_heads != 0) {
    return invalid(fmt::format("{} query heads cannot share {} KV heads; expected a multiple",
                               layer.num_q_heads, layer.num_kv_heads));
  }
  const int group = layer.num_q_heads / layer.num_kv_heads;
  if ((group >= 1 && group <= 16) || group == 24 || group == 32 || group == 64) return {};
  return {StatusCode::kUnsupported,
          fmt::format("{} query heads for each KV head are not offered; expected 1 to 16, 24, 32 "
                      "or 64",
                      group)};
}

Status validate_cache(const CacheView& cache, const LayerConfig& layer) {
  const std::int64_t bytes = layer.geometry.head_bytes;
  if (cache.pages == nullptr) return invalid("the cache's pages must not be null");
  if (cache.num_pages < 1) {
    return invalid(fmt::format("the cache has {} pages; expected 1 or more", cache.num_pages));
  }
  const std::int64_t heads = layer.num_kv_heads;
  std::int64_t extent = 0;
  std::int64_t head_extent = 0;
  if (cache.stride_page < 0 || cache.stride_head < 0 ||
      __builtin_mul_overflow(cache.stride_page, cache.num_pages, &extent) ||
      __builtin_mul_overflow(cache.stride_head, heads, &head_extent) ||
      __builtin_add_overflow(extent, head_extent, &extent)) {
    return invalid(
        fmt::format("the cache's strides ({} bytes a page, {} bytes a head) are negative "
                    "or too large for {} pages",
                    cache.stride_page, cache.stride_head, cache.num_pages));
  }
  const bool head_inner = (heads == 1 || cache.stride_head >= bytes) &&
                          cache.stride_page >= (heads - 1) * cache.stride_head + bytes;
  const bool page_inner = cache.stride_page >= bytes &&
                          cache.stride_head >= (cache.num_pages - 1) * cache.stride_page + bytes;
  if (!head_inner && !page_inner && !(cache.num_pages == 1 && cache.stride_head >= bytes)) {
    return invalid(
        fmt::format("the cache's strides ({} bytes a page, {} bytes a head) make its "
                    "pages overlap: {} heads of {} bytes each need more",
                    cache.stride_page, cache.stride_head, heads, bytes));
  }
  return {};
}

Status validate_tensor(const char* what, const TensorView& t, std::int64_t tokens, int heads,
                       int head_dim) {
  Status status = check_dtype(what, t.dtype);
  if (!status.ok() || tokens == 0) return status;
  if (t.data == nullptr)
    return invalid(
        fmt::format("{} must not be null: the step has rows of {} tokens there", what, tokens));
  status = check_alignment(what, t.data, static_cast<std::size_t>(dtype_bytes(t.dtype)));
  if (!status.ok()) return status;
  if ((tokens > 1 && t.stride_token < head_dim) || (heads > 1 && t.stride_head < head_dim)) {
    return invalid(
        fmt::format("{} has strides {} (token) and {} (head) elements, but a row has {}; "
                    "its last dimension must be contiguous",
                    what, t.stride_token, t.stride_head, head_dim));
  }
  return {};
}

Status validate_score_scalars(float sm_scale, float softcap, int window_left) {
  if (!(sm_scale >= 1.0F / kMostScoreFactor && sm_scale <= kMostScoreFactor)) {
    return invalid(
        fmt::format("sm_scale is {}; expected a positive number from {} to {}, 1 / sqrt(head_dim) "
                    "as a rule",
                    sm_scale, 1.0F / kMostScoreFactor, kMostScoreFactor));
  }
  if (softcap != 0.0F && !(softcap >= 1.0F / kMostScoreFactor && softcap <= kMostScoreFactor)) {
    return invalid(fmt::format("softcap is {}; expected 0 (off) or a positive number from {} to {}",
                               softcap, 1.0F / kMostScoreFactor, kMostScoreFactor));
  }
  if (window_left < -1) {
    return invalid(
        fmt::format("window_left is {}; expected a number of tokens, or -1 (off)", window_left));
  }
  return {};
}

Status validate_scalars(const AttendParams& p) {
  Status status = validate_score_scalars(p.sm_scale, p.softcap, p.window_left);
  if (!status.ok()) return status;
  switch (p.arithmetic) {
    case Arithmetic::kWide:
    case Arithmetic::kInt8:
      return {};
    case Arithmetic::kFp4:
      return check_fp4(p);
  }
  return invalid(
      fmt::format("arithmetic number {} does not exist; expected 1 (wide), 2 (fp4) or 3 "
                  "(int8)",
                  static_cast<int>(p.arithmetic)));
}

Status validate_write(const WriteParams& p) {
  Status status = check_layer(p.layer);
  if (status.ok()) status = validate_cache(p.cache, *p.layer);
  if (status.ok()) status = check_plan(p.plan, *p.layer, p.cache);
  if (!status.ok()) return status;
  const int head_dim = p.layer->geometry.head_dim;
  const std::int64_t tokens = p.plan->writes.empty() ? 0 : p.plan->num_tokens;
  status = validate_tensor("key", p.key, tokens, p.layer->num_kv_heads, head_dim);
  if (status.ok())
    status = validate_tensor("value", p.value, tokens, p.layer->num_kv_heads, head_dim);
  if (!status.ok()) return status;
  std::int32_t highest = -1;
  for (const GroupWrite& w : p.plan->writes) highest = std::max(highest, w.slot);
  return check_shadow(p.shadow, highest);
}

Status validate_attend(const AttendParams& p) {
  Status status = check_layer(p.layer);
  if (status.ok()) status = validate_group_size(*p.layer);
  if (status.ok()) status = validate_cache(p.cache, *p.layer);
  if (status.ok()) status = check_plan(p.plan, *p.layer, p.cache);
  if (status.ok()) status = validate_scalars(p);
  if (status.ok()) status = check_sinks(p);
  if (!status.ok()) return status;
  const LayerConfig& layer = *p.layer;
  const int head_dim = layer.geometry.head_dim;
  std::int64_t tokens = 0;
  bool reads_chunk = false;
  for (const RequestPlan& r : p.plan->requests) {
    tokens = std::max(tokens, r.query_len > 0 ? r.query_begin + r.query_len : 0);
    reads_chunk = reads_chunk || (r.query_len > 0 && (is_prefill(r) || p.plan->rule.reproducible));
  }
  status = validate_tensor("query", p.query, tokens, layer.num_q_heads, head_dim);
  if (status.ok()) status = check_output(p, tokens);
  const std::int64_t rows = reads_chunk ? tokens : 0;
  if (status.ok()) status = validate_tensor("key", p.key, rows, layer.num_kv_heads, head_dim);
  if (status.ok()) status = validate_tensor("value", p.value, rows, layer.num_kv_heads, head_dim);
  if (!status.ok()) return status;
  std::int32_t highest = -1;
  for (const ShadowSpan& s : p.plan->spans) highest = std::max(highest, s.slot);
  status = check_shadow(p.shadow, highest);
  return status.ok() ? check_dropped_pages(p) : status;
}

Status validate_gather(const AttendParams& p, int request, int kv_head, std::int64_t begin,
                       std::int64_t end, const float* key, const float* value) {
  Status status = check_layer(p.layer);
  if (status.ok()) status = validate_cache(p.cache, *p.layer);
  if (status.ok()) status = check_plan(p.plan, *p.layer, p.cache);
  if (!status.ok()) return status;
  const auto requests = static_cast<std::int64_t>(p.plan->requests.size());
  if (request < 0 || request >= requests || kv_head < 0 || kv_head >= p.layer->num_kv_heads) {
    return {
        StatusCode::kOutOfRange,
        fmt::format("request {} and KV head {} were asked for, but the step has {} requests and "
                    "the layer {} KV heads",
                    request, kv_head, requests, p.layer->num_kv_heads)};
  }
  const RequestPlan& r = p.plan->requests[static_cast<std::size_t>(request)];
  if (begin < 0 || end < begin || end > r.seq_len) {
    return {StatusCode::kOutOfRange,
            fmt::format("positions [{}, {}) were asked for, but request {} has {} tokens", begin,
                        end, request, r.seq_len)};
  }
  if (begin == end) return {};
  if (key == nullptr || value == nullptr) return invalid("key and value must not be null");
  const int page_size = p.layer->geometry.page_size;
  for (std::int64_t page = begin / page_size; page <= (end - 1) / page_size; ++page) {
    if (r.pages[page] >= 0) continue;
    return {StatusCode::kOutOfRange,
            fmt::format("request {}: entry {} of its block table is negative (a dropped page)",
                        request, page)};
  }
  return {};
}

}  // namespace bitdecoding
