// SPDX-License-Identifier: Apache-2.0
// The CPU backend's write against the reference backend, byte for byte: pages, shadow slots and
// counters, on every instruction set of this machine.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/isa.h"
#include "backend/cpu/thread_pool.h"
#include "backend/cpu/write.h"
#include "backend/reference/verbs.h"
#include "scale/rules.h"
#include "write_caches.h"

namespace bitdecoding {
namespace {

std::string describe(const WriteCase& s) {
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
void expect_equal_writes(const WriteCase& options, const std::vector<std::int64_t>& chunks) {
  SCOPED_TRACE(describe(options));
  const std::vector<cpu::Isa> isas = cpu::supported_isas();
  ASSERT_FALSE(isas.empty());
  const std::size_t reference = isas.size();
  WriteCaches caches(options, isas.size() + 1);
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
  WriteCase base() const {
    WriteCase s;
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
      WriteCase s = base();
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
      WriteCase s = base();
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
        WriteCase s = base();
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
    WriteCase s = base();
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
      WriteCase s;
      s.format = format;
      s.key_rule = s.value_rule = rules_of(format).front();
      s.seed = 7;
      WriteCaches caches(s);
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
  WriteCase s;
  WriteCaches caches(s);
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
