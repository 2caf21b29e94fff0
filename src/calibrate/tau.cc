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

}  // namespace

void TauCalibrator::add_row(const float* probabilities, std::int64_t n) {
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    float x[kBlock] = {};
    const std::int64_t rows = std::min<std::int64_t>(kBlock, n - begin);
    for (std::int64_t i = 0; i < rows; ++i) {
      const float p = probabilities[begin + i];
      x[i] = p > 0.0F ? c_ * p : 0.0F;  // false for NaN
    }
    ++blocks_;
    const float amax = block_amax(x, kBlock);
    const std::uint8_t code = encode_e4m3(amax);
    const double sixth = block_error(x, decode_e4m3(encode_e4m3(amax / 6.0F)));
    // The errors count in units of P itself, so that results for several c can be compared.
    const double unit = 1.0 / (static_cast<double>(c_) * c_);
    if (code > kMaxCode) {
      error_above_ += sixth * unit;
      continue;
    }
    ++count_[code];
    error_sixth_[code] += sixth * unit;
    error_half_[code] += block_error(x, decode_e4m3(encode_e4m3(amax / 2.0F))) * unit;
  }
}

TauChoice TauCalibrator::choose() const {
  TauChoice best;
  best.blocks = blocks_;
  best.error_amax6 = error_above_;
  for (const double error : error_sixth_) best.error_amax6 += error;
  best.error = best.error_amax6;
  double error = best.error_amax6;
  std::uint64_t affected = 0;
  for (int code = 0; code <= kMaxCode; ++code) {
    const auto k = static_cast<std::size_t>(code);
    error += error_half_[k] - error_sixth_[k];
    affected += count_[k];
    // A threshold must earn its place: without blocks, or on a tie, the smaller one stays.
    if (!(error < best.error)) continue;
    best.error = error;
    best.affected = affected;
    best.tau = (static_cast<float>(code) + 0.5F) / 512.0F;
  }
  return best;
}

}  // namespace bitdecoding
