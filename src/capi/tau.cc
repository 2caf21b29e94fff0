// SPDX-License-Identifier: Apache-2.0
// Calibration of tau while serving: the probabilities of a few query rows over the tokens that are
// read from pages, as fp4 arithmetic would quantize them.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "capi/internal.h"
#include "numeric/bf16.h"

namespace bitdecoding::capi {
namespace {

// Rows at these distances are observed: a function of the position alone, so that the same prompts
// in another order, or in other chunks, give the same rows.
constexpr std::int64_t kRowDistance = 256;
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

// Positions that a decoded row at `position` reads from pages: not the sink, not the tail.
Range page_positions(const AttendParams& p, std::int64_t position) {
  const ShadowRule& rule = p.plan->rule;
  Range range;
  range.end = std::min(rule.tail_begin(position + 1), position + 1);
  range.begin = std::max<std::int64_t>(rule.sink_tokens, range.end - kMostPositions);
  if (p.window_left >= 0) range.begin = std::max(range.begin, position - p.window_left);
  return range;
}

// Weights exp(score - maximum) of one head, in blocks of 16 positions; empty when a score is not
// finite.
std::vector<float> weights_of(const AttendParams& p, std::int64_t token, int q_head,
                              const std::vector<float>& keys, const Range& range) {
  const std::int64_t head_dim = p.layer->geometry.head_dim;
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

// One row of one head, which are other heads from row to row and from layer to layer.
Status observe_row(const bd_layer& layer, const AttendParams& params, int r, std::int64_t row) {
  RuntimeState& runtime = *layer.runtime;
  const RequestPlan& request = params.plan->requests[static_cast<std::size_t>(r)];
  const std::int64_t position = request.seq_len - request.query_len + row;
  const Range range = page_positions(params, position);
  if (range.end <= range.begin) return {};
  const int group = layer.config.num_q_heads / layer.config.num_kv_heads;
  const auto turn = static_cast<int>(position / kRowDistance) + layer.layer_index;
  const int q_head = turn % layer.config.num_q_heads;
  const int kv_head = q_head / group;
  const auto size =
      static_cast<std::size_t>((range.end - range.begin) * layer.config.geometry.head_dim);
  std::vector<float> keys(size);
  std::vector<float> values(size);
  if (Status s = runtime.backend->gather(params, r, kv_head, range.begin, range.end, keys.data(),
                                         values.data());
      !s.ok()) {
    return s;
  }
  const std::vector<float> weights =
      weights_of(params, request.query_begin + row, q_head, keys, range);
  const std::size_t factors = kCalibratedFactors.size();
  const std::lock_guard<std::mutex> lock(runtime.mutex);
  for (std::size_t f = 0; f < factors; ++f) {
    runtime.taus[static_cast<std::size_t>(layer.layer_index) * factors + f].add_row(
        weights.data(), static_cast<std::int64_t>(weights.size()));
  }
  return {};
}

// The tau that the sidecar has for a factor c; -1 when it has none.
float calibrated_tau(const KeyShift& sidecar, float c, std::string* known) {
  const auto found = sidecar.metadata.find("probability_taus");
  if (found == sidecar.metadata.end()) return -1.0F;
  const nlohmann::json taus = nlohmann::json::parse(found->second, nullptr, false);
  if (!taus.is_object()) return -1.0F;
  for (const auto& [name, value] : taus.items()) {
    *known += (known->empty() ? "" : ", ") + name;
    if (name == fmt::format("{}", c) && value.is_number()) return value.get<float>();
  }
  return -1.0F;
}

}  // namespace

Status observe_probabilities(const bd_layer& layer, const AttendParams& params) {
  RuntimeState& runtime = *layer.runtime;
  if (runtime.recipe.calibrate_file.empty() || !runtime.recipe.tau_calibrate) return {};
  {
    const std::lock_guard<std::mutex> lock(runtime.mutex);
    if (runtime.phase != CalibrationPhase::kAll &&
        runtime.phase != CalibrationPhase::kProbabilities) {
      return {};
    }
  }
  for (std::size_t r = 0; r < params.plan->requests.size(); ++r) {
    const RequestPlan& request = params.plan->requests[r];
    const std::int64_t first = request.seq_len - request.query_len;
    for (std::int64_t i = 0; i < request.query_len; ++i) {
      // A prompt's last row, too: short prompts have no other.
      const bool last = i + 1 == request.query_len && request.query_len > kMaxDecodeQueries;
      if (!last && (first + i + 1) % kRowDistance != 0) continue;
      if (Status s = observe_row(layer, params, static_cast<int>(r), i); !s.ok()) return s;
    }
  }
  return {};
}

Status take_calibrated_tau(const KeyShift& sidecar, RuntimeState* runtime) {
  Recipe& recipe = runtime->recipe;
  const bool asked = recipe.tau_calibrate && recipe.calibrate_file.empty();
  if (!asked && !runtime->tau_from_sidecar) return {};
  std::string known;
  const float tau = calibrated_tau(sidecar, recipe.probability_c, &known);
  if (tau < 0.0F && !known.empty()) {
    return invalid(
        "the sidecar '{}' holds a tau for each probability_c of {}, and the recipe has {}; choose "
        "one of them, or give probability_tau as a number",
        sidecar.path, known, recipe.probability_c);
  }
  if (!(tau >= 0.0F && tau <= 448.0F)) {
    return invalid(
        "probability_tau is \"calibrate\", and the sidecar '{}' holds no calibrated tau; find it "
        "with `bitdecoding calibrate MODEL`, or give a number (0.0205078125 is a good start, 0 "
        "switches the rule off)",
        sidecar.path);
  }
  recipe.probability_tau = tau;
  recipe.tau_calibrate = false;
  runtime->tau_from_sidecar = true;
  return {};
}

}  // namespace bitdecoding::capi
