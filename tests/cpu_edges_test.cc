// SPDX-License-Identifier: Apache-2.0
// Attention at the edges of numbers and of sequences, on every instruction set of this machine
// against the reference.
#include <gtest/gtest.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cmath>
#include <limits>
#include <thread>

#include "attend_compare.h"
#include "backend/cpu/cpu_backend.h"
#include "page/address.h"

namespace bitdecoding::test {
namespace {

constexpr double kWideTolerance = 2.5e-4;
const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};

std::unique_ptr<Backend> cpu_backend(const std::string& isa) {
  BackendOptions options;
  options.isa = isa;
  options.num_threads = 2;
  Result<std::unique_ptr<Backend>> backend = make_backend("cpu", options);
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  return backend.ok() ? backend.take() : nullptr;
}

class CpuEdges : public testing::TestWithParam<std::string> {
 protected:
  // Two worlds with one sequence each.
  void make(const WorldOptions& options) {
    want = std::make_unique<World>(options);
    got = std::make_unique<World>(options);
    got->backend = cpu_backend(GetParam());
    for (World* w : {want.get(), got.get()}) w->add_sequence(kPages);
  }
  std::vector<World*> worlds() { return {want.get(), got.get()}; }

  static void expect_equal(const StepResult& got, const StepResult& want, double limit) {
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    EXPECT_LE(relative_error(got.output, want.output, 0, want.output.size()), limit);
    for (std::size_t i = 0; i < want.lse.size(); ++i) {
      if (std::isinf(want.lse[i])) {
        ASSERT_EQ(got.lse[i], want.lse[i]) << "lse " << i;
      } else {
        ASSERT_NEAR(got.lse[i], want.lse[i], 0.01 + 1e-4 * std::fabs(want.lse[i])) << "lse " << i;
      }
    }
  }

  std::unique_ptr<World> want, got;
};
INSTANTIATE_TEST_SUITE_P(Isa, CpuEdges, testing::ValuesIn(cpu_supported_isas()),
                         [](const auto& isa) { return isa.param; });

// A step of n tokens whose queries are those of the world times `factor`.
StepResult scaled_step(World& w, std::uint32_t first, std::int64_t n, float factor) {
  StepResult result = w.step({{0, iota_tokens(first, n)}});
  if (!result.status.ok()) return result;
  const auto rows = static_cast<std::size_t>(n * w.options.num_q_heads);
  const auto* query = static_cast<const float*>(w.params.query.data);
  std::vector<float> scaled(query, query + rows * static_cast<std::size_t>(w.options.head_dim));
  for (float& q : scaled) q *= factor;
  AttendParams params = w.params;
  std::vector<float> output(scaled.size(), NAN);
  params.query.data = scaled.data();
  params.output = output.data();
  params.lse = result.lse.data();
  result.status = w.backend->attend(params);
  result.output = output;
  return result;
}

// Scores so large that a row sees one key alone, and so small that it sees all alike. The smallest
// numbers times a scale of keys are below what a float holds.
TEST_P(CpuEdges, HugeAndTinyQueries) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4, Format::kBf16}) {
    for (const float factor : {1e-37F, 1e-20F, 1e6F, 1e30F}) {
      for (const int outer : {0, -64}) {
        if (outer != 0 && (!is_tiled(format) || factor > 1.0F)) continue;
        for (const float softcap : {0.0F, 30.0F}) {
          if (softcap != 0.0F && format != Format::kNvfp4) continue;
          SCOPED_TRACE(testing::Message() << format_name(format) << " times " << factor
                                          << " outer 2^" << outer << " softcap " << softcap);
          WorldOptions o;
          o.format = format;
          o.outer_exponent = outer;
          o.shift = factor < 1.0F;  // its dot product with a query cancels the keys' own
          o.tail_tokens = 16;
          // Three rows a token: a block of rows has tokens on both sides of a tile's border.
          o.num_kv_heads = 1;
          o.num_q_heads = 3;
          make(o);
          set_masks(*want, {-1, softcap, nullptr});
          set_masks(*got, {-1, softcap, nullptr});
          std::uint32_t next = 0;
          for (const std::int64_t n : {100, 400}) {
            const StepResult a = scaled_step(*want, next, n, factor);
            expect_equal(scaled_step(*got, next, n, factor), a, 0.02);
            next += static_cast<std::uint32_t>(n);
          }
        }
      }
    }
  }
}

