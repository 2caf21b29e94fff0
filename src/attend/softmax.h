// SPDX-License-Identifier: Apache-2.0
// Softmax in parts: a part keeps its own maximum, and parts are merged by log-sum-exp. A part
// without positions is (max -inf, sum 0) and is the identity of the merge.
#pragma once

#include <cmath>
#include <limits>

namespace bitdecoding {

template <class T>
struct MergeWeights {
  T a = 0, b = 0;                               // factors of the two normalized outputs
  T lse = -std::numeric_limits<T>::infinity();  // of both parts together
};

// Weights that merge two normalized partial results with the given LSEs. Two empty parts give
// weights 0 and LSE -inf, never NaN; a NaN in either poisons the result.
template <class T>
MergeWeights<T> merge_weights(T lse_a, T lse_b) {
  constexpr T kEmpty = -std::numeric_limits<T>::infinity();
  if (lse_a == kEmpty && lse_b == kEmpty) return {};
  const T top = lse_a > lse_b || std::isnan(lse_a) ? lse_a : lse_b;
  const T a = std::exp(lse_a - top);
  const T b = std::exp(lse_b - top);
  const T sum = a + b;
  return {a / sum, b / sum, top + std::log(sum)};
}

// Scores become softcap * tanh(score / softcap); 0 = off.
template <class T>
T apply_softcap(T score, T softcap) {
  return softcap == T{0} ? score : softcap * std::tanh(score / softcap);
}

}  // namespace bitdecoding
