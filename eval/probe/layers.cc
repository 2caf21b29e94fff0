// SPDX-License-Identifier: Apache-2.0
#include "probe/layers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "report/results_log.h"

namespace bitdecoding::eval {
namespace {

std::vector<double> numbers(const Json& list) {
  std::vector<double> out;
  for (const Json& x : list) {
    out.push_back(x.is_number() ? x.get<double>() : std::numeric_limits<double>::quiet_NaN());
  }
  return out;
}

Json json_numbers(const std::vector<double>& list) {
  Json out = Json::array();
  for (const double x : list) out.push_back(std::isfinite(x) ? Json(x) : Json());
  return out;
}

Status read_layers(const Json& probe, SensitivityReport* report) {
  const Json layers = probe.is_object() ? probe.value("layers", Json::array()) : Json::array();
  if (layers.empty()) {
    return {StatusCode::kCorrupt,
            "the engine's probe compared no layer; is the plugin the one of this program?"};
  }
  for (const Json& layer : layers) {
    LayerReport row;
    row.layer = layer.value("layer", 0);
    row.window = layer.value("window", 0);
    row.key = numbers(layer.value("key", Json::array()));
    row.score = numbers(layer.value("score", Json::array()));
    row.output = numbers(layer.value("output", Json::array()));
    report->bits += layer.value("bits", 0.0) / static_cast<double>(layers.size());
    report->layers.push_back(std::move(row));
  }
  return {};
}

}  // namespace

std::vector<int> SensitivityReport::order() const {
  std::vector<std::size_t> index(layers.size());
  std::iota(index.begin(), index.end(), std::size_t{0});
  std::stable_sort(index.begin(), index.end(),
                   [&](std::size_t a, std::size_t b) { return layers[a].kl > layers[b].kl; });
  std::vector<int> out;
  out.reserve(index.size());
  for (const std::size_t i : index) out.push_back(layers[i].layer);
  return out;
}

double SensitivityReport::compression(std::size_t kept) const {
  const auto n = static_cast<double>(layers.size());
  const auto k = static_cast<double>(kept);
  return 16.0 * n / (16.0 * k + bits * (n - k));
}

Result<SensitivityReport> measure_layers(ProbeEngine* engine, const std::string& recipe_json,
                                         Progress* progress) {
  SensitivityReport report;
  report.recipe = recipe_json;
  report.tokens = engine->tokens();
  report.first_scored = engine->first_scored();
  report.date = utc_now();
  progress->begin("errors of every layer and head");
  Result<ProbeResult> compared = engine->measure(recipe_json, "");
  if (!compared.ok()) return compared.status();
  if (Status s = read_layers(compared.value().probe, &report); !s.ok()) return s;
  progress->done(fmt::format("{} layers; the engine differs from itself by {:.2g} nats",
                             report.layers.size(), compared.value().divergence.mean));
  progress->begin("all layers in FP4");
  Result<ProbeResult> all = engine->measure(recipe_json, "all");
  if (!all.ok()) return all.status();
  report.kl_all = all.value().divergence.mean;
  progress->done(fmt::format("KL {:.5f}", report.kl_all));
  progress->begin("one layer at a time in FP4");
  double seconds = 0;
  for (std::size_t i = 0; i < report.layers.size(); ++i) {
    LayerReport& layer = report.layers[i];
    progress->update(i == 0 ? "the first layer shows how long it takes"
                            : fmt::format("{} of {}, about {:.0f} s left", i, report.layers.size(),
                                          seconds / static_cast<double>(i) *
                                              static_cast<double>(report.layers.size() - i)));
    Result<ProbeResult> one = engine->measure(recipe_json, std::to_string(layer.layer));
    if (!one.ok()) return one.status();
    layer.kl = one.value().divergence.mean;
    layer.top1 = one.value().divergence.top1_agreement;
    seconds += one.value().seconds;
  }
  progress->done(fmt::format("worst: layer {}", report.order().front()));
  return report;
}

Json sensitivity_json(const SensitivityReport& report) {
  Json layers = Json::array();
  for (const LayerReport& layer : report.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"window", layer.window},
                      {"kl", layer.kl},
                      {"top1_agreement", layer.top1},
                      {"key_error", json_numbers(layer.key)},
                      {"score_error", json_numbers(layer.score)},
                      {"output_error", json_numbers(layer.output)}});
  }
  Json skip = Json::array();
  const std::vector<int> order = report.order();
  for (std::size_t i = 0; i < order.size(); ++i) {
    skip.push_back({{"layer", order[i]}, {"compression", report.compression(i + 1)}});
  }
  return {{"model", report.model},
          {"text", report.text},
          {"date", report.date},
          {"recipe", Json::parse(report.recipe, nullptr, false)},
          {"tokens", report.tokens},
          {"first_scored", report.first_scored},
          {"kl_all_layers", report.kl_all},
          {"bits", report.bits},
          {"layers", layers},
          {"keep_in_bf16", skip}};
}

}  // namespace bitdecoding::eval