// A step of more rows than the sequence has tokens: an engine pads a chunk in front.
TEST_P(CpuEdges, RowsBeforeTheSequence) {
  constexpr std::int64_t kRows = 400;
  for (const int group : {1, 2, 64}) {
    SCOPED_TRACE(testing::Message() << "group " << group);
    WorldOptions o;
    o.num_kv_heads = 1;
    o.num_q_heads = group;
    make(o);
    std::int32_t length = 10;
    std::vector<std::int64_t> slots(kRows, -1);
    for (int i = 0; i < length; ++i) {
      slots[static_cast<std::size_t>(kRows - length + i)] = kPages[0] * 64 + i;
    }
    std::vector<StepResult> results;
    for (World* w : worlds()) {
      ASSERT_TRUE(w->plan_step({{0, iota_tokens(0, kRows)}}).ok());
      w->input.slot_mapping = slots.data();
      w->input.seq_lens = &length;
      ASSERT_TRUE(w->directory->build(w->input, &w->plan).ok());
      ASSERT_TRUE(w->write().ok());
      results.push_back(w->attend());
    }
    expect_equal(results[1], results[0], kWideTolerance);
  }
}

// Rows of a chunk that are not written (slot -1): the bytes of their pages may be anything, also
// infinity and NaN.
TEST_P(CpuEdges, UnwrittenRowsOfAChunk) {
  for (const Format format :
       {Format::kNvfp4, Format::kMxfp4, Format::kNvfp4Rows, Format::kFp8E4m3, Format::kBf16}) {
    for (const int fill : {0x7E, 0x7F, 0xFE, 0xFF}) {
      for (const std::int64_t skip : {5, 50, 70}) {
        SCOPED_TRACE(testing::Message()
                     << format_name(format) << " fill " << fill << " skip " << skip);
        WorldOptions o;
        o.format = format;
        o.fill = static_cast<std::uint8_t>(fill);
        o.sink_tokens = o.tail_tokens = 0;  // read from pages up to the rows at hand
        make(o);
        std::vector<StepResult> results;
        for (World* w : worlds()) {
          ASSERT_TRUE(w->step({{0, iota_tokens(0, 96)}}).status.ok());
          results.push_back(w->step({{0, iota_tokens(96, 90), skip}}));
        }
        expect_equal(results[1], results[0], kWideTolerance);
        EXPECT_EQ(got->corrupt_scales, want->corrupt_scales);
      }
    }
  }
}

