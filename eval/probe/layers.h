// SPDX-License-Identifier: Apache-2.0
// Which layers suffer from FP4: errors per layer and head, and the divergence when a layer alone is
// in FP4.
#pragma once

#include <string>
#include <vector>

#include "probe/engine.h"

namespace bitdecoding::eval {

struct LayerReport {
  int layer = 0;
  int window = 0;                     // 0 = attends to everything
  std::vector<double> key;            // relative errors (L2) of each KV head,
  std::vector<double> score, output;  // and of each query head; NaN = not observed
  double kl = 0;                      // nats, with this layer alone in FP4
  double top1 = 0;
};

struct SensitivityReport {
  std::string model, text, recipe, date;
  std::size_t tokens = 0, first_scored = 0;
  double kl_all = 0;                // all layers in FP4
  double bits = 0;                  // an element of the pages
  std::vector<LayerReport> layers;  // by number
  // Layer numbers, the one that costs most first.
  std::vector<int> order() const;
  // 16 bits over the mean bits of an element when so many layers of order() stay in BF16.
  double compression(std::size_t kept) const;
};

Result<SensitivityReport> measure_layers(ProbeEngine* engine, const std::string& recipe_json,
                                         Progress* progress);
Json sensitivity_json(const SensitivityReport& report);
std::string sensitivity_page(const SensitivityReport& report);

}  // namespace bitdecoding::eval
