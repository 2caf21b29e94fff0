// SPDX-License-Identifier: Apache-2.0
#include "calibrate/finish.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace bitdecoding {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t kFactors = kCalibratedFactors.size();

std::string factor_name(std::size_t i) { return fmt::format("{}", kCalibratedFactors[i]); }

// tau is a float; as a double it would show digits that mean nothing.
double short_number(float x) { return std::stod(fmt::format("{}", x)); }

void add_probabilities(const CalibrationState& state, KeyShift* sidecar) {
  Json taus = Json::object();
  Json layer_taus = Json::object();
  Json detail = Json::object();
  std::uint64_t blocks = 0;
  for (std::size_t f = 0; f < kFactors; ++f) {
    ProbabilityHistogram all;
    Json of_layers = Json::array();
    double layer_error = 0;
    for (const int layer : state.layers) {
      const ProbabilityHistogram& own =
          state.probabilities[static_cast<std::size_t>(layer) * kFactors + f];
      all.add(own);
      const TauChoice choice = own.choose();
      of_layers.push_back(short_number(choice.tau));
      layer_error += choice.error;
    }
    const TauChoice choice = all.choose();
    blocks = choice.blocks;
    taus[factor_name(f)] = short_number(choice.tau);
    layer_taus[factor_name(f)] = of_layers;
    detail[factor_name(f)] = {
        {"error", choice.error},           {"error_amax6", choice.error_amax6},
        {"error_layer_taus", layer_error}, {"lost", choice.lost},
        {"lost_amax6", choice.lost_amax6}, {"affected", choice.affected}};
  }
  if (blocks == 0) return;
  sidecar->metadata["probability_taus"] = taus.dump();
  sidecar->metadata["probability_layer_taus"] = layer_taus.dump();
  sidecar->metadata["probability_detail"] = detail.dump();
  sidecar->metadata["probability_blocks"] = std::to_string(blocks);
}

// visit(mean before, mean after, deviation after) for each channel of the observed layers.
template <class Visit>
void for_each_channel(const CalibrationState& before, const CalibrationState& after,
                      const Visit& visit) {
  const auto dim = static_cast<std::size_t>(after.head_dim);
  const auto heads = static_cast<std::size_t>(after.num_kv_heads);
  for (const int layer : after.layers) {
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t head = static_cast<std::size_t>(layer) * heads + h;
      const double n = after.keys.rows[head];
      const double m = before.keys.rows[head];
      if (n < 2 || m < 1) continue;
      for (std::size_t i = head * dim; i < (head + 1) * dim; ++i) {
        const double mean = after.keys.sums[i] / n;
        const double variance = after.keys.squares[i] / n - mean * mean;
        if (variance > 0) visit(before.keys.sums[i] / m, mean, std::sqrt(variance));
      }
    }
  }
}

Result<std::vector<float>> means_of(const CalibrationState& state, const KeySums& sums) {
  Result<std::unique_ptr<KeyMeanAccumulator>> made =
      KeyMeanAccumulator::make(state.num_layers, state.num_kv_heads, state.head_dim);
  if (!made.ok()) return made.status();
  if (Status s = made.value()->restore(sums, 0, state.num_kv_heads); !s.ok()) return s;
  return made.value()->means(state.layers, 0, state.num_kv_heads);
}

}  // namespace

Result<KeyShift> finish_calibration(const CalibrationState& state) {
  Result<std::unique_ptr<KeyMeanAccumulator>> made =
      KeyMeanAccumulator::make(state.num_layers, state.num_kv_heads, state.head_dim);
  if (!made.ok()) return made.status();
  KeyMeanAccumulator& means = *made.value();
  if (Status s = means.restore(state.keys, 0, state.num_kv_heads); !s.ok()) return s;
  Result<std::vector<float>> values = means.means(state.layers, 0, state.num_kv_heads);
  if (!values.ok()) return values.status();
  Result<std::vector<float>> of_values = means_of(state, state.values);
  if (!of_values.ok()) return of_values.status();
  KeyShift sidecar;
  sidecar.value_means = of_values.take();
  sidecar.num_layers = state.num_layers;
  sidecar.num_kv_heads = state.num_kv_heads;
  sidecar.head_dim = state.head_dim;
  sidecar.values = values.take();
  std::uint64_t tokens = UINT64_MAX;
  for (const int layer : state.layers) {
    tokens = std::min(tokens, means.tokens(layer, 0, state.num_kv_heads));
  }
  sidecar.metadata["tokens"] = std::to_string(tokens);
  sidecar.metadata["skipped_rows"] = std::to_string(means.skipped_rows());
  sidecar.metadata["outlier_channels"] = std::to_string(means.outliers().size());
  sidecar.metadata["library"] = BITDECODING_VERSION;
  add_probabilities(state, &sidecar);
  return sidecar;
}

double key_mean_distance(const CalibrationState& before, const CalibrationState& after) {
  double sum = 0;
  double channels = 0;
  for_each_channel(before, after, [&](double a, double b, double deviation) {
    sum += (a - b) * (a - b) / (deviation * deviation);
    channels += 1;
  });
  return channels > 0 ? std::sqrt(sum / channels) : 0;
}

double largest_key_mean_distance(const CalibrationState& before, const CalibrationState& after) {
  double largest = 0;
  for_each_channel(before, after, [&](double a, double b, double deviation) {
    largest = std::max(largest, std::abs(a - b) / deviation);
  });
  return largest;
}

}  // namespace bitdecoding
