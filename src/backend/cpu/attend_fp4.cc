// SPDX-License-Identifier: Apache-2.0
#include "backend/cpu/attend_fp4.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "backend/cpu/corrupt_tile.h"
#include "backend/cpu/query.h"
#include "scale/probability.h"
#include "transform/hadamard.h"
#include "transform/two_term.h"

namespace bitdecoding::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kProbabilityBlock = 16;

// Replaces each query row by the sum of its NVFP4 terms, rotated back so that it meets keys in the
// original space, and returns in `offset` what that leaves out: q . shift - q' . shift.
void quantize_queries(const AttendParams& params, int kv_head, int rows, float* query,
                      float* offset) {
  const LayerConfig& layer = *params.layer;
  const int head_dim = layer.geometry.head_dim;
  const float* shift = layer.key_shift == nullptr
                           ? nullptr
                           : layer.key_shift + static_cast<std::int64_t>(kv_head) * head_dim;
  std::vector<float> high(head_dim);
  std::vector<float> low(head_dim);
  for (int r = 0; r < rows; ++r) {
    float* q = query + static_cast<std::int64_t>(r) * head_dim;
    float before = 0.0F;
    float after = 0.0F;
    for (int d = 0; d < head_dim && shift != nullptr; ++d) before += q[d] * shift[d];
    for (int d = 0; d < head_dim; ++d) q[d] /= params.sm_scale;
    if (layer.hadamard) hadamard(q, head_dim);
    split_two_term(q, head_dim, params.query_terms, high.data(), low.data());
    for (int d = 0; d < head_dim; ++d) q[d] = high[d] + low[d];
    if (layer.hadamard) hadamard(q, head_dim);
    for (int d = 0; d < head_dim; ++d) q[d] *= params.sm_scale;
    for (int d = 0; d < head_dim && shift != nullptr; ++d) after += q[d] * shift[d];
    offset[r] = before - after;
  }
}

// Scores -> dequantized probabilities of one row; returns their sum.
float quantize_probabilities(const AttendParams& params, float max, std::int64_t n, float* scores) {
  const ProbabilityRule rule{params.probability_c, params.probability_tau};
  double sum = 0.0;
  for (std::int64_t begin = 0; begin < n; begin += kProbabilityBlock) {
    float block[kProbabilityBlock];
    for (int i = 0; i < kProbabilityBlock; ++i)
      block[i] = rule.c * std::exp(scores[begin + i] - max);
    const float scale = decode_e4m3(rule.choose(block, kProbabilityBlock));
    for (int i = 0; i < kProbabilityBlock; ++i) {
      const float p =
          scale == 0.0F ? 0.0F : decode_e2m1(encode_e2m1(block[i] / scale)) * scale / rule.c;
      scores[begin + i] = p;
      sum += p;
    }
  }
  return static_cast<float>(sum);
}

// A corrupt tile of the range, with its invalid scale bytes.
struct Corrupt {
  std::int64_t tile;
  int scales;
  CorruptTile nans;
};

void spoil_rows(const AttendParams& params, const RequestRows& rows, const AttendGroup& group,
                int first, int count, const std::vector<Corrupt>& corrupt,
                const PartialView& partial) {
  const std::int64_t head_dim = params.layer->geometry.head_dim;
  for (const Corrupt& c : corrupt) {
    const std::uint64_t available = rows.available(c.tile);
    bool seen = false;
    for (int r = first; r < first + count; ++r) {
      const std::uint64_t mask =
          rows.page_mask((group.first_row + r) / rows.group_size(), c.tile, available);
      seen |= c.nans.spoil(mask, partial.sum + r, partial.out + r * head_dim);
    }
    if (seen) count_corrupt(params, c.scales);
  }
}

}  // namespace

std::int64_t attend_pages_fp4(const AttendParams& params, const AttendKernels& kernels,
                              const RequestRows& rows, const TileSource& source,
                              const AttendGroup& group, const AttendItem& item,
                              const PartialView& partial) {
  const int head_dim = params.layer->geometry.head_dim;
  const std::int64_t tiles = item.tile_end - item.tile_begin;
  const std::int64_t tokens = tiles * kTileTokens;
  thread_local FloatTileBuffer buffer;
  std::vector<float> query(static_cast<std::size_t>(kFloatRows) * head_dim);
  std::vector<float> offset(kFloatRows);
  std::vector<float> scores(static_cast<std::size_t>(kFloatRows) * tokens);
  for (int first = 0; first < group.rows; first += kFloatRows) {
    const int count = std::min(kFloatRows, group.rows - first);
    load_query_rows(params, rows.request(), group.kv_head, group.first_row + first, count,
                    params.sm_scale, query.data());
    quantize_queries(params, group.kv_head, count, query.data(), offset.data());
    FloatState state;
    state.query = query.data();
    state.offset = offset.data();
    state.out = partial.out + static_cast<std::int64_t>(first) * head_dim;
    state.rows = count;
    state.head_dim = head_dim;
    std::vector<bool> used(tiles, false);
    std::vector<Corrupt> corrupt;
    std::fill(scores.begin(), scores.end(), -kInfinity);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t tile = item.tile_begin + t;
      const std::uint64_t available = rows.available(tile);
      std::uint64_t mask[kFloatRows];
      std::uint64_t any = 0;
      for (int r = 0; r < count; ++r) {
        mask[r] =
            rows.page_mask((group.first_row + first + r) / rows.group_size(), tile, available);
        any |= mask[r];
      }
      if (any == 0) continue;
      if (source.page_tile(tile) == nullptr) return tile;
      const int invalid = source.load_page_tile(tile, TileSpace::kOriginal, &buffer);
      if (invalid > 0) corrupt.push_back({tile, invalid, CorruptTile(&buffer, head_dim)});
      used[t] = true;
      kernels.tile->scores({buffer.key, buffer.value, nullptr}, state,
                           scores.data() + t * kTileTokens, tokens);
      for (int r = 0; r < count; ++r) {
        float* row = scores.data() + r * tokens + t * kTileTokens;
        for (int i = 0; i < kTileTokens; ++i) {
          if (params.softcap != 0.0F) row[i] = params.softcap * std::tanh(row[i] / params.softcap);
          if (((mask[r] >> i) & 1U) == 0) row[i] = -kInfinity;
        }
      }
    }
    for (int r = 0; r < count; ++r) {
      float* row = scores.data() + r * tokens;
      const float max = *std::max_element(row, row + tokens);
      partial.max[first + r] = max;
      if (max == -kInfinity) {
        std::fill(row, row + tokens, 0.0F);
        continue;
      }
      partial.sum[first + r] = quantize_probabilities(params, max, tokens, row);
    }
    for (std::int64_t t = 0; t < tiles; ++t) {
      if (!used[t]) continue;
      const int invalid = source.load_page_tile(item.tile_begin + t, TileSpace::kOriginal, &buffer);
      if (invalid > 0) [[maybe_unused]]
        const CorruptTile taken_out(&buffer, head_dim);
      kernels.tile->accumulate({buffer.key, buffer.value, nullptr}, state,
                               scores.data() + t * kTileTokens, tokens);
    }
    spoil_rows(params, rows, group, first, count, corrupt, partial);
  }
  return -1;
}

}  // namespace bitdecoding::cpu
