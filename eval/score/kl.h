// SPDX-License-Identifier: Apache-2.0
// The Kullback-Leibler divergence between two models' next-token distributions, from their logits.
#pragma once

#include <cstddef>
#include <vector>

#include "bitdecoding/status.h"
#include "score/logits_file.h"

namespace bitdecoding::eval {

struct RowDivergence {
  double kl = 0.0;        // sum p log(p / q) in nats, p = softmax(reference), q = softmax(other)
  bool same_top = false;  // both have the same most likely token
};

// In double throughout; NaN when a row holds a NaN or +infinity, or is all -infinity.
RowDivergence row_divergence(const float* reference, const float* other, std::size_t vocab_size);

struct Divergence {
  std::vector<double> kl;         // of each position that is held, in order
  std::size_t first_scored = 0;   // position from which the figures below count
  std::size_t scored_tokens = 0;  // positions in the figures below
  double mean = 0.0, median = 0.0, p99 = 0.0, max = 0.0;
  double top1_agreement = 0.0;  // share of positions, 0..1
};

// Both files must hold one row for every position of one prompt from the same first one on, the
// same prompt in both.
Result<Divergence> compare_logits(const LogitsFile& reference, const LogitsFile& other,
                                  std::size_t first_scored, int threads);

}  // namespace bitdecoding::eval
