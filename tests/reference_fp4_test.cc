// SPDX-License-Identifier: Apache-2.0
// fp4 arithmetic: what FP4 tensor cores compute, against a second writing of it.
#include <gtest/gtest.h>

#include <cmath>

#include "dense_oracle.h"
#include "page/address.h"
#include "transform/hadamard.h"
#include "transform/two_term.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};

double nearest_e2m1(double x) {
  const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const double d = std::fabs(values[i] - x);
    const double e = std::fabs(best - x);
    if (d < e || (d == e && i % 2 == 0)) best = values[i];
  }
  return best;
}

// E4M3 of a non-negative number, by search.
double nearest_e4m3(double x) {
  if (x >= 448) return 448;
  double best = 0;
  for (int code = 1; code < 127; ++code) {
    const double v = decode_e4m3(static_cast<std::uint8_t>(code));
    const double d = std::fabs(v - x);
    const double e = std::fabs(best - x);
    if (d < e || (d == e && code % 2 == 0)) best = v;
  }
  return best;
}

struct Settings {
  Format format = Format::kNvfp4;
  int terms = 2;
  float c = 8.0F;
  float tau = 21.0F / 1024.0F;
  int window = -1;
  float softcap = 0.0F;
  const float* attn_sink = nullptr;
  float sm_scale = 0.125F;
};

class Fp4Oracle {
 public:
  Fp4Oracle(World& w, int sequence, const Settings& settings)
      : w_(w), sequence_(sequence), s_(settings), rows_(w) {}

  // The query at position q of head h; positions [bf16_from, q] and [0, sink) are BF16.
  Dense attend(std::int64_t q, int h, std::int64_t bf16_from) {
    const int kv = h / (w_.options.num_q_heads / w_.options.num_kv_heads);
    const std::int64_t begin = s_.window < 0 ? 0 : std::max<std::int64_t>(0, q - s_.window);
    std::vector<std::int64_t> paged;
    std::vector<std::int64_t> exact;
    for (std::int64_t p = begin; p <= q; ++p) {
      (p < w_.options.sink_tokens || p >= bf16_from ? exact : paged).push_back(p);
    }
    std::vector<double> paged_scores;
    std::vector<double> exact_scores;
    for (const auto p : paged) paged_scores.push_back(cap(s_.sm_scale * paged_dot(p, q, h, kv)));
    for (const auto p : exact) exact_scores.push_back(cap(s_.sm_scale * exact_dot(p, q, h, kv)));
    const std::vector<double> weights = probabilities(paged, paged_scores);
    double top = -INFINITY;
    for (const double s : paged_scores) top = std::max(top, s);
    // One softmax over everything, with the FP4 part's own maximum inside its weights.
    double m = s_.attn_sink != nullptr ? s_.attn_sink[h] : -INFINITY;
    for (const double s : exact_scores) m = std::max(m, s);
    m = std::max(m, top);
    Dense out;
    out.output.assign(static_cast<std::size_t>(w_.options.head_dim), 0.0);
    double sum = s_.attn_sink != nullptr ? std::exp(s_.attn_sink[h] - m) : 0.0;
    for (std::size_t i = 0; i < paged.size(); ++i) {
      add(&out, &sum, weights[i] * std::exp(top - m), rows_.page_row(sequence_, paged[i], kv, 1));
    }
    for (std::size_t i = 0; i < exact.size(); ++i) {
      std::vector<double> v;
      for (int d = 0; d < w_.options.head_dim; ++d) {
        v.push_back(round_to_bf16(w_.value_of(token(exact[i]), exact[i], kv, d)));
      }
      add(&out, &sum, std::exp(exact_scores[i] - m), v);
    }
    for (double& x : out.output) x /= sum;
    out.lse = m + std::log(sum);
    return out;
  }

 private:
  std::uint32_t token(std::int64_t p) const {
    return w_.sequences[static_cast<std::size_t>(sequence_)].tokens[static_cast<std::size_t>(p)];
  }
  double cap(double s) const { return s_.softcap > 0 ? s_.softcap * std::tanh(s / s_.softcap) : s; }

