// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "backend/reference/reference.h"
#include "backend/tensor.h"
#include "numeric/bf16.h"

namespace bitdecoding::test {
namespace {

std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

std::uint64_t seed_of(std::uint64_t kind, std::uint32_t token, std::int64_t position, int head,
                      int dim) {
  std::uint64_t s = mix(kind);
  s = mix(s ^ token);
  s = mix(s ^ static_cast<std::uint64_t>(position));
  return mix(s ^ (static_cast<std::uint64_t>(head) << 32) ^ static_cast<std::uint64_t>(dim));
}

float round_to(DType dtype, float x) {
  if (dtype == DType::kBf16) return round_to_bf16(x);
  if (dtype == DType::kF16) return decode_f16(encode_f16(x));
  return x;
}

}  // namespace

float normal_of(std::uint64_t seed) {
  // Drawn from a table: tests ask for millions.
  static const std::vector<float> table = [] {
    std::vector<float> t;
    for (std::uint64_t i = 0; i < 65536; ++i) {
      const std::uint64_t a = mix(i);
      const std::uint64_t b = mix(a ^ 0x5851F42D4C957F2DULL);
      const double u = (static_cast<double>(a >> 11) + 0.5) * 0x1p-53;
      const double v = static_cast<double>(b >> 11) * 0x1p-53;
      t.push_back(
          static_cast<float>(std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586 * v)));
    }
    return t;
  }();
  return table[mix(seed) >> 48];
}

std::vector<std::uint32_t> iota_tokens(std::uint32_t first, std::int64_t n) {
  std::vector<std::uint32_t> out;
  for (std::int64_t i = 0; i < n; ++i) out.push_back(first + static_cast<std::uint32_t>(i));
  return out;
}

World::World(const WorldOptions& o) : options(o) {
  layer.geometry = PageGeometry::make(o.format, o.order, o.head_dim, o.page_size).take();
  layer.num_kv_heads = o.num_kv_heads;
  layer.num_q_heads = o.num_q_heads;
  const bool mx = o.format == Format::kMxfp4;
  layer.key_rule = mx ? ScaleRule::kMxfp4Search : o.key_rule;
  layer.value_rule = mx ? ScaleRule::kMxfp4Search : o.value_rule;
  layer.hadamard = o.hadamard;
  const bool tiled = is_tiled(o.format);
  if (o.shift && tiled) {
    for (int h = 0; h < o.num_kv_heads; ++h) {
      for (int d = 0; d < o.head_dim; ++d) key_shift_.push_back(shift_of(h, d));
    }
    layer.key_shift = key_shift_.data();
  }
  if (o.value_shift && tiled) {
    for (int h = 0; h < o.num_kv_heads; ++h) {
      for (int d = 0; d < o.head_dim; ++d) value_shift_.push_back(value_shift_of(h, d));
    }
    layer.value_shift = value_shift_.data();
  }
  if (o.outer_exponent != 0) {
    outer_.assign(static_cast<std::size_t>(o.num_kv_heads),
                  static_cast<std::int8_t>(o.outer_exponent));
    layer.key_outer = outer_.data();
    layer.value_outer = outer_.data();
  }
  cache.num_pages = o.num_pages;
  cache.stride_head = layer.geometry.head_bytes;
  cache.stride_page = layer.geometry.head_bytes * o.num_kv_heads + o.page_padding;
  pages_.assign(static_cast<std::size_t>(cache.stride_page * o.num_pages), o.fill);
  cache.pages = pages_.data();
  const std::int64_t slot_elements =
      shadow_slot_bytes(o.num_kv_heads, layer.geometry.group_tokens, o.head_dim) / 2;
  rows_.assign(static_cast<std::size_t>(slot_elements * o.num_slots), 0x7FC0);
  shadow.rows = rows_.data();
  shadow.num_slots = o.num_slots;
  const ShadowRule rule =
      make_shadow_rule(layer.geometry, o.sink_tokens, o.tail_tokens, o.reproducible);
  directory =
      ShadowDirectory::make(layer.geometry, rule, {o.num_pages, o.num_slots, o.max_requests})
          .take();
  backend = o.backend == "reference" ? make_reference_backend({}, o.order).take()
                                     : make_backend(o.backend, {}).take();
  params.sm_scale = 1.0F / std::sqrt(static_cast<float>(o.head_dim));
  params.arithmetic = o.arithmetic;
  params.query_terms = o.query_terms;
  params.probability_c = o.probability_c;
  params.probability_tau = o.probability_tau;
}

