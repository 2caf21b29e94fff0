// SPDX-License-Identifier: Apache-2.0
// Calibration: static key means observed while serving, and the threshold tau of the probability
// scale rule.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
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

// Where a row of keys held NaN or infinity.
struct NonFiniteKey {
  int layer = 0;
  int kv_head = 0;
};

// All that key means are made of, [layers][kv_heads] and [layers][kv_heads][head_dim]: what is
// saved to go on later, and added up over the ranks of a tensor-parallel model.
struct KeySums {
  std::vector<double> rows;     // tokens, a head
  std::vector<double> skipped;  // rows that were not finite, a head
  std::vector<double> sums;
  std::vector<double> squares;
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
  // The first of them since the last call, in the order of observation.
  std::optional<NonFiniteKey> take_non_finite() { return std::exchange(first_non_finite_, {}); }

  // What heads [first_head, first_head + num_heads) have summed, and the way back: the sums replace
  // those that are there. kInvalidArgument when the sizes are not those of so many heads.
  KeySums state(int first_head, int num_heads) const;
  Status restore(const KeySums& state, int first_head, int num_heads);

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

  Status check_heads(int first_head, int num_heads) const;
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
  std::optional<NonFiniteKey> first_non_finite_;
};

struct TauChoice {
  float tau = 0;               // halfway between two E4M3 codes, or 0 = plain amax6
  double error = 0;            // squared error of all blocks with it
  double error_amax6 = 0;      // and without it
  double lost = 0;             // share of the mass in blocks that get scale 0, with it
  double lost_amax6 = 0;       // and without it
  std::uint64_t blocks = 0;    // blocks observed
  std::uint64_t affected = 0;  // blocks that tau scales by max/2
};

inline constexpr int kE4m3Codes = 127;  // 0 to 448, without NaN

// Blocks of c * P by the E4M3 code of their maximum, which alone decides between max/2 and max/6;
// and for each code what both scales would do. Errors and mass count in units of P itself, so that
// several c can be compared. Sums of histograms are histograms.
struct ProbabilityHistogram {
  using Codes = std::array<double, kE4m3Codes>;
  static constexpr int kRows = 5;
  std::array<Codes, kRows> rows{};
  double mass = 0;

  Codes& count() { return rows[0]; }
  Codes& error_sixth() { return rows[1]; }
  Codes& error_half() { return rows[2]; }
  Codes& lost_sixth() { return rows[3]; }  // mass of blocks that get scale 0
  Codes& lost_half() { return rows[4]; }

  void add(const ProbabilityHistogram& other);
  // The threshold with the smallest summed squared error; the smaller one when they tie.
  TauChoice choose() const;
  // What a given threshold does.
  TauChoice at(float tau) const;
};

// Chooses tau of `amax2_or_amax6` from observed probabilities.
class TauCalibrator {
 public:
  static constexpr int kMaxCode = kE4m3Codes - 1;

  // `c` multiplies probabilities before they are quantized, as in the recipe.
  explicit TauCalibrator(float c) : c_(c) {}

  // One row of weights exp(score - maximum) over consecutive tokens that begin a block of 16; the
  // last block may be short. NaN and negative values count as zero.
  void add_row(const float* probabilities, std::int64_t n);
  TauChoice choose() const { return histogram_.choose(); }
  float c() const { return c_; }
  ProbabilityHistogram& histogram() { return histogram_; }
  const ProbabilityHistogram& histogram() const { return histogram_; }

 private:
  float c_;
  ProbabilityHistogram histogram_;
};

// The factors c that calibration compares: 1 and 8 of the method, and six times a power of two up
// to the largest product, 6 * 448. With c = 8 the largest probability, 1, gets the scale 8/6, which
// is no E4M3 value, and comes back as 1.03; with c/6 an E4M3 value it comes back as 1.
inline constexpr std::array<float, 12> kCalibratedFactors = {1,  8,   6,   12,  24,   48,
                                                             96, 192, 384, 768, 1536, 2688};

}  // namespace bitdecoding
#pragma GCC visibility pop