// NaN where the reference has it, with outer scales, windows and whole tiles before and after.
TEST_P(CpuEdges, CorruptScalesOfAChunk) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4, Format::kNvfp4Rows}) {
    for (const int outer : {0, -3, 5}) {
      if (outer != 0 && !is_tiled(format)) continue;
      for (const int window : {-1, 40}) {
        for (const std::size_t tile : {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {
          for (const Side side : {Side::kKey, Side::kValue}) {
            SCOPED_TRACE(testing::Message()
                         << format_name(format) << " outer 2^" << outer << " window " << window
                         << " tile " << tile << " side " << static_cast<int>(side));
            WorldOptions o;
            o.format = format;
            o.outer_exponent = outer;
            o.tail_tokens = o.sink_tokens = 0;
            o.num_q_heads = 6;
            make(o);
            std::vector<StepResult> results;
            for (World* w : worlds()) {
              w->params.window_left = window;
              ASSERT_TRUE(w->step({{0, iota_tokens(0, 230)}}).status.ok());
              const std::int64_t at = scale_address(w->layer.geometry, side, 5, 3);
              w->head_bytes(kPages[tile], 1)[at] = 0xFF;
              results.push_back(w->step({{0, iota_tokens(230, 37)}}));
              ASSERT_TRUE(results.back().status.ok());
            }
            EXPECT_EQ(got->corrupt_scales > 0, want->corrupt_scales > 0);
            std::vector<float>& a = results[0].output;
            std::vector<float>& b = results[1].output;
            for (std::size_t i = 0; i < a.size(); ++i) {
              ASSERT_EQ(std::isnan(a[i]), std::isnan(b[i])) << "element " << i;
              if (std::isnan(a[i])) a[i] = b[i] = 0.0F;
            }
            EXPECT_LE(relative_error(b, a, 0, a.size()), kWideTolerance);
          }
        }
      }
    }
  }
}

// More tokens than an item takes, beside decoded tokens and a first chunk; one head sees no sink.
TEST_P(CpuEdges, LongSequenceBesideOthers) {
  const std::vector<float> sinks = {-std::numeric_limits<float>::infinity(), 0.5F, -3.0F};
  for (const bool plain : {false, true}) {
    WorldOptions o;
    o.page_size = 1024;
    o.num_slots = 256;
    o.num_kv_heads = 1;
    o.num_q_heads = 3;
    o.shift = o.hadamard = !plain;
    o.outer_exponent = 2;
    want = std::make_unique<World>(o);
    got = std::make_unique<World>(o);
    got->backend = cpu_backend(GetParam());
    std::vector<StepResult> results;
    for (World* w : worlds()) {
      w->params.attn_sink = sinks.data();
      w->add_sequence({1, 2, 3, 4, 5, 6, 7, 8, 9, 10});
      w->add_sequence({11, 12});
      w->add_sequence({13, 14});
      // The prefix is written alone: the reference takes long to attend to it.
      ASSERT_TRUE(w->plan_step({{0, iota_tokens(0, 8900)}, {1, iota_tokens(1, 700)}}).ok());
      ASSERT_TRUE(w->write().ok());
      results.push_back(w->step(
          {{1, iota_tokens(9000, 1)}, {0, iota_tokens(9001, 33)}, {2, iota_tokens(9200, 200)}}));
    }
    expect_equal(results[1], results[0], kWideTolerance);
  }
}

#if defined(__x86_64__)
// Callers flush subnormals to zero and take them for zero at times. Scales of E4M3 must not become
// zero on their way to floats, and the caller finds its modes as they were.
TEST_P(CpuEdges, CallersFlushModes) {
  constexpr unsigned kFlush = 0x8040;
  constexpr unsigned kExceptions = 0x3F;
  const unsigned usual = _mm_getcsr();
  for (const Format format :
       {Format::kNvfp4, Format::kMxfp4, Format::kNvfp4Rows, Format::kFp8E4m3}) {
    WorldOptions o;
    o.format = format;
    make(o);
    std::uint32_t next = 0;
    for (const std::int64_t n : {150, 1, 30}) {
      SCOPED_TRACE(testing::Message() << format_name(format) << " after " << next);
      std::vector<float> rows(static_cast<std::size_t>(n * o.num_kv_heads * o.head_dim));
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = 0.02F * normal_of(i + next);
      std::vector<StepResult> results;
      for (World* w : worlds()) {
        ASSERT_TRUE(w->plan_step({{0, iota_tokens(next, n)}}).ok());
        const unsigned mode = w == got.get() ? usual | kFlush : usual;
        _mm_setcsr(mode);
        const Status status = w->write_rows(rows, rows);
        results.push_back(w->attend());
        const unsigned after = _mm_getcsr();
        _mm_setcsr(usual);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_EQ(after & ~kExceptions, mode & ~kExceptions);
      }
      for (const std::int32_t page : kPages) {
        ASSERT_EQ(want->page_bytes(page), got->page_bytes(page));
      }
      expect_equal(results[1], results[0], kWideTolerance);
      next += static_cast<std::uint32_t>(n);
    }
  }
}
#endif

// Two backends, each with a caller of its own: the results of each alone.
TEST_P(CpuEdges, TwoBackendsAtOnce) {
  const auto run = [this](std::uint32_t first) {
    World w(WorldOptions{});
    w.backend = cpu_backend(GetParam());
    w.add_sequence(kPages);
    std::vector<float> rows;
    for (const std::int64_t n : {70, 1, 90, 12}) {
      const StepResult result = w.step({{0, iota_tokens(first, n)}});
      EXPECT_TRUE(result.status.ok()) << result.status.message();
      rows.insert(rows.end(), result.output.begin(), result.output.end());
      first += static_cast<std::uint32_t>(n);
    }
    return rows;
  };
  const std::vector<float> alone[2] = {run(0), run(500)};
  std::vector<float> together[2];
  std::thread other([&] { together[1] = run(500); });
  together[0] = run(0);
  other.join();
  EXPECT_EQ(together[0], alone[0]);
  EXPECT_EQ(together[1], alone[1]);
}

}  // namespace
}  // namespace bitdecoding::test
