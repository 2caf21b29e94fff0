// SPDX-License-Identifier: Apache-2.0
// Offsets that no 16- or 32-bit number holds, on every backend: page ids, page and head strides,
// tensor strides, shadow slots, sequences of a million tokens.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "backend/tensor.h"
#include "reserved_memory.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

constexpr Format kFormats[] = {Format::kBf16, Format::kFp8E4m3, Format::kNvfp4Rows, Format::kNvfp4,
                               Format::kMxfp4};
constexpr std::int64_t k4GiB = std::int64_t{1} << 32;
const std::vector<std::int32_t> kPages = {7, 3, 11, 1};
const std::vector<std::int64_t> kChunks = {100, 1, 3, 20};

class LargeAddresses : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backend, LargeAddresses, testing::ValuesIn(backend_names()),
                         [](const auto& backend) { return backend.param; });

// Steps of one sequence in two worlds; outputs must be equal, bit for bit.
void expect_equal_steps(World* want, World* got) {
  const int a = want->add_sequence(kPages);
  const int b = got->add_sequence(kPages);
  std::uint32_t next = 0;
  for (const std::int64_t n : kChunks) {
    const StepResult w = want->step({{a, iota_tokens(next, n)}});
    const StepResult g = got->step({{b, iota_tokens(next, n)}});
    ASSERT_TRUE(w.status.ok()) << w.status.message();
    ASSERT_TRUE(g.status.ok()) << g.status.message();
    ASSERT_EQ(w.output, g.output);
    ASSERT_EQ(w.lse, g.lse);
    next += static_cast<std::uint32_t>(n);
  }
}

// A page stride that aliases page 0 in 32 bits, and a head stride that does.
TEST_P(LargeAddresses, PageAndHeadStrides) {
  for (const Format f : kFormats) {
    WorldOptions o;
    o.format = f;
    o.backend = GetParam();
    o.num_pages = 12;
    for (const bool head_major : {false, true}) {
      SCOPED_TRACE(testing::Message() << format_name(f) << " head major " << head_major);
      World compact(o);
      World large(o);
      const std::int64_t head_bytes = large.layer.geometry.head_bytes;
      large.cache.stride_page = head_major ? k4GiB / 8 : k4GiB;
      large.cache.stride_head = head_major ? k4GiB * 2 : head_bytes;
      ReservedMemory memory(large.cache.stride_page * o.num_pages +
                            large.cache.stride_head * o.num_kv_heads);
      large.cache.pages = memory.base();
      for (const std::int32_t page : kPages) {
        for (int h = 0; h < o.num_kv_heads; ++h) {
          memory.open(page * large.cache.stride_page + h * large.cache.stride_head, head_bytes);
        }
      }
      expect_equal_steps(&compact, &large);
      if (HasFatalFailure()) return;
    }
  }
}

// Slots behind 2^32 BF16 elements.
TEST_P(LargeAddresses, ShadowSlots) {
  WorldOptions o;
  o.backend = GetParam();
  o.head_dim = 256;
  o.num_kv_heads = o.num_q_heads = 8;
  World compact(o);
  World large(o);
  const std::int64_t slot_bytes = shadow_slot_bytes(8, 16, 256);
  const auto first = static_cast<std::int32_t>(2 * k4GiB / slot_bytes);
  ReservedMemory memory((first + std::int64_t{o.num_slots}) * slot_bytes);
  large.shadow.rows = reinterpret_cast<std::uint16_t*>(memory.base());
  large.shadow.num_slots = first + o.num_slots;
  memory.open(first * slot_bytes, o.num_slots * slot_bytes);
  const int a = compact.add_sequence(kPages);
  const int b = large.add_sequence(kPages);
  std::uint32_t next = 0;
  for (const std::int64_t n : kChunks) {
    const StepResult want = compact.step({{a, iota_tokens(next, n)}});
    ASSERT_TRUE(want.status.ok()) << want.status.message();
    ASSERT_TRUE(large.plan_step({{b, iota_tokens(next, n)}}).ok());
    for (GroupWrite& w : large.plan.writes) w.slot += w.slot < 0 ? 0 : first;
    for (ShadowSpan& s : large.plan.spans) s.slot += first;
    ASSERT_TRUE(large.write().ok());
    const StepResult got = large.attend();
    ASSERT_TRUE(got.status.ok()) << got.status.message();
    ASSERT_EQ(want.output, got.output);
    next += static_cast<std::uint32_t>(n);
  }
}

