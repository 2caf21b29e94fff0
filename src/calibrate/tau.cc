// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstddef>

#include "bitdecoding/calibrate.h"
#include "scale/block.h"

namespace bitdecoding {
namespace {

constexpr int kBlock = 16;

double block_error(const float* x, float scale) {
  return scale == 0.0F ? block_squared_norm(x, kBlock) : block_squared_error(x, kBlock, scale);
}

// Halfway to the next code, so that a maximum is never the threshold itself; the last one is 448.
float threshold(int code) {
  const float here = decode_e4m3(static_cast<std::uint8_t>(code));
  if (code == kE4m3MaxCode) return here;
  return (here + decode_e4m3(static_cast<std::uint8_t>(code + 1))) / 2.0F;
}

// Every threshold in turn, from none to the largest code: visit(choice) after each.
template <class Visit>
void for_each_threshold(const ProbabilityHistogram& histogram, const Visit& visit) {
  const auto& [count, sixth, half, lost_sixth, lost_half] = histogram.rows;
  TauChoice choice;
  double blocks = 0;
  for (std::size_t k = 0; k < kE4m3Codes; ++k) {
    blocks += count[k];
    choice.error_amax6 += sixth[k];
    choice.lost_amax6 += lost_sixth[k];
  }
  const double mass = histogram.mass > 0 ? histogram.mass : 1.0;
  choice.blocks = static_cast<std::uint64_t>(blocks);
  choice.error = choice.error_amax6;
  double lost = choice.lost_amax6;
  choice.lost_amax6 /= mass;
  choice.lost = choice.lost_amax6;
  visit(choice);
  double affected = 0;
  for (int code = 0; code < kE4m3Codes; ++code) {
    const auto k = static_cast<std::size_t>(code);
    affected += count[k];
    choice.error += half[k] - sixth[k];
    lost += lost_half[k] - lost_sixth[k];
    choice.lost = lost / mass;
    choice.affected = static_cast<std::uint64_t>(affected);
    choice.tau = threshold(code);
    visit(choice);
  }
}

}  // namespace

void ProbabilityHistogram::add(const ProbabilityHistogram& other) {
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (std::size_t k = 0; k < kE4m3Codes; ++k) rows[row][k] += other.rows[row][k];
  }
  mass += other.mass;
}

TauChoice ProbabilityHistogram::choose() const {
  TauChoice best;
  bool first = true;
  for_each_threshold(*this, [&](const TauChoice& choice) {
    // A threshold must earn its place: without blocks, or on a tie, the smaller one stays.
    if (first || choice.error < best.error) best = choice;
    first = false;
  });
  return best;
}

TauChoice ProbabilityHistogram::at(float tau) const {
  TauChoice found;
  for_each_threshold(*this, [&](const TauChoice& choice) {
    if (choice.tau <= tau) found = choice;
  });
  return found;
}

void TauCalibrator::add_row(const float* probabilities, std::int64_t n) {
  const double unit = 1.0 / (static_cast<double>(c_) * c_);
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    float x[kBlock] = {};
    const std::int64_t rows = std::min<std::int64_t>(kBlock, n - begin);
    double mass = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      const float p = probabilities[begin + i];
      x[i] = p > 0.0F ? c_ * p : 0.0F;  // false for NaN
      mass += double{x[i]};
    }
    const float amax = block_amax(x, kBlock);
    const std::size_t code = encode_e4m3(amax);
    const float sixth = decode_e4m3(encode_e4m3(amax / 6.0F));
    const float half = decode_e4m3(encode_e4m3(amax / 2.0F));
    histogram_.mass += mass / c_;
    histogram_.count()[code] += 1;
    histogram_.error_sixth()[code] += block_error(x, sixth) * unit;
    histogram_.error_half()[code] += block_error(x, half) * unit;
    histogram_.lost_sixth()[code] += sixth == 0.0F ? mass / c_ : 0.0;
    histogram_.lost_half()[code] += half == 0.0F ? mass / c_ : 0.0;
  }
}

}  // namespace bitdecoding
