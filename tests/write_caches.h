// SPDX-License-Identifier: Apache-2.0
// Random input and poisoned memory for several writers, whose bytes a test compares.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backend/tensor.h"
#include "bitdecoding/quantize.h"

namespace bitdecoding {

enum class Data { kPlain, kSpecial, kTiny, kHuge };
enum class Slots { kAll, kNone, kMixed };

struct WriteCase {
  Format format = Format::kNvfp4;
  int head_dim = 64;
  int page_size = 64;
  int heads = 2;
  ScaleRule key_rule = ScaleRule::kFourSix;
  ScaleRule value_rule = ScaleRule::kAmax6;
  bool hadamard = true;
  bool shift = true;
  int outer = 0;
  DType dtype = DType::kF32;
  Data data = Data::kPlain;
  Slots slots = Slots::kAll;
  int threads = 1;
  std::uint32_t seed = 1;
};

inline constexpr std::int64_t kGap = 96;  // canary bytes after every head and every page

// N(0, 1) from a table: drawing is most of a test's time otherwise.
inline float draw_normal(std::mt19937* random) {
  static const std::vector<float> table = [] {
    std::mt19937 source(5);
    std::normal_distribution<float> normal;
    std::vector<float> values(8192);
    for (float& value : values) value = normal(source);
    return values;
  }();
  return table[(*random)() % table.size()];
}

// One value. Blocks differ by 2^-3 .. 2^3, so that a scale in the wrong place shows.
inline float draw(Data data, int block, std::mt19937* random) {
  const float x = draw_normal(random) * std::ldexp(1.0F, block % 7 - 3);
  const auto pick = (*random)();
  switch (data) {
    case Data::kPlain:
      return x;
    case Data::kSpecial:
      switch (pick % 24) {
        case 0:
          return std::numeric_limits<float>::quiet_NaN();
        case 1:
          return -std::numeric_limits<float>::infinity();
        case 2:
          return -0.0F;
        case 3:
          return 0.0F;
        case 4:
          return std::bit_cast<float>(0xFFFFFFFFU);  // the NaN that rounding could wrap
        case 5:
          return std::bit_cast<float>(0x7F7FFFFFU);  // rounds to infinity in BF16
        case 6:
          return 0.25F * static_cast<float>(static_cast<int>(pick / 24 % 64) - 32);
        default:
          return x;
      }
    case Data::kTiny:
      return std::ldexp(x, -static_cast<int>(pick % 140));
    case Data::kHuge:
      return std::ldexp(x, static_cast<int>(pick % 124));
  }
  return x;
}

// Everything a write needs, with one copy of the memory it changes for each writer.
class WriteCaches {
 public:
  explicit WriteCaches(const WriteCase& s, std::size_t writers = 1) : options(s), random_(s.seed) {
    layer.geometry =
        PageGeometry::make(s.format, FragmentOrder::kQuad, s.head_dim, s.page_size).take();
    layer.num_kv_heads = s.heads;
    layer.num_q_heads = s.heads;
    layer.key_rule = s.key_rule;
    layer.value_rule = s.value_rule;
    layer.hadamard = s.hadamard;
    const bool tiled = is_tiled(s.format);
    for (int i = 0; i < s.heads * s.head_dim; ++i)
      shift_.push_back(draw(Data::kPlain, 3, &random_));
    if (s.shift && tiled) layer.key_shift = shift_.data();
    // Another draw than the keys': the same numbers read from the other end.
    value_shift_.assign(shift_.rbegin(), shift_.rend());
    if (s.shift && tiled) layer.value_shift = value_shift_.data();
    for (int h = 0; h < s.heads; ++h) outer_.push_back(static_cast<std::int8_t>(s.outer - h));
    if (s.outer != 0 && scale_block(s.format) != 0) {
      layer.key_outer = outer_.data();
      layer.value_outer = outer_.data();
    }
    stride_head_ = layer.geometry.head_bytes + kGap;
    stride_page_ = stride_head_ * s.heads + kGap;
    for (std::int64_t i = 0; i < stride_page_ * kPages; ++i) {
      poison_.push_back(static_cast<std::uint8_t>(random_()));
    }
    pages.assign(writers, poison_);
    const std::int64_t rows =
        shadow_slot_bytes(s.heads, layer.geometry.group_tokens, s.head_dim) / 2 * num_slots();
    slots.assign(writers, std::vector<std::uint16_t>(static_cast<std::size_t>(rows), 0x7FC0));
    counters.resize(writers);
  }

