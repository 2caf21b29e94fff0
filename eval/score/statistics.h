// SPDX-License-Identifier: Apache-2.0
// Order statistics and means of measured values.
#pragma once

#include <vector>

namespace bitdecoding::eval {

// NaN for an empty list: a figure that was not measured must not read as 0.
double mean(const std::vector<double>& values);
// The q-quantile (0..1), linear between the two neighbours.
double quantile(std::vector<double> values, double q);
// Means of consecutive runs of `width` values; the last run may be shorter.
std::vector<double> binned_means(const std::vector<double>& values, std::size_t width);

}  // namespace bitdecoding::eval
