// SPDX-License-Identifier: Apache-2.0
#include "score/statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace bitdecoding::eval {

double mean(const std::vector<double>& values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const double at = std::clamp(q, 0.0, 1.0) * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(std::floor(at));
  const std::size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

std::vector<double> binned_means(const std::vector<double>& values, std::size_t width) {
  std::vector<double> out;
  for (std::size_t begin = 0; width > 0 && begin < values.size(); begin += width) {
    const std::size_t end = std::min(begin + width, values.size());
    double sum = 0.0;
    for (std::size_t i = begin; i < end; ++i) sum += values[i];
    out.push_back(sum / static_cast<double>(end - begin));
  }
  return out;
}

}  // namespace bitdecoding::eval