  static void add(Dense* out, double* sum, double weight, const std::vector<double>& v) {
    *sum += weight;
    for (std::size_t d = 0; d < v.size(); ++d) out->output[d] += weight * v[d];
  }

  double paged_dot(std::int64_t p, std::int64_t q, int h, int kv) const {
    const PageGeometry& g = w_.layer.geometry;
    std::vector<float> x;
    double shift = 0;
    for (int d = 0; d < g.head_dim; ++d) {
      x.push_back(w_.query_of(token(q), q, h, d));
      shift += double{x.back()} * w_.shift_of(kv, d);
    }
    hadamard(x.data(), g.head_dim);
    std::vector<float> one(x.size());
    std::vector<float> two(x.size());
    split_two_term(x.data(), g.head_dim, s_.terms, one.data(), two.data());
    const std::uint8_t* head = w_.head_bytes(kPages[static_cast<std::size_t>(p / g.page_size)], kv);
    std::uint64_t corrupt = 0;
    double first = 0;
    double second = 0;
    for (int d = 0; d < g.head_dim; ++d) {
      const double k =
          read_element(g, head, Side::kKey, static_cast<int>(p % g.page_size), d, 1.0F, &corrupt);
      first += one[static_cast<std::size_t>(d)] * k;
      second += two[static_cast<std::size_t>(d)] * k;
    }
    return first + second + shift;
  }

  double exact_dot(std::int64_t p, std::int64_t q, int h, int kv) const {
    double sum = 0;
    for (int d = 0; d < w_.options.head_dim; ++d) {
      sum += double{w_.query_of(token(q), q, h, d)} * round_to_bf16(w_.key_of(token(p), p, kv, d));
    }
    return sum;
  }

  std::vector<double> probabilities(const std::vector<std::int64_t>& positions,
                                    const std::vector<double>& scores) const {
    double top = -INFINITY;
    for (const double s : scores) top = std::max(top, s);
    std::vector<double> out(scores.size());
    for (std::size_t i = 0; i < scores.size(); ++i) {
      float amax = 0;
      for (std::size_t j = 0; j < scores.size(); ++j) {
        if (positions[j] / 16 != positions[i] / 16) continue;
        amax = std::max(amax, s_.c * static_cast<float>(std::exp(scores[j] - top)));
      }
      const double divisor = nearest_e4m3(amax) <= s_.tau ? 2.0 : 6.0;
      const double scale = nearest_e4m3(static_cast<float>(amax / static_cast<float>(divisor)));
      const float cp = s_.c * static_cast<float>(std::exp(scores[i] - top));
      const double quotient = scale == 0 ? 0.0 : cp / static_cast<float>(scale);
      out[i] = nearest_e2m1(quotient) * scale / s_.c;
    }
    return out;
  }

  World& w_;
  const int sequence_;
  const Settings s_;
  DenseOracle rows_;
};

void apply(World* w, const Settings& s) {
  w->params.query_terms = s.terms;
  w->params.probability_c = s.c;
  w->params.probability_tau = s.tau;
  w->params.window_left = s.window;
  w->params.softcap = s.softcap;
  w->params.attn_sink = s.attn_sink;
  w->params.sm_scale = s.sm_scale;
}

void compare(const Settings& s) {
  WorldOptions o;
  o.format = s.format;
  o.arithmetic = Arithmetic::kFp4;
  o.tail_tokens = 20;
  World w(o);
  apply(&w, s);
  const int id = w.add_sequence(kPages);
  ASSERT_TRUE(w.step({{id, iota_tokens(0, 150)}}).status.ok());
  const StepResult r = w.step({{id, {150, 151, 152}}});
  ASSERT_TRUE(r.status.ok()) << r.status.message();
  Fp4Oracle oracle(w, id, s);
  const std::int64_t group = w.layer.geometry.group_tokens;
  for (std::int64_t i = 0; i < 3; ++i) {
    for (int h = 0; h < o.num_q_heads; ++h) {
      const Dense dense = oracle.attend(150 + i, h, (153 - 20) / group * group);
      const auto at = static_cast<std::size_t>(i * o.num_q_heads + h);
      for (int d = 0; d < o.head_dim; ++d) {
        const double want = dense.output[static_cast<std::size_t>(d)];
        const double got = r.output[at * 64 + static_cast<std::size_t>(d)];
        // The output's one rounding; the codes are equal.
        ASSERT_TRUE(std::fabs(got - want) <= 1.01 * 0x1p-24 * std::fabs(want) + 1e-12)
            << got << " against " << want;
      }
      ASSERT_TRUE(std::fabs(r.lse[at] - dense.lse) <=
                  1.01 * 0x1p-24 * std::fabs(dense.lse) + 1e-12);
    }
  }
}