int World::add_sequence(std::vector<std::int32_t> pages) {
  sequences.push_back({std::move(pages), {}});
  return static_cast<int>(sequences.size()) - 1;
}

void World::reject(int sequence, std::int64_t n) {
  auto& tokens = sequences[static_cast<std::size_t>(sequence)].tokens;
  tokens.resize(tokens.size() - static_cast<std::size_t>(n));
}

float World::shift_of(int head, int dim) const {
  return 2.0F * normal_of(seed_of(7, 0, 0, head, dim));
}

float World::value_shift_of(int head, int dim) const {
  return 0.7F * normal_of(seed_of(8, 0, 0, head, dim));
}

float World::rounded(float x) const {
  return round_to(options.dtype, options.bf16_numbers ? round_to_bf16(x) : x);
}

float World::key_of(std::uint32_t token, std::int64_t position, int head, int dim) const {
  return rounded(normal_of(seed_of(1, token, position, head, dim)) +
                 (options.shift ? shift_of(head, dim) : 0.0F));
}

float World::value_of(std::uint32_t token, std::int64_t position, int head, int dim) const {
  return rounded(normal_of(seed_of(2, token, position, head, dim)) +
                 (options.value_shift ? value_shift_of(head, dim) : 0.0F));
}

float World::query_of(std::uint32_t token, std::int64_t position, int head, int dim) const {
  return rounded(normal_of(seed_of(3, token, position, head, dim)));
}

TensorView World::view(const std::vector<std::uint8_t>& data, int heads) const {
  return {data.data(), options.dtype, std::int64_t{heads} * options.head_dim, options.head_dim};
}

float World::faulty(char tensor, std::int64_t position, int dim, float x) const {
  const WorldOptions::Fault& f = options.fault;
  return f.tensor == tensor && f.position == position && f.dim == dim ? f.value : x;
}

void World::fill_tensors(const std::vector<Work>& work) {
  const auto element = static_cast<std::size_t>(dtype_bytes(options.dtype));
  const auto kv = static_cast<std::size_t>(num_tokens_ * options.num_kv_heads * options.head_dim);
  const auto q = static_cast<std::size_t>(num_tokens_ * options.num_q_heads * options.head_dim);
  key_.assign(kv * element, 0xFF);
  value_.assign(kv * element, 0xFF);
  query_.assign(q * element, 0xFF);
  std::int64_t row = 0;
  for (const Work& w : work) {
    const Sequence& s = sequences[static_cast<std::size_t>(w.sequence)];
    std::int64_t position =
        static_cast<std::int64_t>(s.tokens.size()) - static_cast<std::int64_t>(w.tokens.size());
    for (const std::uint32_t token : w.tokens) {
      for (int d = 0; d < options.head_dim; ++d) {
        for (int h = 0; h < options.num_kv_heads; ++h) {
          const std::int64_t i = (row * options.num_kv_heads + h) * options.head_dim + d;
          store_element(key_.data(), options.dtype, i,
                        faulty('k', position, d, key_of(token, position, h, d)));
          store_element(value_.data(), options.dtype, i,
                        faulty('v', position, d, value_of(token, position, h, d)));
        }
        for (int h = 0; h < options.num_q_heads; ++h) {
          const std::int64_t i = (row * options.num_q_heads + h) * options.head_dim + d;
          store_element(query_.data(), options.dtype, i,
                        faulty('q', position, d, query_of(token, position, h, d)));
        }
      }
      ++row;
      ++position;
    }
  }
}

