// SPDX-License-Identifier: Apache-2.0
// Calibration of tau while serving: the probabilities of a few query rows over the tokens that are
// read from pages, as fp4 arithmetic would quantize them.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "capi/internal.h"
#include "numeric/bf16.h"

namespace bitdecoding::capi {
namespace {

constexpr std::uint64_t kObservedCalls = 8;  // one call in eight: calibration may cost some time
constexpr std::int64_t kMostPositions = 8192;
constexpr std::int64_t kBlock = 16;

float load(const TensorView& tensor, std::int64_t index) {
  if (tensor.dtype == DType::kF32) return static_cast<const float*>(tensor.data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(tensor.data)[index];
  return tensor.dtype == DType::kBf16 ? decode_bf16(bits) : decode_f16(bits);
}

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Positions that the newest row of a request reads from pages: not the sink, not the tail.
Range page_positions(const AttendParams& p, const RequestPlan& request) {
  const ShadowRule& rule = p.plan->rule;
  Range range;
  range.end = std::min(rule.tail_begin(request.seq_len), request.seq_len);
  range.begin = std::max<std::int64_t>(rule.sink_tokens, range.end - kMostPositions);
  if (p.window_left >= 0) {
    range.begin = std::max(range.begin, request.seq_len - 1 - p.window_left);
  }
  return range;
}

// Weights exp(score - maximum) of one head, in blocks of 16 positions; empty when a score is not
// finite.
std::vector<float> weights_of(const AttendParams& p, const RequestPlan& request, int q_head,
                              const std::vector<float>& keys, const Range& range) {
  const std::int64_t head_dim = p.layer->geometry.head_dim;
  const std::int64_t token = request.query_begin + request.query_len - 1;
  const std::int64_t query = token * p.query.stride_token + q_head * p.query.stride_head;
  std::vector<double> scores;
  double top = -INFINITY;
  for (std::int64_t i = 0; i < range.end - range.begin; ++i) {
    double score = 0;
    for (std::int64_t d = 0; d < head_dim; ++d) {
      score += double{load(p.query, query + d)} * keys[static_cast<std::size_t>(i * head_dim + d)];
    }
    score *= p.sm_scale;
    if (p.softcap > 0.0F) score = p.softcap * std::tanh(score / p.softcap);
    if (!std::isfinite(score)) return {};
    top = std::max(top, score);
    scores.push_back(score);
  }
  // Blocks are those of the pages: the first one is filled up with zeros.
  std::vector<float> weights(static_cast<std::size_t>(range.begin % kBlock), 0.0F);
  for (const double score : scores) weights.push_back(static_cast<float>(std::exp(score - top)));
  return weights;
}

// -1 when the sidecar's metadata has no such number.
float metadata_number(const KeyShift& sidecar, const char* key) {
  const auto found = sidecar.metadata.find(key);
  if (found == sidecar.metadata.end()) return -1.0F;
  const char* begin = found->second.data();
  const char* end = begin + found->second.size();
  float value = 0;
  const std::from_chars_result result = std::from_chars(begin, end, value);
  return result.ec == std::errc() && result.ptr == end ? value : -1.0F;
}

}  // namespace

Status observe_probabilities(const AttendParams& params, RuntimeState* runtime) {
  if (runtime->recipe.calibrate_file.empty() || !runtime->recipe.tau_calibrate) return {};
  std::uint64_t call = 0;
  {
    const std::lock_guard<std::mutex> lock(runtime->mutex);
    call = runtime->attend_calls++;
  }
  if (call % kObservedCalls != 0) return {};
  const int kv_heads = params.layer->num_kv_heads;
  const int group = params.layer->num_q_heads / kv_heads;
  const int kv_head =
      static_cast<int>(call / kObservedCalls % static_cast<std::uint64_t>(kv_heads));
  const int q_head = kv_head * group;
  for (std::size_t r = 0; r < params.plan->requests.size(); ++r) {
    const RequestPlan& request = params.plan->requests[r];
    const Range range = page_positions(params, request);
    if (request.query_len < 1 || range.end <= range.begin) continue;
    const auto size =
        static_cast<std::size_t>((range.end - range.begin) * params.layer->geometry.head_dim);
    std::vector<float> keys(size);
    std::vector<float> values(size);
    if (Status s = runtime->backend->gather(params, static_cast<int>(r), kv_head, range.begin,
                                            range.end, keys.data(), values.data());
        !s.ok()) {
      return s;
    }
    const std::vector<float> weights = weights_of(params, request, q_head, keys, range);
    const std::lock_guard<std::mutex> lock(runtime->mutex);
    runtime->tau.add_row(weights.data(), static_cast<std::int64_t>(weights.size()));
  }
  return {};
}

Status take_calibrated_tau(const KeyShift& sidecar, RuntimeState* runtime) {
  Recipe& recipe = runtime->recipe;
  const bool asked = recipe.tau_calibrate && recipe.calibrate_file.empty();
  if (!asked && !runtime->tau_from_sidecar) return {};
  const float tau = metadata_number(sidecar, "probability_tau");
  const float c = metadata_number(sidecar, "probability_c");
  if (!(tau >= 0.0F && tau <= 448.0F)) {
    return invalid(
        "probability_tau is \"calibrate\", and the sidecar '{}' holds no calibrated tau; "
        "calibrate with that setting once, or give a number (0.0205078125 is a good "
        "start, 0 switches the rule off)",
        sidecar.path);
  }
  if (c != recipe.probability_c) {
    return invalid(
        "the sidecar '{}' holds a tau for probability_c {}, and the recipe has {}; "
        "calibrate again, or give probability_tau as a number",
        sidecar.path, c, recipe.probability_c);
  }
  recipe.probability_tau = tau;
  recipe.tau_calibrate = false;
  runtime->tau_from_sidecar = true;
  return {};
}

}  // namespace bitdecoding::capi
