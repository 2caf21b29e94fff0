// The CPU backend's write against the reference backend, byte for byte: pages, shadow slots and
// counters, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/isa.h"
#include "backend/cpu/thread_pool.h"
#include "backend/cpu/write.h"
#include "backend/reference/verbs.h"
#include "backend/tensor.h"
#include "scale/rules.h"

namespace bitdecoding {
namespace {

enum class Data { kPlain, kSpecial, kTiny, kHuge };
enum class Slots { kAll, kNone, kMixed };

struct Case {
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

constexpr std::int64_t kGap = 96;  // canary bytes after every head and every page

// N(0, 1) from a table: drawing is most of a test's time otherwise.
float draw_normal(std::mt19937* random) {
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
float draw(Data data, int block, std::mt19937* random) {
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
class Caches {
 public:
  explicit Caches(const Case& s, std::size_t writers = 1) : options(s), random_(s.seed) {
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
  const Case options;
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
  std::vector<float> shift_;
  std::vector<std::int8_t> outer_;
  std::vector<std::uint8_t> poison_;
  std::vector<std::uint8_t> tensor_;
  std::int64_t stride_page_ = 0;
  std::int64_t stride_head_ = 0;
  std::int64_t stride_token_ = 0;
  std::int64_t stride_head_elements_ = 0;
  std::int64_t position_ = 0;
};

std::string describe(const Case& s) {
  return std::string(format_name(s.format)) + " head_dim " + std::to_string(s.head_dim) + " page " +
         std::to_string(s.page_size) + " rules " + std::string(scale_rule_name(s.key_rule)) + "/" +
         std::string(scale_rule_name(s.value_rule)) + " dtype " + std::string(dtype_name(s.dtype)) +
         " data " + std::to_string(static_cast<int>(s.data)) + " slots " +
         std::to_string(static_cast<int>(s.slots)) + " outer " + std::to_string(s.outer) +
         " hadamard " + std::to_string(s.hadamard) + " seed " + std::to_string(s.seed);
}

cpu::ParallelFor parallel_of(cpu::ThreadPool* pool) {
  return [pool](std::int64_t n, const std::function<void(std::int64_t, int)>& body) {
    pool->run(n, body);
  };
}

std::int64_t first_difference(const std::vector<std::uint8_t>& a,
                              const std::vector<std::uint8_t>& b) {
  const auto at = std::mismatch(a.begin(), a.end(), b.begin()).first;
  return at == a.end() ? -1 : at - a.begin();
}

// Feeds chunks to the reference and to the CPU backend on every instruction set of this machine,
// and compares after each.
void expect_equal_writes(const Case& options, const std::vector<std::int64_t>& chunks) {
  SCOPED_TRACE(describe(options));
  const std::vector<cpu::Isa> isas = cpu::supported_isas();
  ASSERT_FALSE(isas.empty());
  const std::size_t reference = isas.size();
  Caches caches(options, isas.size() + 1);
  cpu::ThreadPool pool(options.threads);
  for (const std::int64_t n : chunks) {
    caches.fill(n);
    for (std::size_t i = 0; i < isas.size(); ++i) {
      const cpu::WriteKernels* kernels = cpu::write_kernels(isas[i].target);
      ASSERT_NE(kernels, nullptr) << isas[i].name;
      const Status status = cpu::cpu_write(caches.params(i), *kernels, parallel_of(&pool));
      ASSERT_TRUE(status.ok()) << status.message();
    }
    reference::write(caches.params(reference));
    for (std::size_t i = 0; i < isas.size(); ++i) {
      SCOPED_TRACE(std::string(isas[i].name) + ", chunk of " + std::to_string(n));
      ASSERT_EQ(first_difference(caches.pages[i], caches.pages[reference]), -1);
      ASSERT_TRUE(caches.slots[i] == caches.slots[reference]);
      const WriteCounters& got = caches.counters[i];
      const WriteCounters& expected = caches.counters[reference];
      ASSERT_EQ(got.non_finite, expected.non_finite);
      ASSERT_EQ(got.saturated_blocks, expected.saturated_blocks);
      ASSERT_EQ(got.flushed_blocks, expected.flushed_blocks);
      ASSERT_EQ(got.requantized_prefix, expected.requantized_prefix);
    }
  }
  for (std::size_t i = 0; i < isas.size(); ++i) ASSERT_TRUE(caches.canaries_intact(i));
}

const std::vector<std::int64_t> kChunks = {1, 3, 8, 17, 1, 1, 63, 15, 1, 33};

std::vector<ScaleRule> rules_of(Format f) {
  if (f == Format::kMxfp4) return {ScaleRule::kMxfp4Search, ScaleRule::kMxfp4Floor};
  if (scale_block(f) == 0) return {ScaleRule::kAmax6};
  return {ScaleRule::kAmax6, ScaleRule::kFourSix, ScaleRule::kCodeSearch};
}

class CpuWrite : public testing::TestWithParam<std::tuple<Format, int>> {
 protected:
  Case base() const {
    Case s;
    s.format = std::get<0>(GetParam());
    s.head_dim = std::get<1>(GetParam());
    s.key_rule = rules_of(s.format).front();
    s.value_rule = rules_of(s.format).back();
    return s;
  }
};

TEST_P(CpuWrite, EveryRuleGivesTheReferencesBytes) {
  for (const ScaleRule key_rule : rules_of(base().format)) {
    for (const ScaleRule value_rule : rules_of(base().format)) {
      Case s = base();
      s.key_rule = key_rule;
      s.value_rule = value_rule;
      s.seed =
          100 + static_cast<std::uint32_t>(key_rule) * 8 + static_cast<std::uint32_t>(value_rule);
      expect_equal_writes(s, kChunks);
    }
  }
}

TEST_P(CpuWrite, EveryInputTypeAndKindOfData) {
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (const Data data : {Data::kPlain, Data::kSpecial, Data::kTiny, Data::kHuge}) {
      Case s = base();
      s.dtype = dtype;
      s.data = data;
      s.key_rule = rules_of(s.format).back();
      s.seed = 200 + static_cast<std::uint32_t>(dtype) * 8 + static_cast<std::uint32_t>(data);
      expect_equal_writes(s, {5, 1, 30, 28});
    }
  }
}

TEST_P(CpuWrite, SlotsOuterScalesAndSwitches) {
  std::uint32_t seed = 300;
  for (const Slots slots : {Slots::kNone, Slots::kMixed}) {
    for (const int outer : {0, -12, 9}) {
      for (const bool rotated : {false, true}) {
        Case s = base();
        s.slots = slots;
        s.outer = outer;
        s.hadamard = rotated;
        s.shift = !rotated;
        s.heads = 3;
        s.seed = ++seed;
        // The first token begins a group, so no codes are read back before they were written.
        expect_equal_writes(s, kChunks);
      }
    }
  }
}

TEST_P(CpuWrite, PagesOfEverySizeAndThreads) {
  for (const int page_size : {64, 128, 1024}) {
    Case s = base();
    s.page_size = page_size;
    s.threads = 2;
    s.seed = 400 + static_cast<std::uint32_t>(page_size);
    expect_equal_writes(s, {130, 7, 1, 47});
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuWrite,
                         testing::Combine(testing::Values(Format::kBf16, Format::kFp8E4m3,
                                                          Format::kNvfp4Rows, Format::kNvfp4,
                                                          Format::kMxfp4),
                                          testing::ValuesIn(kHeadDims)),
                         [](const auto& test) {
                           return std::string(format_name(std::get<0>(test.param))) + "_" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST(CpuWriteProperties, ChunkingDoesNotChangeAByte) {
  const cpu::Isa isa = cpu::choose_isa("").take();
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    std::vector<std::uint8_t> first;
    for (const std::vector<std::int64_t>& chunks :
         {std::vector<std::int64_t>{96}, {1, 3, 8, 17, 67}, std::vector<std::int64_t>(96, 1)}) {
      Case s;
      s.format = format;
      s.key_rule = s.value_rule = rules_of(format).front();
      s.seed = 7;
      Caches caches(s);
      // The tensor of the longest chunking, cut into steps: rows must not depend on the cut.
      caches.fill(96);
      const StepPlan whole = std::move(caches.plan);
      std::int64_t begin = 0;
      for (const std::int64_t n : chunks) {
        StepPlan& plan = caches.plan;
        plan.writes.clear();
        for (const GroupWrite& w : whole.writes) {
          GroupWrite part = w;
          const std::int64_t from = std::max(begin, w.source);
          const std::int64_t to = std::min(begin + n, w.source + w.num_rows);
          if (from >= to) continue;
          part.first_row = static_cast<std::int32_t>(from - w.source);
          part.num_rows = static_cast<std::int32_t>(to - from);
          part.source = from;
          part.prefix_in_slot = part.first_row > 0;
          plan.writes.push_back(part);
        }
        begin += n;
        ASSERT_TRUE(cpu::cpu_write(caches.params(0), *cpu::write_kernels(isa.target), {}).ok());
      }
      if (first.empty()) first = caches.pages[0];
      EXPECT_EQ(first_difference(first, caches.pages[0]), -1) << format_name(format);
    }
  }
}

TEST(CpuWriteProperties, OtherFragmentOrdersAreRefusedAndNothingIsWritten) {
  const cpu::Isa isa = cpu::choose_isa("").take();
  Case s;
  Caches caches(s);
  caches.fill(20);
  caches.layer.geometry.order = FragmentOrder::kFp4Mma;
  const std::vector<std::uint8_t> before = caches.pages[0];
  const Status status = cpu::cpu_write(caches.params(0), *cpu::write_kernels(isa.target), {});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_NE(status.message().find("convert_fragment_order"), std::string::npos);
  EXPECT_TRUE(before == caches.pages[0]);
}

}  // namespace
}  // namespace bitdecoding
