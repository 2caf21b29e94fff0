// SPDX-License-Identifier: Apache-2.0
// Quantize: K row by row, V group by group.
#include <array>
#include <atomic>
#include <cmath>

#include "backend/reference/verbs.h"
#include "backend/tensor.h"
#include "page/address.h"
#include "scale/rules.h"
#include "transform/hadamard.h"

namespace bitdecoding::reference {
namespace {

constexpr int kMaxGroup = 32;
using Row = std::array<float, kMaxHeadDim>;

// One KV head of the group that is being written.
struct Target {
  const LayerConfig& layer;
  const WriteParams& params;
  const GroupWrite& write;
  int head;
  std::uint8_t* bytes;  // of the head in its page
  WriteCounters& tally;

  const PageGeometry& geometry() const { return layer.geometry; }
  int page_row(int row) const { return write.group * geometry().group_tokens + row; }
};

Row load_row(const Target& t, const TensorView& tensor, int row) {
  Row x{};
  const std::int64_t token = t.write.source + row - t.write.first_row;
  for (int dim = 0; dim < t.geometry().head_dim; ++dim) {
    const float raw = load_element(tensor, token, t.head, dim);
    x[static_cast<std::size_t>(dim)] = storable(raw, &t.tally.non_finite);
  }
  return x;
}

void store_shadow_row(const Target& t, Side side, int row, const Row& x) {
  if (t.write.slot < 0) return;
  std::uint16_t* out = t.params.shadow.rows +
                       shadow_row_index(t.layer, t.write.slot, t.head, static_cast<int>(side), row);
  for (int dim = 0; dim < t.geometry().head_dim; ++dim) {
    out[dim] = encode_bf16(x[static_cast<std::size_t>(dim)]);
  }
}

void store_scale(const Target& t, Side side, int row, int dim, std::uint8_t code) {
  t.bytes[scale_address(t.geometry(), side, row, dim)] = code;
}

void store_code(const Target& t, Side side, int row, int dim, std::uint8_t code) {
  set_nibble(t.bytes, code_address(t.geometry(), side, row, dim), code);
}

// Scale code of one block, its 4-bit codes, and what went wrong.
std::uint8_t quantize(const Target& t, Side side, const float* x, std::uint8_t* codes) {
  const Format format = t.geometry().format;
  const int n = scale_block(format);
  const ScaleRule rule = side == Side::kKey ? t.layer.key_rule : t.layer.value_rule;
  const float outer =
      outer_scale(side == Side::kKey ? t.layer.key_outer : t.layer.value_outer, t.head);
  const std::uint8_t scale = choose_scale(rule, x, n, outer);
  encode_block(x, n, decode_scale(format, scale) * outer, codes);
  if (block_saturates(format, x, n, outer)) ++t.tally.saturated_blocks;
  if (block_amax(x, n) > 0.0F && decode_scale(format, scale) == 0.0F) ++t.tally.flushed_blocks;
  return scale;
}

// Blocks along head_dim: K of tiled pages, both sides of kNvfp4Rows.
void store_blocked_row(const Target& t, Side side, int page_row, const Row& x) {
  const int n = scale_block(t.geometry().format);
  std::array<std::uint8_t, kMaxGroup> codes{};
  for (int base = 0; base < t.geometry().head_dim; base += n) {
    const std::uint8_t scale = quantize(t, side, x.data() + base, codes.data());
    store_scale(t, side, page_row, base, scale);
    for (int i = 0; i < n; ++i) {
      store_code(t, side, page_row, base + i, codes[static_cast<std::size_t>(i)]);
    }
  }
  if (side != Side::kKey) return;
  for (int dim = t.geometry().head_dim; dim < padded_key_dims(t.geometry()); ++dim) {
    store_code(t, side, page_row, dim, 0);
    if (dim % n == 0) store_scale(t, side, page_row, dim, 0);
  }
}

// kBf16 and kFp8E4m3: elements without scales. An FP8 row counts as one block.
void store_plain_row(const Target& t, Side side, int page_row, const Row& x) {
  bool saturated = false;
  for (int dim = 0; dim < t.geometry().head_dim; ++dim) {
    const float value = x[static_cast<std::size_t>(dim)];
    std::uint8_t* at = t.bytes + element_address(t.geometry(), side, page_row, dim);
    if (t.geometry().format == Format::kFp8E4m3) {
      at[0] = encode_e4m3(value);
      saturated = saturated || std::fabs(value) > kE4m3Max;
    } else {
      const std::uint16_t bits = encode_bf16(value);
      at[0] = static_cast<std::uint8_t>(bits & 0xFFU);
      at[1] = static_cast<std::uint8_t>(bits >> 8);
    }
  }
  if (saturated) ++t.tally.saturated_blocks;
}

void store_row(const Target& t, Side side, int row, Row x) {
  const int page_row = t.page_row(row);
  if (scale_block(t.geometry().format) == 0) {
    store_plain_row(t, side, page_row, x);
    return;
  }
  if (is_tiled(t.geometry().format)) {
    const int head_dim = t.geometry().head_dim;
    if (t.layer.key_shift != nullptr) {
      const float* shift = t.layer.key_shift + std::int64_t{t.head} * head_dim;
      for (int dim = 0; dim < head_dim; ++dim) {
        x[static_cast<std::size_t>(dim)] = x[static_cast<std::size_t>(dim)] - shift[dim];
      }
    }
    if (t.layer.hadamard) hadamard(x.data(), head_dim);
  }
  store_blocked_row(t, side, page_row, x);
}

// Subtracts the value means; pages of tiled formats alone have them.
void centre(const Target& t, Row* x) {
  if (t.layer.value_shift == nullptr) return;
  const float* shift = t.layer.value_shift + std::int64_t{t.head} * t.geometry().head_dim;
  for (int dim = 0; dim < t.geometry().head_dim; ++dim) {
    (*x)[static_cast<std::size_t>(dim)] -= shift[dim];
  }
}

// The group's rows before first_row as pages hold them: from the slot, else from the page's own
// codes.
void load_prefix(const Target& t, std::array<Row, kMaxGroup>* rows) {
  const float outer = outer_scale(t.layer.value_outer, t.head);
  for (int row = 0; row < t.write.first_row; ++row) {
    Row& x = (*rows)[static_cast<std::size_t>(row)];
    const std::uint16_t* slot =
        !t.write.prefix_in_slot
            ? nullptr
            : t.params.shadow.rows + shadow_row_index(t.layer, t.write.slot, t.head, 1, row);
    for (int dim = 0; dim < t.geometry().head_dim; ++dim) {
      std::uint64_t corrupt = 0;
      const float stored = slot != nullptr ? decode_bf16(slot[dim])
                                           : read_element(t.geometry(), t.bytes, Side::kValue,
                                                          t.page_row(row), dim, outer, &corrupt);
      x[static_cast<std::size_t>(dim)] = storable(stored, &t.tally.non_finite);
    }
    if (slot != nullptr) centre(t, &x);
  }
}

// V of a tiled page: the whole group, rows that do not exist yet as zero.
void store_value_group(const Target& t, const std::array<Row, kMaxGroup>& rows) {
  const int n = t.geometry().group_tokens;
  std::array<float, kMaxGroup> block{};
  std::array<std::uint8_t, kMaxGroup> codes{};
  for (int dim = 0; dim < t.geometry().head_dim; ++dim) {
    for (int row = 0; row < n; ++row) {
      block[static_cast<std::size_t>(row)] =
          rows[static_cast<std::size_t>(row)][static_cast<std::size_t>(dim)];
    }
    const std::uint8_t scale = quantize(t, Side::kValue, block.data(), codes.data());
    store_scale(t, Side::kValue, t.page_row(0), dim, scale);
    for (int row = 0; row < n; ++row) {
      store_code(t, Side::kValue, t.page_row(row), dim, codes[static_cast<std::size_t>(row)]);
    }
  }
}

void write_head(const Target& t) {
  const bool tiled = is_tiled(t.geometry().format);
  std::array<Row, kMaxGroup> values{};
  if (tiled) load_prefix(t, &values);
  for (int i = 0; i < t.write.num_rows; ++i) {
    const int row = t.write.first_row + i;
    const Row key = load_row(t, t.params.key, row);
    const Row value = load_row(t, t.params.value, row);
    store_shadow_row(t, Side::kKey, row, key);
    store_shadow_row(t, Side::kValue, row, value);
    store_row(t, Side::kKey, row, key);
    if (tiled) {
      values[static_cast<std::size_t>(row)] = value;
      centre(t, &values[static_cast<std::size_t>(row)]);
    } else {
      store_row(t, Side::kValue, row, value);
    }
  }
  if (tiled) store_value_group(t, values);
}

}  // namespace

void add_relaxed(std::uint64_t* counter, std::uint64_t n) {
  if (n != 0) std::atomic_ref<std::uint64_t>(*counter).fetch_add(n, std::memory_order_relaxed);
}

void write(const WriteParams& params) {
  const LayerConfig& layer = *params.layer;
  WriteCounters tally;
  for (const GroupWrite& w : params.plan->writes) {
    for (int head = 0; head < layer.num_kv_heads; ++head) {
      write_head({layer, params, w, head, page_head(params.cache, w.page, head), tally});
    }
    if (is_tiled(layer.geometry.format) && w.first_row > 0 && !w.prefix_in_slot) {
      ++tally.requantized_prefix;
    }
  }
  if (params.counters == nullptr) return;
  add_relaxed(&params.counters->non_finite, tally.non_finite);
  add_relaxed(&params.counters->saturated_blocks, tally.saturated_blocks);
  add_relaxed(&params.counters->flushed_blocks, tally.flushed_blocks);
  add_relaxed(&params.counters->requantized_prefix, tally.requantized_prefix);
}

}  // namespace bitdecoding::reference
