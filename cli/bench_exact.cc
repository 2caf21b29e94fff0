// SPDX-License-Identifier: Apache-2.0
#include "bench_exact.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace bitdecoding::cli {
namespace {

constexpr std::int64_t kQueryRows = 3;  // of one pair: the first, one between and the last

struct Source {
  int request = 0;
  int kv_head = 0;
  std::vector<float> key, value;  // [positions][head_dim]
};

void read_spans(const Scene& scene, const RequestPlan& request, Source* source) {
  const LayerConfig& layer = scene.layer();
  const int dim = layer.geometry.head_dim;
  const std::int64_t head_rows = std::int64_t{2} * layer.geometry.group_tokens * dim;
  for (std::int64_t i = 0; i < request.num_spans; ++i) {
    const ShadowSpan& span = request.spans[i];
    const std::uint16_t* slot =
        scene.shadow().rows +
        (std::int64_t{span.slot} * layer.num_kv_heads + source->kv_head) * head_rows;
    for (std::int64_t p = span.begin; p < span.end; ++p) {
      const std::uint16_t* key = slot + (span.row + p - span.begin) * dim;
      const std::uint16_t* value = key + std::int64_t{layer.geometry.group_tokens} * dim;
      for (int d = 0; d < dim; ++d) {
        const auto i_out = static_cast<std::size_t>(p * dim + d);
        source->key[i_out] = std::bit_cast<float>(static_cast<std::uint32_t>(key[d]) << 16);
        source->value[i_out] = std::bit_cast<float>(static_cast<std::uint32_t>(value[d]) << 16);
      }
    }
  }
}

// A prefilled chunk attends to its own rows as they came.
void read_chunk(const Scene& scene, const RequestPlan& request, Source* source) {
  if (request.query_len <= kMaxDecodeQueries) return;
  const int dim = scene.layer().geometry.head_dim;
  const std::int64_t first = request.seq_len - request.query_len;
  for (std::int64_t i = 0; i < request.query_len; ++i) {
    for (int d = 0; d < dim; ++d) {
      const auto out = static_cast<std::size_t>((first + i) * dim + d);
      source->key[out] = scene.key().at(request.query_begin + i, source->kv_head, d);
      source->value[out] = scene.value().at(request.query_begin + i, source->kv_head, d);
    }
  }
}

// Adds the squared norms of (output - exact) and of exact for one query row and head.
void compare_row(const Scene& scene, const Source& source, std::int64_t row, int q_head,
                 std::int64_t visible, double* difference, double* norm) {
  const auto dim = static_cast<std::size_t>(scene.layer().geometry.head_dim);
  std::vector<double> score(static_cast<std::size_t>(visible));
  for (std::size_t p = 0; p < score.size(); ++p) {
    double dot = 0;
    for (std::size_t d = 0; d < dim; ++d) {
      dot += static_cast<double>(scene.query().at(row, q_head, static_cast<int>(d))) *
             static_cast<double>(source.key[p * dim + d]);
    }
    score[p] = dot * static_cast<double>(scene.params().sm_scale);
  }
  const double highest = *std::max_element(score.begin(), score.end());
  std::vector<double> exact(dim);
  double total = 0;
  for (std::size_t p = 0; p < score.size(); ++p) {
    const double weight = std::exp(score[p] - highest);
    total += weight;
    for (std::size_t d = 0; d < dim; ++d) {
      exact[d] += weight * static_cast<double>(source.value[p * dim + d]);
    }
  }
  const AttendParams& params = scene.params();
  const auto out = static_cast<std::size_t>(row * params.stride_output_token +
                                            q_head * params.stride_output_head);
  for (std::size_t d = 0; d < dim; ++d) {
    const double want = exact[d] / total;
    const double error = static_cast<double>(scene.output()[out + d]) - want;
    *difference += error * error;
    *norm += want * want;
  }
}

}  // namespace

Result<double> relative_error(Scene& scene, int max_pairs) {
  Result<std::unique_ptr<Backend>> oracle = make_backend("reference", {});
  if (!oracle.ok()) return oracle.status();
  const LayerConfig& layer = scene.layer();
  const int group_size = layer.num_q_heads / layer.num_kv_heads;
  const auto requests = static_cast<int>(scene.plan().requests.size());
  const int pairs = std::min(max_pairs, requests * layer.num_kv_heads);
  double difference = 0;
  double norm = 0;
  for (int pair = 0; pair < pairs; ++pair) {
    Source source;
    source.request = pair % requests;
    source.kv_head = (pair / requests * 3 + pair) % layer.num_kv_heads;
    const RequestPlan& request = scene.plan().requests[static_cast<std::size_t>(source.request)];
    const auto elements = static_cast<std::size_t>(request.seq_len * layer.geometry.head_dim);
    source.key.resize(elements);
    source.value.resize(elements);
    if (Status s = oracle.value()->gather(scene.params(), source.request, source.kv_head, 0,
                                          request.seq_len, source.key.data(), source.value.data());
        !s.ok()) {
      return s;
    }
    read_spans(scene, request, &source);
    read_chunk(scene, request, &source);
    const std::int64_t stride =
        std::max<std::int64_t>(1, (request.query_len - 1) / (kQueryRows - 1));
    for (std::int64_t i = 0; i < request.query_len; i += stride) {
      const std::int64_t visible = request.seq_len - request.query_len + i + 1;
      for (int q = 0; q < group_size; ++q) {
        compare_row(scene, source, request.query_begin + i, source.kv_head * group_size + q,
                    visible, &difference, &norm);
      }
    }
  }
  return std::sqrt(difference / norm);
}

}  // namespace bitdecoding::cli