  std::int64_t num_slots() const { return kPages * layer.geometry.groups_per_page; }
  std::int64_t capacity() const { return kPages * std::int64_t{options.page_size}; }

  // The next n tokens of the one sequence: random K and V with padded strides.
  void fill(std::int64_t n) {
    stride_head_elements_ = options.head_dim + 8;
    stride_token_ = (stride_head_elements_ * options.heads) * 2 + 24;
    const std::int64_t elements = n * stride_token_;
    tensor_.assign(static_cast<std::size_t>(elements * dtype_bytes(options.dtype)), 0xFF);
    for (std::int64_t i = 0; i < elements; ++i) {
      const auto block = static_cast<int>(i / 16 % 61);
      store_element(tensor_.data(), options.dtype, i, draw(options.data, block, &random_));
    }
    plan.writes.clear();
    plan.num_tokens = n;
    for (std::int64_t t = 0; t < n; ++t, ++position_) add_token(t);
  }

  WriteParams params(std::size_t writer) {
    WriteParams p;
    p.layer = &layer;
    p.cache = {pages[writer].data(), kPages, stride_page_, stride_head_};
    p.shadow = {slots[writer].data(), static_cast<std::int32_t>(num_slots())};
    p.key = {tensor_.data(), options.dtype, stride_token_, stride_head_elements_};
    p.value = p.key;
    p.value.data =
        tensor_.data() + options.heads * stride_head_elements_ * dtype_bytes(options.dtype);
    p.plan = &plan;
    p.counters = &counters[writer];
    return p;
  }

  // Bytes between heads and pages are as they were.
  bool canaries_intact(std::size_t writer) const {
    for (std::int64_t page = 0; page < kPages; ++page) {
      for (int head = 0; head <= options.heads; ++head) {
        const std::int64_t at = page * stride_page_ + head * stride_head_ +
                                (head < options.heads ? layer.geometry.head_bytes : 0);
        if (std::memcmp(&pages[writer][static_cast<std::size_t>(at)],
                        &poison_[static_cast<std::size_t>(at)], kGap) != 0) {
          return false;
        }
      }
    }
    return true;
  }

  static constexpr std::int64_t kPages = 4;
  const WriteCase options;
  LayerConfig layer;
  StepPlan plan;
  std::vector<std::vector<std::uint8_t>> pages;   // of each writer
  std::vector<std::vector<std::uint16_t>> slots;  // of each writer
  std::vector<WriteCounters> counters;            // of each writer

 private:
  void add_token(std::int64_t source) {
    const int group_tokens = layer.geometry.group_tokens;
    const auto in_page = static_cast<std::int32_t>(position_ % options.page_size);
    if (source > 0 && in_page % group_tokens != 0) {
      ++plan.writes.back().num_rows;
      return;
    }
    GroupWrite w;
    w.page = kPages - 1 - position_ / options.page_size;  // not in ascending order
    w.group = in_page / group_tokens;
    w.first_row = in_page % group_tokens;
    w.num_rows = 1;
    w.source = source;
    const bool with_slot = options.slots == Slots::kAll ||
                           (options.slots == Slots::kMixed && (w.group + w.page) % 2 == 0);
    if (with_slot) {
      w.slot = static_cast<std::int32_t>(w.page * layer.geometry.groups_per_page + w.group);
      w.prefix_in_slot = w.first_row > 0;
    }
    plan.writes.push_back(w);
  }

  std::mt19937 random_;
  std::vector<float> shift_, value_shift_;
  std::vector<std::int8_t> outer_;
  std::vector<std::uint8_t> poison_;
  std::vector<std::uint8_t> tensor_;
  std::int64_t stride_page_ = 0;
  std::int64_t stride_head_ = 0;
  std::int64_t stride_token_ = 0;
  std::int64_t stride_head_elements_ = 0;
  std::int64_t position_ = 0;
};

}  // namespace bitdecoding
