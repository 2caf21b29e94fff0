// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "bitdecoding/calibrate.h"
#include "numeric/bf16.h"

namespace bitdecoding {
namespace {

float load(const TensorView& tensor, std::int64_t index) {
  if (tensor.dtype == DType::kF32) return static_cast<const float*>(tensor.data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(tensor.data)[index];
  return tensor.dtype == DType::kBf16 ? decode_bf16(bits) : decode_f16(bits);
}

// One head's row as the quantizer sees it; false when a value is not finite.
bool load_row(const TensorView& tensor, std::int64_t begin, std::vector<float>* row) {
  bool finite = true;
  for (std::size_t d = 0; d < row->size(); ++d) {
    const float x = round_to_bf16(load(tensor, begin + static_cast<std::int64_t>(d)));
    finite = finite && std::isfinite(x);
    (*row)[d] = x;
  }
  return finite;
}

}  // namespace

KeyMeanAccumulator::KeyMeanAccumulator(int num_layers, int num_kv_heads, int head_dim)
    : num_layers_(num_layers), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {
  const std::size_t heads =
      static_cast<std::size_t>(num_layers) * static_cast<std::size_t>(num_kv_heads);
  counts_.resize(heads);
  sums_.resize(heads * static_cast<std::size_t>(head_dim));
  squares_.resize(sums_.size());
}

Result<std::unique_ptr<KeyMeanAccumulator>> KeyMeanAccumulator::make(int num_layers,
                                                                     int num_kv_heads,
                                                                     int head_dim) {
  constexpr int kMost = 4096;
  for (const auto& [what, n] : {std::pair<const char*, int>{"num_layers", num_layers},
                                {"num_kv_heads", num_kv_heads},
                                {"head_dim", head_dim}}) {
    if (n < 1 || n > kMost) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("{} is {}; expected 1 to {}", what, n, kMost));
    }
  }
  return std::unique_ptr<KeyMeanAccumulator>(
      new KeyMeanAccumulator(num_layers, num_kv_heads, head_dim));
}

Status KeyMeanAccumulator::check_heads(int first_head, int num_heads) const {
  if (first_head >= 0 && num_heads >= 1 && first_head <= num_kv_heads_ - num_heads) return {};
  return {StatusCode::kOutOfRange,
          fmt::format("heads {} to {} are not among the model's {} KV heads", first_head,
                      first_head + num_heads - 1, num_kv_heads_)};
}

Status KeyMeanAccumulator::add(int layer, int first_head, int num_heads, const TensorView& key,
                               std::int64_t num_rows, const std::int64_t* slots) {
  if (layer < 0 || layer >= num_layers_) {
    return {StatusCode::kOutOfRange,
            fmt::format("layer {} is not one of the model's {} layers", layer, num_layers_)};
  }
  if (Status s = check_heads(first_head, num_heads); !s.ok()) return s;
  if (num_rows < 0 || (num_rows > 0 && key.data == nullptr)) {
    return {StatusCode::kInvalidArgument,
            fmt::format("{} rows of keys without data; expected a tensor", num_rows)};
  }
  std::vector<float> row(static_cast<std::size_t>(head_dim_));
  for (std::int64_t r = 0; r < num_rows; ++r) {
    if (slots != nullptr && slots[r] < 0) continue;
    for (int h = 0; h < num_heads; ++h) {
      const std::size_t head = head_index(layer, first_head + h);
      if (!load_row(key, r * key.stride_token + h * key.stride_head, &row)) {
        ++counts_[head].skipped;
        if (!first_non_finite_) first_non_finite_ = NonFiniteKey{layer, first_head + h};
        continue;
      }
      ++counts_[head].rows;
      double* sum = sums_.data() + head * row.size();
      double* square = squares_.data() + head * row.size();
      for (std::size_t d = 0; d < row.size(); ++d) {
        const double x = row[d];
        sum[d] += x;
        square[d] += x * x;
      }
    }
  }
  return {};
}

std::uint64_t KeyMeanAccumulator::tokens(int layer, int first_head, int num_heads) const {
  std::uint64_t fewest = std::numeric_limits<std::uint64_t>::max();
  for (int h = first_head; h < first_head + num_heads; ++h) {
    fewest = std::min(fewest, counts_[head_index(layer, h)].rows);
  }
  return fewest;
}

std::uint64_t KeyMeanAccumulator::skipped_rows() const {
  std::uint64_t total = 0;
  for (const HeadCount& count : counts_) total += count.skipped;
  return total;
}

