// SPDX-License-Identifier: Apache-2.0
#include "score/kl.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>

#include "score/statistics.h"

namespace bitdecoding::eval {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Softmax {
  double maximum = -std::numeric_limits<double>::infinity();
  std::size_t top = 0;
  double log_sum = kNan;  // log sum exp(x - maximum)
};

Softmax softmax_of(const float* row, std::size_t size) {
  Softmax out;
  bool valid = size > 0;
  for (std::size_t i = 0; i < size; ++i) {
    const auto x = static_cast<double>(row[i]);
    if (std::isnan(x) || x == std::numeric_limits<double>::infinity()) valid = false;
    if (x > out.maximum) {
      out.maximum = x;
      out.top = i;
    }
  }
  if (!valid || !std::isfinite(out.maximum)) return out;
  double sum = 0.0;
  for (std::size_t i = 0; i < size; ++i) sum += std::exp(static_cast<double>(row[i]) - out.maximum);
  out.log_sum = std::log(sum);
  return out;
}

Status mismatch(const std::string& what) {
  return {StatusCode::kInvalidArgument,
          fmt::format("The two captures of logits do not belong together: {}. Both must come from "
                      "the same prompt and model, and hold every position once.",
                      what)};
}

Status check_pair(const LogitsFile& a, const LogitsFile& b) {
  if (a.vocab_size() != b.vocab_size()) {
    return mismatch(fmt::format("{} and {} logits a row", a.vocab_size(), b.vocab_size()));
  }
  if (a.rows() != b.rows() || a.rows() == 0) {
    return mismatch(fmt::format("{} and {} rows", a.rows(), b.rows()));
  }
  const int first = a.row(0).position;
  for (std::size_t i = 0; i < a.rows(); ++i) {
    const LogitsRow x = a.row(i);
    const LogitsRow y = b.row(i);
    const int position = first + static_cast<int>(i);
    if (x.position != position || y.position != position) {
      return mismatch(fmt::format("row {} is of position {} and {}", i, x.position, y.position));
    }
    if (x.token != y.token) {
      return mismatch(
          fmt::format("at position {} the next token is {} and {}", i, x.token, y.token));
    }
  }
  return {};
}

}  // namespace

RowDivergence row_divergence(const float* reference, const float* other, std::size_t vocab_size) {
  const Softmax p = softmax_of(reference, vocab_size);
  const Softmax q = softmax_of(other, vocab_size);
  RowDivergence out;
  out.same_top = p.top == q.top;
  out.kl = kNan;
  if (std::isnan(p.log_sum) || std::isnan(q.log_sum)) return out;
  double sum = 0.0;
  for (std::size_t i = 0; i < vocab_size; ++i) {
    const double log_p = static_cast<double>(reference[i]) - p.maximum - p.log_sum;
    const double probability = std::exp(log_p);
    if (probability == 0.0) continue;  // 0 log 0 = 0, whatever q
    sum += probability * (log_p - (static_cast<double>(other[i]) - q.maximum - q.log_sum));
  }
  // The exact value is not negative; equal rows may round to -1e-17.
  out.kl = std::max(sum, 0.0);
  return out;
}

Result<Divergence> compare_logits(const LogitsFile& reference, const LogitsFile& other,
                                  std::size_t first_scored, int threads) {
  if (Status status = check_pair(reference, other); !status.ok()) return status;
  const std::size_t rows = reference.rows();
  const auto first_position = static_cast<std::size_t>(std::max(0, reference.row(0).position));
  if (first_scored < first_position || first_scored >= first_position + rows) {
    return mismatch(fmt::format("scoring begins at position {}, and they hold {} to {}",
                                first_scored, first_position, first_position + rows - 1));
  }
  const std::size_t skipped = first_scored - first_position;
  Divergence out;
  out.kl.resize(rows);
  std::vector<char> same(rows, 0);
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < rows; i = next++) {
      const RowDivergence row =
          row_divergence(reference.row(i).logits, other.row(i).logits, reference.vocab_size());
      out.kl[i] = row.kl;
      same[i] = row.same_top ? 1 : 0;
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();

  const std::vector<double> scored(out.kl.begin() + static_cast<std::ptrdiff_t>(skipped),
                                   out.kl.end());
  const auto bad =
      std::find_if(scored.begin(), scored.end(), [](double x) { return std::isnan(x); });
  if (bad != scored.end()) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("The logits at position {} hold a NaN or an infinity.",
                              first_scored + static_cast<std::size_t>(bad - scored.begin())));
  }
  out.first_scored = first_scored;
  out.scored_tokens = scored.size();
  out.mean = mean(scored);
  out.median = quantile(scored, 0.5);
  out.p99 = quantile(scored, 0.99);
  out.max = quantile(scored, 1.0);
  out.top1_agreement = static_cast<double>(std::count(
                           same.begin() + static_cast<std::ptrdiff_t>(skipped), same.end(), 1)) /
                       static_cast<double>(scored.size());
  return out;
}

}  // namespace bitdecoding::eval
