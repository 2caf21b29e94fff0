// Quantize: which bytes are written, that no stale one is ever read, and large pools.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>

#include "page/address.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

constexpr Format kFormats[] = {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4,
                               Format::kMxfp4};

const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};

TEST(ReferenceWriteMemory, WritesStayInsideTheirRows) {
  for (const Format f : kFormats) {
    WorldOptions o;
    o.format = f;
    o.page_padding = 2048;
    World w(o);
    const int s = w.add_sequence(kPages);
    std::vector<std::uint8_t> before(w.cache.pages,
                                     w.cache.pages + w.cache.stride_page * w.cache.num_pages);
    ASSERT_TRUE(w.step({{s, iota_tokens(0, 20)}}).status.ok());
    const PageGeometry& g = w.layer.geometry;
    std::vector<bool> allowed(static_cast<std::size_t>(g.head_bytes), false);
    for (int row = 0; row < 32; ++row) {
      for (int d = 0; d < padded_key_dims(g); ++d) {
        for (const Side side : {Side::kKey, Side::kValue}) {
          if (side == Side::kValue && d >= g.head_dim) continue;
          if (row >= 20 && (side == Side::kKey || !is_tiled(f))) continue;
          if (scale_block(f) == 0) {
            const auto at = static_cast<std::size_t>(element_address(g, side, row, d));
            allowed[at] = true;
            if (f == Format::kBf16) allowed[at + 1] = true;
            continue;
          }
          allowed[static_cast<std::size_t>(code_address(g, side, row, d).byte)] = true;
          allowed[static_cast<std::size_t>(scale_address(g, side, row, d))] = true;
        }
      }
    }
    for (std::size_t i = 0; i < before.size(); ++i) {
      const auto in_page = static_cast<std::int64_t>(i) % w.cache.stride_page;
      const bool own = static_cast<std::int64_t>(i) / w.cache.stride_page == kPages[0] &&
                       in_page < g.head_bytes * o.num_kv_heads &&
                       allowed[static_cast<std::size_t>(in_page % g.head_bytes)];
      if (!own) {
        ASSERT_EQ(w.cache.pages[i], before[i]) << i;
      }
    }
  }
}

TEST(ReferenceWriteMemory, StaleBytesNeverReachTheOutput) {
  for (const Format f : kFormats) {
    for (const bool reproducible : {false, true}) {
      for (const std::int64_t n : {1, 3, 9, 63, 65, 130}) {
        StepResult results[4];
        const std::uint8_t fills[4] = {0x00, 0x7F, 0xFF, 0xA5};
        for (int i = 0; i < 4; ++i) {
          WorldOptions o;
          o.format = f;
          o.reproducible = reproducible;
          o.tail_tokens = 0;
          o.sink_tokens = 0;
          o.fill = fills[i];
          World w(o);
          const int s = w.add_sequence(kPages);
          ASSERT_TRUE(w.step({{s, iota_tokens(0, n)}}).status.ok());
          results[i] = w.step({{s, {77, 78}}});
          ASSERT_TRUE(results[i].status.ok());
          EXPECT_EQ(w.corrupt_scales, 0U);
          for (const float x : results[i].output) ASSERT_TRUE(std::isfinite(x));
        }
        for (int i = 1; i < 4; ++i) {
          ASSERT_EQ(results[i].output, results[0].output);
          ASSERT_EQ(results[i].lse, results[0].lse);
        }
      }
    }
  }
}

// A cache of 70,001 pages of which only touched ones have memory: page ids above 65,535 and byte
// offsets above 2^32.
TEST(ReferenceWriteMemory, LargePageIdsAndOffsets) {
  const PageGeometry g = PageGeometry::make(Format::kNvfp4, FragmentOrder::kQuad, 64, 64).take();
  constexpr std::int64_t kStride = std::int64_t{1} << 17;
  constexpr std::int64_t kNumPages = 70001;
  const auto bytes = static_cast<std::size_t>(kStride * kNumPages);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  // 65536 aliases page 0 in 16 bits, 32768 * 2^17 is 2^32 and aliases page 0 in 32 bits.
  const std::vector<std::int32_t> ids = {0, 1, 32768, 65535, 65536, 70000};
  LayerConfig layer;
  layer.geometry = g;
  layer.num_kv_heads = layer.num_q_heads = 1;
  auto backend = make_backend("reference", {}).take();
  auto directory =
      ShadowDirectory::make(g, make_shadow_rule(g, 0, 0, false), {kNumPages, 16, 8}).take();
  StepPlan plan;
  AttendParams a;
  a.layer = &layer;
  a.cache = {static_cast<std::uint8_t*>(memory), kNumPages, kStride, g.head_bytes};
  a.plan = &plan;
  for (int round = 0; round < 2; ++round) {
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const std::vector<float> rows(64 * 64, static_cast<float>(6 << i));
      std::vector<std::int64_t> slots;
      for (int t = 0; t < 64; ++t) slots.push_back(std::int64_t{ids[i]} * 64 + t);
      const std::int32_t starts[2] = {0, round == 0 ? 64 : 0};
      const std::int32_t length = 64;
      StepInput in;
      in.num_requests = 1;
      in.block_table = &ids[i];
      in.block_table_stride = 1;
      in.query_start = starts;
      in.seq_lens = &length;
      in.slot_mapping = slots.data();
      in.num_tokens = starts[1];
      in.num_pages = kNumPages;
      const Status planned = directory->build(in, &plan);
      ASSERT_TRUE(planned.ok()) << planned.message();
      if (round == 0) {
        WriteParams p;
        p.layer = &layer;
        p.cache = a.cache;
        p.key = {rows.data(), DType::kF32, 64, 64};
        p.value = p.key;
        p.plan = &plan;
        ASSERT_TRUE(backend->write(p).ok());
        continue;
      }
      std::vector<float> k(64 * 64, NAN);
      std::vector<float> v(64 * 64, NAN);
      ASSERT_TRUE(backend->gather(a, 0, 0, 0, 64, k.data(), v.data()).ok());
      for (const float x : v) ASSERT_EQ(x, static_cast<float>(6 << i)) << ids[i];
    }
  }
  munmap(memory, bytes);
}

}  // namespace
}  // namespace bitdecoding::test