TEST(Fp4, EqualsItsDefinition) {
  const std::vector<float> sinks = {0.0F, -2.0F, 3.0F, 9.0F};
  for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
    for (const float sm_scale : {0.02F, 0.125F, 0.5F}) {
      compare({f, 2, 8.0F, 21.0F / 1024.0F, -1, 0.0F, nullptr, sm_scale});
      compare({f, 1, 1.0F, 0.0F, -1, 0.0F, nullptr, sm_scale});
      compare({f, 2, 1536.0F, 448.0F, 77, 20.0F, sinks.data(), sm_scale});
      if (HasFatalFailure()) return;
    }
  }
}

double relative_error(Format format, const Settings& s) {
  WorldOptions o;
  o.format = format;
  o.tail_tokens = 0;
  o.arithmetic = Arithmetic::kFp4;
  World w(o);
  apply(&w, s);
  const int id = w.add_sequence(kPages);
  EXPECT_TRUE(w.step({{id, iota_tokens(0, 400)}}).status.ok());
  const StepResult fp4 = w.step({{id, {400, 401}}});
  w.params.arithmetic = Arithmetic::kWide;
  const StepResult wide = w.attend();
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < wide.output.size(); ++i) {
    error += std::pow(double{fp4.output[i]} - wide.output[i], 2);
    norm += std::pow(double{wide.output[i]}, 2);
  }
  return std::sqrt(error / norm);
}

TEST(Fp4, SecondTermAndFactorHelp) {
  Settings s;
  const double two = relative_error(Format::kNvfp4, s);
  s.terms = 1;
  const double one = relative_error(Format::kNvfp4, s);
  EXPECT_LE(two, one);
  // P's own rounding: about 0.1 of each probability, averaged over some hundred tokens whose
  // weighted values cancel no better than at random, on both sides of the ratio.
  EXPECT_LE(two, 0.2);
  s = Settings();
  s.c = 1e-6F;  // every block underflows: the part has no mass, and nothing is divided by zero
  EXPECT_TRUE(std::isfinite(relative_error(Format::kNvfp4, s)));
}

TEST(Fp4, ABigSinkDoesNotPushPagesUnderTheFloor) {
  // A sink with nearly all the mass is BF16; the FP4 part keeps its own maximum, so its relative
  // probabilities are the same as without the sink.
  WorldOptions o;
  o.arithmetic = Arithmetic::kFp4;
  o.tail_tokens = 0;
  World w(o);
  std::vector<float> sinks(4, 30.0F);
  const int id = w.add_sequence(kPages);
  ASSERT_TRUE(w.step({{id, iota_tokens(0, 200)}}).status.ok());
  ASSERT_TRUE(w.plan_step({{id, {200}}}).ok());
  ASSERT_TRUE(w.write().ok());
  const StepResult plain = w.attend();
  w.params.attn_sink = sinks.data();
  const StepResult sunk = w.attend();
  for (std::size_t h = 0; h < 4; ++h) {
    const double factor = std::exp(double{plain.lse[h]} - sunk.lse[h]);
    EXPECT_LT(factor, 1e-8);
    for (std::size_t d = 0; d < 64; ++d) {
      const double want = plain.output[h * 64 + d] * factor;
      // lse is rounded to float32: 2^-24 * 30 in the exponent.
      EXPECT_TRUE(std::fabs(sunk.output[h * 64 + d] - want) <= 1e-5 * std::fabs(want));
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