Result<std::vector<float>> KeyMeanAccumulator::means(const std::vector<int>& layers, int first_head,
                                                     int num_heads) const {
  if (Status s = check_heads(first_head, num_heads); !s.ok()) return s;
  const auto dim = static_cast<std::size_t>(head_dim_);
  const auto heads = static_cast<std::size_t>(num_heads);
  std::vector<float> means(static_cast<std::size_t>(num_layers_) * heads * dim, 0.0F);
  for (const int layer : layers) {
    if (layer < 0 || layer >= num_layers_) {
      return Status(
          StatusCode::kOutOfRange,
          fmt::format("layer {} is not one of the model's {} layers", layer, num_layers_));
    }
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t head = head_index(layer, first_head + static_cast<int>(h));
      if (counts_[head].rows < kMinCalibrationTokens) {
        return Status(
            StatusCode::kInvalidArgument,
            fmt::format("layer {}, KV head {} has seen {} tokens of keys; means need at least {}. "
                        "Send longer or more prompts before saving",
                        layer, first_head + static_cast<int>(h), counts_[head].rows,
                        kMinCalibrationTokens));
      }
      const double* sum = sums_.data() + head * dim;
      float* out = means.data() + (static_cast<std::size_t>(layer) * heads + h) * dim;
      for (std::size_t d = 0; d < dim; ++d) {
        out[d] = static_cast<float>(sum[d] / static_cast<double>(counts_[head].rows));
      }
    }
  }
  return means;
}

KeySums KeyMeanAccumulator::state(int first_head, int num_heads) const {
  KeySums out;
  const auto dim = static_cast<std::ptrdiff_t>(head_dim_);
  for (int layer = 0; layer < num_layers_; ++layer) {
    const auto begin = static_cast<std::ptrdiff_t>(head_index(layer, first_head));
    for (std::ptrdiff_t head = begin; head < begin + num_heads; ++head) {
      const HeadCount& count = counts_[static_cast<std::size_t>(head)];
      out.rows.push_back(static_cast<double>(count.rows));
      out.skipped.push_back(static_cast<double>(count.skipped));
    }
    const auto append = [&](const std::vector<double>& from, std::vector<double>* to) {
      to->insert(to->end(), from.begin() + begin * dim, from.begin() + (begin + num_heads) * dim);
    };
    append(sums_, &out.sums);
    append(squares_, &out.squares);
  }
  return out;
}

Status KeyMeanAccumulator::restore(const KeySums& state, int first_head, int num_heads) {
  if (Status s = check_heads(first_head, num_heads); !s.ok()) return s;
  const auto heads = static_cast<std::size_t>(num_layers_) * static_cast<std::size_t>(num_heads);
  const auto dim = static_cast<std::size_t>(head_dim_);
  if (state.rows.size() != heads || state.skipped.size() != heads ||
      state.sums.size() != heads * dim || state.squares.size() != heads * dim) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the saved sums hold {} heads of {} values; expected {} layers of {} heads "
                        "with head_dim {}",
                        state.rows.size(), state.sums.size(), num_layers_, num_heads, head_dim_)};
  }
  for (std::size_t i = 0; i < heads; ++i) {
    const auto layer = static_cast<int>(i / static_cast<std::size_t>(num_heads));
    const auto head = static_cast<int>(i % static_cast<std::size_t>(num_heads));
    const std::size_t to = head_index(layer, first_head + head);
    counts_[to] = {static_cast<std::uint64_t>(state.rows[i]),
                   static_cast<std::uint64_t>(state.skipped[i])};
    std::copy_n(state.sums.begin() + static_cast<std::ptrdiff_t>(i * dim), dim,
                sums_.begin() + static_cast<std::ptrdiff_t>(to * dim));
    std::copy_n(state.squares.begin() + static_cast<std::ptrdiff_t>(i * dim), dim,
                squares_.begin() + static_cast<std::ptrdiff_t>(to * dim));
  }
  return {};
}

std::vector<KeyOutlier> KeyMeanAccumulator::outliers(double ratio) const {
  std::vector<KeyOutlier> found;
  const auto dim = static_cast<std::size_t>(head_dim_);
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const std::size_t head = i / dim;
    const auto n = static_cast<double>(counts_[head].rows);
    if (counts_[head].rows < kMinCalibrationTokens) continue;
    const double mean = sums_[i] / n;
    const double deviation = std::sqrt(std::max(0.0, squares_[i] / n - mean * mean));
    if (!(std::abs(mean) > ratio * deviation) || mean == 0.0) continue;
    const auto heads = static_cast<std::size_t>(num_kv_heads_);
    found.push_back({static_cast<int>(head / heads), static_cast<int>(head % heads),
                     static_cast<int>(i % dim), mean, deviation});
  }
  std::stable_sort(found.begin(), found.end(), [](const KeyOutlier& a, const KeyOutlier& b) {
    return std::abs(a.mean) > std::abs(b.mean);
  });
  return found;
}

}  // namespace bitdecoding