// One side of a step as a tensor of the given strides, in memory of its own.
class Strided {
 public:
  Strided(DType dtype, std::int64_t tokens, int heads, int head_dim, std::int64_t stride_token,
          std::int64_t stride_head)
      : view{nullptr, dtype, stride_token, stride_head},
        memory_(((tokens - 1) * stride_token + (heads - 1) * stride_head + head_dim) *
                dtype_bytes(dtype)) {
    view.data = memory_.base();
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        memory_.open((t * stride_token + h * stride_head) * dtype_bytes(dtype),
                     std::int64_t{head_dim} * dtype_bytes(dtype));
      }
    }
  }
  void* data() { return memory_.base(); }
  TensorView view;

 private:
  ReservedMemory memory_;
};

// A step whose tensors have these strides: what it writes and what it answers.
std::vector<float> run_strided(const std::string& backend, std::int64_t tokens, DType dtype,
                               std::int64_t stride_token, std::int64_t stride_head,
                               std::vector<std::uint8_t>* page) {
  WorldOptions o;
  o.backend = backend;
  World w(o);
  const int s = w.add_sequence(kPages);
  EXPECT_TRUE(w.step({{s, iota_tokens(0, 40)}}).status.ok());
  EXPECT_TRUE(w.plan_step({{s, iota_tokens(40, tokens)}}).ok());
  const auto make = [&](int heads) {
    return std::make_unique<Strided>(dtype, tokens, heads, o.head_dim, stride_token, stride_head);
  };
  const auto query = make(o.num_q_heads);
  const auto key = make(o.num_kv_heads);
  const auto value = make(o.num_kv_heads);
  const auto output = make(o.num_q_heads);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto token = static_cast<std::uint32_t>(40 + t);
    for (int d = 0; d < o.head_dim; ++d) {
      for (int h = 0; h < o.num_q_heads; ++h) {
        const std::int64_t i = t * stride_token + h * stride_head + d;
        store_element(query->data(), dtype, i, w.query_of(token, token, h, d));
        if (h >= o.num_kv_heads) continue;
        store_element(key->data(), dtype, i, w.key_of(token, token, h, d));
        store_element(value->data(), dtype, i, w.value_of(token, token, h, d));
      }
    }
  }
  WriteParams p;
  p.layer = &w.layer;
  p.cache = w.cache;
  p.shadow = w.shadow;
  p.key = key->view;
  p.value = value->view;
  p.plan = &w.plan;
  Status status = w.backend->write(p);
  EXPECT_TRUE(status.ok()) << status.message();
  AttendParams a = w.params;
  a.query = query->view;
  a.key = key->view;
  a.value = value->view;
  a.output = output->data();
  a.output_dtype = dtype;
  a.stride_output_token = stride_token;
  a.stride_output_head = stride_head;
  a.lse = nullptr;
  status = w.backend->attend(a);
  EXPECT_TRUE(status.ok()) << status.message();
  *page = w.page_bytes(kPages[0]);
  std::vector<float> rows;
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int h = 0; h < o.num_q_heads; ++h) {
      for (int d = 0; d < o.head_dim; ++d) rows.push_back(load_element(output->view, t, h, d));
    }
  }
  return rows;
}

TEST_P(LargeAddresses, TensorStrides) {
  constexpr std::int64_t kLarge = (std::int64_t{1} << 31) + 64;  // elements
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const std::int64_t tokens :
         {3, 10}) {  // decoded from pages, and a chunk that reads itself
      std::vector<std::uint8_t> want_page;
      std::vector<std::uint8_t> page;
      const std::vector<float> want =
          run_strided(GetParam(), tokens, dtype, 4 * 64, 64, &want_page);
      for (const float x : want) ASSERT_TRUE(std::isfinite(x));
      EXPECT_EQ(run_strided(GetParam(), tokens, dtype, 4 * kLarge, kLarge, &page), want);
      EXPECT_EQ(page, want_page);
      EXPECT_EQ(run_strided(GetParam(), tokens, dtype, 64, 2 * kLarge, &page), want);
      EXPECT_EQ(page, want_page);
    }
  }
}

