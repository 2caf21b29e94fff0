// SPDX-License-Identifier: Apache-2.0
#include "dense_oracle.h"

#include <bit>
#include <cmath>
#include <limits>

#include "numeric/bf16.h"
#include "page/address.h"

namespace bitdecoding::test {
namespace {

// Entry (i, j) of the rotation is +-c, negative when i and j share an odd number of one bits.
const std::vector<double>& rotation(int block) {
  static std::map<int, std::vector<double>> matrices;
  std::vector<double>& m = matrices[block];
  const auto c = static_cast<double>(static_cast<float>(1.0 / std::sqrt(block)));
  for (int i = 0; i < block && m.size() < static_cast<std::size_t>(block * block); ++i) {
    for (int j = 0; j < block; ++j) {
      m.push_back(std::popcount(static_cast<unsigned>(i & j)) % 2 != 0 ? -c : c);
    }
  }
  return m;
}

}  // namespace

std::vector<double> DenseOracle::dequantize(int sequence, std::int64_t position, int kv_head,
                                            int side) {
  World& world = world_;
  const PageGeometry& g = world.layer.geometry;
  const auto& pages = world.sequences[static_cast<std::size_t>(sequence)].pages;
  const std::uint8_t* head =
      world.head_bytes(pages[static_cast<std::size_t>(position / g.page_size)], kv_head);
  const float outer = std::ldexp(1.0F, world.options.outer_exponent);
  std::uint64_t corrupt = 0;
  std::vector<double> stored;
  for (int d = 0; d < g.head_dim; ++d) {
    stored.push_back(read_element(g, head, static_cast<Side>(side),
                                  static_cast<int>(position % g.page_size), d, outer, &corrupt));
  }
  if (!is_tiled(g.format)) return stored;
  if (side == 1) {
    for (int d = 0; d < g.head_dim && world.layer.value_shift != nullptr; ++d) {
      stored[static_cast<std::size_t>(d)] += world.value_shift_of(kv_head, d);
    }
    return stored;
  }
  std::vector<double> key = stored;
  if (world.options.hadamard) {
    const int block = g.head_dim & -g.head_dim;
    const std::vector<double>& matrix = rotation(block);
    for (int i = 0; i < g.head_dim; ++i) {
      const double* row = matrix.data() + std::ptrdiff_t{i % block} * block;
      double sum = 0;
      for (int j = 0; j < block; ++j) {
        sum += row[j] * stored[static_cast<std::size_t>(i / block * block + j)];
      }
      key[static_cast<std::size_t>(i)] = sum;
    }
  }
  for (int d = 0; d < g.head_dim && world.layer.key_shift != nullptr; ++d) {
    key[static_cast<std::size_t>(d)] += world.shift_of(kv_head, d);
  }
  return key;
}

const std::vector<double>& DenseOracle::page_row(int sequence, std::int64_t position, int kv_head,
                                                 int side) {
  std::vector<double>& row = rows_[{sequence, position, kv_head, side}];
  if (row.empty()) row = dequantize(sequence, position, kv_head, side);
  return row;
}

std::vector<double> DenseOracle::input_row(std::uint32_t token, std::int64_t position, int kv_head,
                                           int side, bool rounded) const {
  std::vector<double> row;
  for (int d = 0; d < world_.options.head_dim; ++d) {
    const float x = side == 0 ? world_.key_of(token, position, kv_head, d)
                              : world_.value_of(token, position, kv_head, d);
    row.push_back(rounded ? round_to_bf16(x) : x);
  }
  return row;
}

Dense DenseOracle::attend(int sequence, std::int64_t q, int q_head, std::int64_t begin,
                          const std::vector<Read>& reads) {
  World& world = world_;
  const WorldOptions& o = world.options;
  const int kv_head = q_head / (o.num_q_heads / o.num_kv_heads);
  const auto& tokens = world.sequences[static_cast<std::size_t>(sequence)].tokens;
  std::vector<double> query;
  for (int d = 0; d < o.head_dim; ++d) {
    query.push_back(world.query_of(tokens[static_cast<std::size_t>(q)], q, q_head, d));
  }
  std::vector<double> scores;
  std::vector<std::vector<double>> values;
  for (std::int64_t p = begin; p <= q; ++p) {
    const std::uint32_t token = tokens[static_cast<std::size_t>(p)];
    const Read read = reads[static_cast<std::size_t>(p - begin)];
    std::vector<double> row[2];
    for (int side = 0; side < 2; ++side) {
      row[side] = read == Read::kPage ? page_row(sequence, p, kv_head, side)
                                      : input_row(token, p, kv_head, side, read == Read::kRounded);
    }
    double score = 0;
    for (std::size_t d = 0; d < query.size(); ++d) score += row[0][d] * query[d];
    score *= world.params.sm_scale;
    const double cap = world.params.softcap;
    scores.push_back(cap > 0 ? cap * std::tanh(score / cap) : score);
    values.push_back(row[1]);
  }
  double top = -std::numeric_limits<double>::infinity();
  for (const double s : scores) top = std::max(top, s);
  if (world.params.attn_sink != nullptr)
    top = std::max(top, double{world.params.attn_sink[q_head]});
  double sum =
      world.params.attn_sink == nullptr ? 0.0 : std::exp(world.params.attn_sink[q_head] - top);
  Dense out;
  out.output.assign(static_cast<std::size_t>(o.head_dim), 0.0);
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double w = std::exp(scores[i] - top);
    sum += w;
    for (std::size_t d = 0; d < out.output.size(); ++d) out.output[d] += w * values[i][d];
  }
  for (double& x : out.output) x /= sum;
  out.lse = top + std::log(sum);
  return out;
}

}  // namespace bitdecoding::test
