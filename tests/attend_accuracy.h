// SPDX-License-Identifier: Apache-2.0
// How far a backend's decode is from double precision over the same pages, beside a plain BF16
// attention kernel over the same pages.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attend_compare.h"
#include "world.h"

namespace bitdecoding::test {

struct AccuracyCase {
  std::string name;
  WorldOptions options;
  Masks masks;
  std::int64_t context = 1000;  // tokens before the decoded ones
  std::int64_t query_len = 1;
  float sharpness = 1.0F;  // of the softmax: sm_scale is this over sqrt(head_dim)
};

// Both formats, several head_dims, masks, verification of drafts, soft and sharp attention.
std::vector<AccuracyCase> accuracy_cases();

// Relative L2 errors over all decoded rows.
struct Accuracy {
  double ours = 0;
  double bf16 = 0;
};

// The backend that `make` gives for a world writes its pages and attends.
Accuracy measure_accuracy(const AccuracyCase& c,
                          const std::function<std::unique_ptr<Backend>(World*)>& make);

// What a BF16 attention kernel computes of the world's newest step: keys and values dequantized and
// rounded to BF16, BF16 queries, scores and softmax in FP32, probabilities rounded to BF16 for
// their product with the values and added unrounded to the denominator, FP32 accumulation.
std::vector<float> bf16_attention(World& w);

}  // namespace bitdecoding::test
