// SPDX-License-Identifier: Apache-2.0
// Attend: one query row and head at a time; scores, softmax and output in double precision.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "attend/softmax.h"
#include "attend/visibility.h"
#include "backend/reference/head_rows.h"
#include "backend/reference/verbs.h"
#include "backend/tensor.h"
#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "scale/probability.h"
#include "transform/hadamard.h"
#include "transform/two_term.h"

namespace bitdecoding::reference {
namespace {

constexpr double kEmpty = -std::numeric_limits<double>::infinity();
constexpr int kProbabilityBlock = 16;

// One query row of one head: in the original space for BF16 rows, and as pages see it.
struct Query {
  std::vector<double> plain;
  std::vector<double> paged;  // rotated; in fp4 arithmetic the sum of its NVFP4 terms
  double shift_dot = 0;       // q . key_shift, added back to scores of pages
};

// Positions of one kind of source with their scores.
struct Part {
  std::vector<std::int64_t> positions;
  std::vector<double> scores;
  std::vector<const Segment*> segments;
};

// A normalized partial result.
struct Partial {
  std::vector<double> output;
  double lse = kEmpty;
};

// hadamard.h's rotation without its roundings: the same matrix, in double precision.
void rotate(std::vector<double>* x) {
  const int block = hadamard_block(static_cast<int>(x->size()));
  const double scale = hadamard_scale(block);
  for (std::size_t base = 0; base < x->size(); base += static_cast<std::size_t>(block)) {
    for (int stride = 1; stride < block; stride *= 2) {
      for (int i = 0; i < block; ++i) {
        if ((i & stride) != 0) continue;
        double& a = (*x)[base + static_cast<std::size_t>(i)];
        double& b = (*x)[base + static_cast<std::size_t>(i + stride)];
        const double sum = a + b;
        b = a - b;
        a = sum;
      }
    }
  }
  for (double& v : *x) v *= scale;
}

Query load_query(const AttendParams& p, std::int64_t token, int q_head, int kv_head) {
  const LayerConfig& layer = *p.layer;
  const int head_dim = layer.geometry.head_dim;
  const bool tiled = is_tiled(layer.geometry.format);
  std::vector<float> q(static_cast<std::size_t>(head_dim));
  for (int dim = 0; dim < head_dim; ++dim) {
    q[static_cast<std::size_t>(dim)] = load_element(p.query, token, q_head, dim);
  }
  Query query;
  query.plain.assign(q.begin(), q.end());
  query.paged = query.plain;
  if (layer.key_shift != nullptr) {
    const float* shift = layer.key_shift + std::int64_t{kv_head} * head_dim;
    for (int dim = 0; dim < head_dim; ++dim) {
      query.shift_dot += query.plain[static_cast<std::size_t>(dim)] * shift[dim];
    }
  }
  if (p.arithmetic == Arithmetic::kFp4) {
    // Codes hold no NaN: a query that is not finite shows through its sum.
    for (const float x : q) query.shift_dot += 0.0 * double{x};
    if (layer.hadamard) hadamard(q.data(), head_dim);
    std::vector<float> one(q.size());
    std::vector<float> two(q.size());
    split_two_term(q.data(), head_dim, p.query_terms, one.data(), two.data());
    for (std::size_t i = 0; i < q.size(); ++i) query.paged[i] = double{one[i]} + double{two[i]};
  } else if (tiled && layer.hadamard) {
    rotate(&query.paged);
  }
  return query;
}

double score_of(const AttendParams& p, double dot) {
  return apply_softcap<double>(p.sm_scale * dot, p.softcap);
}

template <class Row>
double dot(const std::vector<double>& q, const Row* k) {
  double sum = 0;
  for (std::size_t i = 0; i < q.size(); ++i) sum += q[i] * static_cast<double>(k[i]);
  return sum;
}

void collect_scores(const AttendParams& p, const Query& query, const std::vector<Segment>& segments,
                    HeadRows* rows, Part* page, Part* bf16) {
  std::vector<double> key(query.plain.size());
  for (const Segment& s : segments) {
    for (std::int64_t pos = s.begin; pos < s.end; ++pos) {
      Part* part = s.source == Source::kPage ? page : bf16;
      double product = 0;
      if (s.source == Source::kPage) {
        product = dot(query.paged, rows->page_key(pos)) + query.shift_dot;
      } else {
        rows->bf16_row(s, pos, 0, key.data());
        product = dot(query.plain, key.data());
      }
      part->positions.push_back(pos);
      part->scores.push_back(score_of(p, product));
      part->segments.push_back(&s);
    }
  }
}

// c * P in blocks of 16 tokens, aligned by position and quantized to NVFP4; positions that are not
// read from pages count as zero. Returns the dequantized P: the numerator and the denominator both
// use it.
std::vector<double> quantize_probabilities(const AttendParams& p, const Part& part,
                                           const std::vector<double>& weights) {
  const ProbabilityRule rule{p.probability_c, p.probability_tau};
  std::vector<double> out(weights.size());
  for (std::size_t i = 0; i < weights.size();) {
    const std::int64_t block_begin = part.positions[i] / kProbabilityBlock * kProbabilityBlock;
    std::array<float, kProbabilityBlock> cp{};
    std::size_t end = i;
    while (end < weights.size() && part.positions[end] < block_begin + kProbabilityBlock) {
      cp[static_cast<std::size_t>(part.positions[end] - block_begin)] =
          rule.c * static_cast<float>(weights[end]);
      ++end;
    }
    const float scale = decode_e4m3(rule.choose(cp.data(), kProbabilityBlock));
    for (; i < end; ++i) {
      const float x = cp[static_cast<std::size_t>(part.positions[i] - block_begin)];
      out[i] = scale == 0.0F
                   ? 0.0
                   : double{decode_e2m1(encode_e2m1(x / scale))} * double{scale} / double{rule.c};
    }
  }
  return out;
}

void poison(Partial* result) {
  result->lse = std::numeric_limits<double>::quiet_NaN();
  for (double& v : result->output) v = result->lse;
}

Partial reduce(const AttendParams& p, const Part& part, bool paged, int kv_head, HeadRows* rows) {
  const auto head_dim = static_cast<std::size_t>(p.layer->geometry.head_dim);
  Partial result;
  result.output.assign(head_dim, 0.0);
  if (part.scores.empty()) return result;
  // A corrupt scale or a query that is not finite must show, whatever the arithmetic does with it.
  for (const double s : part.scores) {
    if (!std::isfinite(s)) {
      poison(&result);
      return result;
    }
  }
  const double top = *std::max_element(part.scores.begin(), part.scores.end());
  std::vector<double> weights;
  for (const double s : part.scores) weights.push_back(std::exp(s - top));
  if (paged && p.arithmetic == Arithmetic::kFp4) {
    weights = quantize_probabilities(p, part, weights);
  }
  double sum = 0;
  std::vector<double> value(head_dim);
  const float* shift = p.layer->value_shift == nullptr
                           ? nullptr
                           : p.layer->value_shift + static_cast<std::size_t>(kv_head) * head_dim;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    sum += weights[i];
    if (paged) {
      const float* v = rows->page_value(part.positions[i]);
      std::copy(v, v + head_dim, value.begin());
      for (std::size_t d = 0; d < head_dim && shift != nullptr; ++d) value[d] += double{shift[d]};
    } else {
      rows->bf16_row(*part.segments[i], part.positions[i], 1, value.data());
    }
    for (std::size_t d = 0; d < head_dim; ++d) result.output[d] += weights[i] * value[d];
  }
  if (sum == 0.0) return {std::vector<double>(head_dim, 0.0), kEmpty};
  for (double& v : result.output) v /= sum;
  result.lse = top + std::log(sum);
  return result;
}

void attend_row(const AttendParams& p, std::int64_t token, int q_head, int kv_head,
                const std::vector<Segment>& segments, HeadRows* rows) {
  Part page;
  Part bf16;
  Partial a;
  Partial b;
  const auto head_dim = static_cast<std::size_t>(p.layer->geometry.head_dim);
  a.output.assign(head_dim, 0.0);
  b.output = a.output;
  double sink_lse = kEmpty;
  if (!segments.empty()) {
    const Query query = load_query(p, token, q_head, kv_head);
    collect_scores(p, query, segments, rows, &page, &bf16);
    a = reduce(p, page, true, kv_head, rows);
    b = reduce(p, bf16, false, kv_head, rows);
    if (p.attn_sink != nullptr) sink_lse = p.attn_sink[q_head];
  }
  const MergeWeights<double> merged = merge_weights(a.lse, b.lse);
  // The learned sink is a part whose value is zero; it enters the denominator here, once.
  const MergeWeights<double> whole = merge_weights(merged.lse, sink_lse);
  const std::int64_t base = token * p.stride_output_token + q_head * p.stride_output_head;
  for (std::size_t d = 0; d < head_dim; ++d) {
    // Empty parts have weight 0 and output 0; a poisoned part is NaN in both.
    const double x = whole.a * (merged.a * a.output[d] + merged.b * b.output[d]);
    store_element(p.output, p.output_dtype, base + static_cast<std::int64_t>(d),
                  static_cast<float>(x));
  }
  if (p.lse != nullptr) {
    p.lse[token * p.layer->num_q_heads + q_head] = static_cast<float>(whole.lse);
  }
}

}  // namespace

void attend(const AttendParams& params) {
  const LayerConfig& layer = *params.layer;
  const int group = layer.num_q_heads / layer.num_kv_heads;
  std::vector<Segment> segments;
  for (const RequestPlan& request : params.plan->requests) {
    if (request.query_len == 0) continue;
    for (int kv_head = 0; kv_head < layer.num_kv_heads; ++kv_head) {
      HeadRows rows(params, request, kv_head);
      for (std::int64_t i = 0; i < request.query_len; ++i) {
        visible_segments(params.plan->rule, request, query_position(request, i), params.window_left,
                         &segments);
        for (int g = 0; g < group; ++g) {
          attend_row(params, request.query_begin + i, kv_head * group + g, kv_head, segments,
                     &rows);
        }
      }
      if (params.corrupt_scales != nullptr) {
        add_relaxed(params.corrupt_scales, rows.corrupt_scales());
      }
    }
  }
}

}  // namespace bitdecoding::reference