// 65536 aliases page 0 in 16 bits; 32768 pages of 128 KiB are 2^32 bytes.
TEST_P(LargeAddresses, PageIds) {
  const PageGeometry g = PageGeometry::make(Format::kNvfp4, FragmentOrder::kQuad, 64, 64).take();
  constexpr std::int64_t kStride = std::int64_t{1} << 17;
  constexpr std::int64_t kNumPages = 70001;
  const std::vector<std::int32_t> ids = {0, 1, 32768, 65535, 65536, 70000};
  ReservedMemory memory(kStride * kNumPages);
  for (const std::int32_t id : ids) memory.open(id * kStride, g.head_bytes);
  LayerConfig layer;
  layer.geometry = g;
  layer.num_kv_heads = layer.num_q_heads = 1;
  auto backend = make_backend(GetParam(), {}).take();
  auto directory =
      ShadowDirectory::make(g, make_shadow_rule(g, 0, 0, false), {kNumPages, 16, 8}).take();
  StepPlan plan;
  AttendParams a;
  a.layer = &layer;
  a.cache = {memory.base(), kNumPages, kStride, g.head_bytes};
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
}

// ---- long sequences ----------------------------------------------------------------------------

// Dense softmax over a sequence whose block table repeats four pages.
std::vector<double> repeated_softmax(const std::vector<float>& query, const std::vector<float>& k,
                                     const std::vector<float>& v, std::int64_t length) {
  const std::int64_t period = 256;
  std::vector<double> out(64, 0.0);
  std::vector<double> scores;
  for (std::int64_t t = 0; t < period; ++t) {
    double score = 0;
    for (int d = 0; d < 64; ++d) {
      score += static_cast<double>(query[static_cast<std::size_t>(d)]) *
               k[static_cast<std::size_t>(t * 64 + d)];
    }
    scores.push_back(score / 8);
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (std::int64_t t = 0; t < period; ++t) {
    const auto times = static_cast<double>(length / period + (t < length % period ? 1 : 0));
    const double weight = times * std::exp(scores[static_cast<std::size_t>(t)] - top);
    sum += weight;
    for (int d = 0; d < 64; ++d) {
      out[static_cast<std::size_t>(d)] += weight * v[static_cast<std::size_t>(t * 64 + d)];
    }
  }
  for (double& x : out) x /= sum;
  return out;
}

// Contexts of 64 Ki and 1 Mi tokens and every residue of group, tile and page.
TEST(LongSequences, ResiduesDoNotMatter) {
  WorldOptions o;
  o.backend = "cpu";
  o.num_kv_heads = o.num_q_heads = 1;
  World w(o);
  const int s = w.add_sequence(kPages);
  ASSERT_TRUE(w.step({{s, iota_tokens(0, 256)}}).status.ok());
  ASSERT_TRUE(w.plan_step({}).ok());
  std::vector<float> k(256 * 64);
  std::vector<float> v(k.size());
  std::vector<float> query;
  for (int d = 0; d < 64; ++d) query.push_back(w.query_of(9, 9, 0, d));
  auto directory =
      ShadowDirectory::make(w.layer.geometry, make_shadow_rule(w.layer.geometry, 0, 0, false),
                            {o.num_pages, 0, 1})
          .take();
  for (const std::int32_t base : {256, 1 << 16, 1 << 20}) {
    for (const std::int32_t residue : {0, 1, 15, 16, 17, 63, 64, 127}) {
      const std::int32_t length = base + residue;
      std::vector<std::int32_t> table;
      for (std::int64_t i = 0; i * 64 < length; ++i) {
        table.push_back(kPages[static_cast<std::size_t>(i % 4)]);
      }
      const std::int32_t starts[2] = {0, 1};
      const std::int64_t slot = -1;
      StepInput in;
      in.num_requests = 1;
      in.block_table = table.data();
      in.block_table_stride = static_cast<std::int64_t>(table.size());
      in.query_start = starts;
      in.seq_lens = &length;
      in.slot_mapping = &slot;
      in.num_tokens = 1;
      in.num_pages = o.num_pages;
      StepPlan plan;
      ASSERT_TRUE(directory->build(in, &plan).ok());
      AttendParams a = w.params;
      a.plan = &plan;
      a.query = {query.data(), DType::kF32, 64, 64};
      std::vector<float> out(64, NAN);
      a.output = out.data();
      a.stride_output_token = a.stride_output_head = 64;
      a.lse = nullptr;
      ASSERT_TRUE(w.backend->gather(a, 0, 0, 0, 256, k.data(), v.data()).ok());
      ASSERT_TRUE(w.backend->attend(a).ok());
      const std::vector<double> want = repeated_softmax(query, k, v, length);
      double error = 0;
      double norm = 0;
      for (std::size_t d = 0; d < 64; ++d) {
        error += (out[d] - want[d]) * (out[d] - want[d]);
        norm += want[d] * want[d];
      }
      // Two terms of 14 bits: as in cpu_attend_test.
      ASSERT_TRUE(std::sqrt(error / norm) <= 2.5e-4) << length << ": " << std::sqrt(error / norm);
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
