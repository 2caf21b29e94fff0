// SPDX-License-Identifier: Apache-2.0
#include "attend_accuracy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "attend/softmax.h"
#include "attend/visibility.h"
#include "backend/reference/reference.h"
#include "backend/tensor.h"
#include "numeric/bf16.h"

namespace bitdecoding::test {
namespace {

const std::vector<std::int32_t> kPages = {7,  3,  11, 1,  20, 9,  8,  2,  30, 31, 5,  6,
                                          12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24};

// Keys and values of one request and KV head as a BF16 kernel is given them.
struct Bf16Rows {
  std::vector<float> key, value;  // [position][head_dim]
};

Bf16Rows bf16_rows(const World& w, int request, int kv_head) {
  const RequestPlan& r = w.plan.requests[static_cast<std::size_t>(request)];
  const std::int64_t dim = w.options.head_dim;
  Bf16Rows rows;
  rows.key.resize(static_cast<std::size_t>(r.seq_len * dim));
  rows.value = rows.key;
  auto reference = make_reference_backend({}, w.options.order).take();
  const Status status = reference->gather(w.params, request, kv_head, 0, r.seq_len, rows.key.data(),
                                          rows.value.data());
  EXPECT_TRUE(status.ok()) << status.message();
  for (std::vector<float>* side : {&rows.key, &rows.value}) {
    for (float& x : *side) x = round_to_bf16(x);
  }
  for (std::int64_t s = 0; s < r.num_spans; ++s) {
    const ShadowSpan& span = r.spans[s];
    for (std::int64_t p = span.begin; p < span.end; ++p) {
      const int row = span.row + static_cast<int>(p - span.begin);
      for (int side = 0; side < 2; ++side) {
        const std::uint16_t* from =
            w.shadow.rows + shadow_row_index(w.layer, span.slot, kv_head, side, row);
        float* to = (side == 0 ? rows.key : rows.value).data() + p * dim;
        for (std::int64_t d = 0; d < dim; ++d) to[d] = decode_bf16(from[d]);
      }
    }
  }
  return rows;
}

void attend_row(const World& w, const Bf16Rows& rows, const float* query, std::int64_t q, int head,
                float* out) {
  const auto dim = static_cast<std::size_t>(w.options.head_dim);
  const std::int64_t begin = visible_begin(q, w.params.window_left);
  std::vector<float> scores;
  float top = w.params.attn_sink == nullptr ? -INFINITY : w.params.attn_sink[head];
  for (std::int64_t p = begin; p <= q; ++p) {
    const float* key = rows.key.data() + static_cast<std::size_t>(p) * dim;
    float sum = 0;
    for (std::size_t d = 0; d < dim; ++d) sum += query[d] * key[d];
    scores.push_back(apply_softcap(w.params.sm_scale * sum, w.params.softcap));
    top = std::max(top, scores.back());
  }
  float whole = w.params.attn_sink == nullptr ? 0.0F : std::exp(w.params.attn_sink[head] - top);
  std::fill(out, out + dim, 0.0F);
  for (std::int64_t p = begin; p <= q; ++p) {
    const float weight = std::exp(scores[static_cast<std::size_t>(p - begin)] - top);
    whole += weight;
    const float rounded = round_to_bf16(weight);
    const float* value = rows.value.data() + static_cast<std::size_t>(p) * dim;
    for (std::size_t d = 0; d < dim; ++d) out[d] += rounded * value[d];
  }
  for (std::size_t d = 0; d < dim; ++d) out[d] /= whole;
}

}  // namespace

std::vector<float> bf16_attention(World& w) {
  const int heads = w.options.num_q_heads;
  const int group = heads / w.options.num_kv_heads;
  const auto dim = static_cast<std::size_t>(w.options.head_dim);
  std::vector<float> out(static_cast<std::size_t>(w.plan.num_tokens * heads) * dim, NAN);
  for (std::size_t i = 0; i < w.plan.requests.size(); ++i) {
    const RequestPlan& r = w.plan.requests[i];
    for (int kv_head = 0; kv_head < w.options.num_kv_heads; ++kv_head) {
      const Bf16Rows rows = bf16_rows(w, static_cast<int>(i), kv_head);
      for (std::int64_t row = 0; row < r.query_len * group; ++row) {
        const std::int64_t token = r.query_begin + row / group;
        const int head = kv_head * group + static_cast<int>(row % group);
        std::vector<float> query;
        for (std::size_t d = 0; d < dim; ++d) {
          query.push_back(
              round_to_bf16(load_element(w.params.query, token, head, static_cast<int>(d))));
        }
        attend_row(w, rows, query.data(), query_position(r, row / group), head,
                   out.data() + static_cast<std::size_t>(token * heads + head) * dim);
      }
    }
  }
  return out;
}

std::vector<AccuracyCase> accuracy_cases() {
  std::vector<AccuracyCase> cases;
  const auto add = [&](std::string name, auto change) {
    AccuracyCase c;
    c.name = std::move(name);
    c.options.head_dim = 128;
    c.options.page_size = 128;
    c.options.num_q_heads = 8;
    c.options.bf16_numbers = true;
    change(&c);
    c.name = std::string(format_name(c.options.format)) + ", " + c.name;
    cases.push_back(c);
  };
  static const std::vector<float> sinks = {-1.0F, 0.5F, 1.0F, 2.0F, 3.0F, 4.0F, 5.0F, 6.0F};
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int head_dim : kHeadDims) {
      add("head_dim " + std::to_string(head_dim), [&](AccuracyCase* c) {
        c->options.format = format;
        c->options.head_dim = head_dim;
      });
    }
    add("2,900 tokens", [&](AccuracyCase* c) {
      c->options.format = format;
      c->context = 2900;
    });
    add("sharp", [&](AccuracyCase* c) {
      c->options.format = format;
      c->sharpness = 4.0F;
    });
    add("four drafts, window 500", [&](AccuracyCase* c) {
      c->options.format = format;
      c->query_len = 4;
      c->masks.window_left = 500;
    });
    add("softcap 20, learned sinks", [&](AccuracyCase* c) {
      c->options.format = format;
      c->masks.softcap = 20.0F;
      c->masks.attn_sink = sinks.data();
    });
  }
  return cases;
}

Accuracy measure_accuracy(const AccuracyCase& c,
                          const std::function<std::unique_ptr<Backend>(World*)>& make) {
  World w(c.options);
  set_masks(w, c.masks);
  w.params.sm_scale *= c.sharpness;
  w.add_sequence(kPages);
  w.backend = make(&w);
  Accuracy accuracy;
  if (w.backend == nullptr) return accuracy;
  // The prompt's own attention is not asked for.
  Status status = w.plan_step({{0, iota_tokens(0, c.context)}});
  if (status.ok()) status = w.write();
  EXPECT_TRUE(status.ok()) << status.message();
  const StepResult ours = w.step({{0, iota_tokens(50000, c.query_len)}});
  EXPECT_TRUE(ours.status.ok()) << ours.status.message();
  std::unique_ptr<Backend> kept = std::move(w.backend);
  w.backend = make_reference_backend({}, c.options.order).take();
  w.params.arithmetic = Arithmetic::kWide;
  const StepResult exact = w.attend();
  EXPECT_TRUE(exact.status.ok()) << exact.status.message();
  const std::vector<float> bf16 = bf16_attention(w);
  accuracy.ours = relative_error(ours.output, exact.output, 0, exact.output.size());
  accuracy.bf16 = relative_error(bf16, exact.output, 0, exact.output.size());
  w.backend = std::move(kept);
  return accuracy;
}

}  // namespace bitdecoding::test