Status World::plan_step(const std::vector<Work>& work) {
  table_.clear();
  starts_ = {0};
  lengths_.clear();
  slots_.clear();
  std::size_t stride = 1;
  for (const Sequence& s : sequences) stride = std::max(stride, s.pages.size());
  for (const Work& w : work) {
    Sequence& s = sequences[static_cast<std::size_t>(w.sequence)];
    std::vector<std::int32_t> row = s.pages;
    row.resize(stride, std::numeric_limits<std::int32_t>::max());  // never read
    table_.insert(table_.end(), row.begin(), row.end());
    for (std::size_t i = 0; i < w.tokens.size(); ++i) {
      const auto p = static_cast<std::int64_t>(s.tokens.size());
      const std::int64_t page = s.pages[static_cast<std::size_t>(p / options.page_size)];
      const bool skip = static_cast<std::int64_t>(i) < w.skip;
      slots_.push_back(skip ? -1 : page * options.page_size + p % options.page_size);
      s.tokens.push_back(w.tokens[i]);
    }
    starts_.push_back(static_cast<std::int32_t>(slots_.size()));
    lengths_.push_back(static_cast<std::int32_t>(s.tokens.size()));
  }
  num_tokens_ = static_cast<std::int64_t>(slots_.size());
  fill_tensors(work);
  input.num_requests = static_cast<int>(work.size());
  input.block_table = table_.data();
  input.block_table_stride = static_cast<std::int64_t>(stride);
  input.query_start = starts_.data();
  input.seq_lens = lengths_.data();
  input.slot_mapping = slots_.data();
  input.num_tokens = num_tokens_;
  input.num_pages = options.num_pages;
  return directory->build(input, &plan);
}

Status World::write() {
  return write_tensors(view(key_, options.num_kv_heads), view(value_, options.num_kv_heads));
}

Status World::write_rows(const std::vector<float>& key, const std::vector<float>& value) {
  const std::int64_t token = std::int64_t{options.num_kv_heads} * options.head_dim;
  return write_tensors({key.data(), DType::kF32, token, options.head_dim},
                       {value.data(), DType::kF32, token, options.head_dim});
}

Status World::write_tensors(const TensorView& key, const TensorView& value) {
  WriteParams p;
  p.layer = &layer;
  p.cache = cache;
  p.shadow = shadow;
  p.key = key;
  p.value = value;
  p.plan = &plan;
  p.counters = &counters;
  return backend->write(p);
}

StepResult World::attend() {
  StepResult result;
  const auto rows = static_cast<std::size_t>(num_tokens_ * options.num_q_heads);
  const auto elements = rows * static_cast<std::size_t>(options.head_dim);
  output_.assign(elements * static_cast<std::size_t>(dtype_bytes(options.dtype)), 0xFF);
  result.lse.assign(rows, std::numeric_limits<float>::quiet_NaN());
  params.layer = &layer;
  params.cache = cache;
  params.shadow = shadow;
  params.query = view(query_, options.num_q_heads);
  params.key = view(key_, options.num_kv_heads);
  params.value = view(value_, options.num_kv_heads);
  params.output = output_.data();
  params.output_dtype = options.dtype;
  params.stride_output_token = std::int64_t{options.num_q_heads} * options.head_dim;
  params.stride_output_head = options.head_dim;
  params.lse = result.lse.data();
  params.plan = &plan;
  params.corrupt_scales = &corrupt_scales;
  result.status = backend->attend(params);
  const TensorView out = view(output_, options.num_q_heads);
  for (std::int64_t t = 0; t < num_tokens_; ++t) {
    for (int h = 0; h < options.num_q_heads; ++h) {
      for (int d = 0; d < options.head_dim; ++d) {
        result.output.push_back(load_element(out, t, h, d));
      }
    }
  }
  return result;
}

StepResult World::step(const std::vector<Work>& work) {
  StepResult result;
  result.status = plan_step(work);
  if (result.status.ok()) result.status = write();
  if (result.status.ok()) result = attend();
  return result;
}

std::uint8_t* World::head_bytes(std::int64_t page, int head) {
  return cache.pages + page * cache.stride_page + head * cache.stride_head;
}

std::vector<std::uint8_t> World::page_bytes(std::int64_t page) {
  const std::uint8_t* begin = head_bytes(page, 0);
  return {begin, begin + layer.geometry.head_bytes * options.num_kv_heads};
}

}  // namespace bitdecoding::test
