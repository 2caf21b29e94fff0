// SPDX-License-Identifier: Apache-2.0
// Calibration: static key means observed while serving, and the threshold tau of the probability
// scale rule.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bitdecoding/quantize.h"
#include "bitdecoding/status.h"

#pragma GCC visibility push(default)
namespace bitdecoding {

// Fewer tokens than this give no mean worth subtracting.
inline constexpr std::uint64_t kMinCalibrationTokens = 128;

// A channel whose mean stands far outside its own spread: in its scale block it takes all the
// codes, and only the key shift brings the other channels back.
struct KeyOutlier {
  int layer = 0;
  int kv_head = 0;
  int dim = 0;
  double mean = 0;
  double deviation = 0;  // standard deviation over the observed tokens
};

// Per-channel sums of K after RoPE, [layers][kv_heads][head_dim]. Values are rounded to BF16
// first, as the quantizer does; sums of such values are exact in double (up to 2^44 between the
// smallest and the sum), so the order of batches does not matter. A row of a head that holds NaN
// or infinity is skipped and counted. add() may run at once for different layers only.
class KeyMeanAccumulator {
 public:
  static Result<std::unique_ptr<KeyMeanAccumulator>> make(int num_layers, int num_kv_heads,
                                                          int head_dim);

  // Rows [0, num_rows) of heads [first_head, first_head + num_heads); head h of `key` is head
  // first_head + h of the model. Rows with slots[row] < 0 are padding and left out; slots may be
  // null.
  Status add(int layer, int first_head, int num_heads, const TensorView& key, std::int64_t num_rows,
             const std::int64_t* slots);

  int num_layers() const { return num_layers_; }
  int num_kv_heads() const { return num_kv_heads_; }
  int head_dim() const { return head_dim_; }
  // The fewest rows that any of the heads [first_head, first_head + num_heads) has.
  std::uint64_t tokens(int layer, int first_head, int num_heads) const;
  std::uint64_t skipped_rows() const;

  // Means of heads [first_head, first_head + num_heads) of `layers`, as [num_layers][num_heads]
  // [head_dim]; other layers are zero. kInvalidArgument naming the layer unless each of `layers`
  // has kMinCalibrationTokens.
  Result<std::vector<float>> means(const std::vector<int>& layers, int first_head,
                                   int num_heads) const;
  // Channels with |mean| > ratio * deviation, largest |mean| first.
  std::vector<KeyOutlier> outliers(double ratio = 8.0) const;

 private:
  struct HeadCount {
    std::uint64_t rows = 0;
    std::uint64_t skipped = 0;
  };

  KeyMeanAccumulator(int num_layers, int num_kv_heads, int head_dim);
  std::size_t head_index(int layer, int head) const {
    return static_cast<std::size_t>(layer) * static_cast<std::size_t>(num_kv_heads_) +
           static_cast<std::size_t>(head);
  }

  int num_layers_;
  int num_kv_heads_;
  int head_dim_;
  std::vector<HeadCount> counts_;  // [layers][kv_heads]
  std::vector<double> sums_;       // [layers][kv_heads][head_dim]
  std::vector<double> squares_;    // the same shape
};

struct TauChoice {
  float tau = 0;               // halfway between two E4M3 codes, or 0 = plain amax6
  double error = 0;            // squared error of all blocks with it
  double error_amax6 = 0;      // and without it
  std::uint64_t blocks = 0;    // blocks observed
  std::uint64_t affected = 0;  // blocks that tau scales by max/2
};

// Chooses tau of `amax2_or_amax6` from observed probabilities. A block is decided by its maximum,
// rounded to E4M3, alone, and max/2 can only win among the smallest codes: the errors of both
// scales are summed for each of the codes 0..16, and every threshold between them is then known.
class TauCalibrator {
 public:
  static constexpr int kMaxCode = 16;

  // `c` multiplies probabilities before they are quantized, as in the recipe.
  explicit TauCalibrator(float c) : c_(c) {}

  // One row of weights exp(score - maximum) over consecutive tokens that begin a block of 16; the
  // last block may be short. NaN and negative values count as zero.
  void add_row(const float* probabilities, std::int64_t n);
  TauChoice choose() const;

 private:
  float c_;
  std::uint64_t blocks_ = 0;
  double error_above_ = 0;                          // blocks with larger maxima: always max/6
  std::array<double, kMaxCode + 1> error_half_{};   // under max/2, by code of the maximum
  std::array<double, kMaxCode + 1> error_sixth_{};  // under max/6
  std::array<std::uint64_t, kMaxCode + 1> count_{};
};

}  // namespace bitdecoding
#pragma GCC visibility pop
