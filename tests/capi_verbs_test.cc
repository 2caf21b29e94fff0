// SPDX-License-Identifier: Apache-2.0
// bd_write and bd_attend: bad input writes nothing; memory, counters, threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "capi_engine.h"
#include "reserved_memory.h"

namespace bitdecoding {
namespace {

TEST(CapiVerbs, RefuseBadParamsAndWriteNothing) {
  const Runtime runtime(kRecipe);
  Engine engine(runtime.handle);
  ASSERT_EQ(engine.build(40, 40), BD_OK) << bd_last_error();
  const std::vector<std::uint8_t> before = engine.pages;
  const auto refused = [&](auto change, const char* part) {
    bd_write_params p = engine.write_params(40);
    change(p);
    EXPECT_NE(bd_write(&p), BD_OK) << part;
    EXPECT_HAS(bd_last_error(), part);
    EXPECT_EQ(engine.pages, before) << part;
  };
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  refused([](auto& p) { p.struct_size = 8; }, "struct_size is 8");
  refused([](auto& p) { p.layer = nullptr; }, "the layer is null");
  refused([](auto& p) { p.steps = nullptr; }, "the steps are null");
  refused([](auto& p) { p.num_tokens = 39; }, "the tensors have 39 tokens, and the step has 40");
  refused([](auto& p) { p.num_tokens = -1; }, "-1 tokens");
  refused([](auto& p) { p.key.data = nullptr; }, "the data of key is null");
  refused([](auto& p) { p.value.data = nullptr; }, "the data of value is null");
  refused([](auto& p) { p.key.dtype = 0; }, "the dtype of key is 0");
  refused([](auto& p) { p.value.dtype = 9; }, "the dtype of value is 9");
  refused([](auto& p) { p.key.stride_token = kDim; }, "key overlaps itself");
  refused([](auto& p) { p.key.stride_head = 0; }, "stride_head 0");
  refused([](auto& p) { p.key.stride_token = -128; }, "stride_token -128");
  refused([](auto& p) { p.key.stride_token = kHuge; }, "leaves the address space");
  refused([](auto& p) { p.key.data = static_cast<const char*>(p.key.data) + 1; }, "aligned");
  refused([](auto& p) { p.cache.pages = nullptr; }, "pages of the cache are null");
  refused([](auto& p) { p.cache.num_pages = kPages - 1; }, "the cache has 7 pages");
  refused([](auto& p) { p.cache.stride_head -= 1; }, "the cache has stride_page");
  refused([](auto& p) { p.cache.stride_page = p.cache.stride_head; }, "the cache overlaps itself");
  refused([](auto& p) { p.cache.stride_page = kHuge / 2; }, "leaves the address space");
  refused([](auto& p) { p.cache.num_slots = kSlots - 1; }, "the shadow pool has 31 slots");
  refused([](auto& p) { p.cache.shadow = nullptr; }, "the shadow pool is null");

  EXPECT_EQ(bd_write(nullptr), BD_INVALID_ARGUMENT);
  EXPECT_EQ(bd_attend(nullptr), BD_INVALID_ARGUMENT);
  bd_attend_params attend = engine.attend_params(40);
  attend.output.data = nullptr;
  EXPECT_EQ(bd_attend(&attend), BD_INVALID_ARGUMENT);
  attend = engine.attend_params(40);
  attend.query.dtype = 4;
  EXPECT_EQ(bd_attend(&attend), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "query");
  EXPECT_EQ(engine.output[0], -77.0F);
}

TEST(CapiVerbs, HandlesOfDifferentRuntimesOrPageSizesDoNotMix) {
  const Runtime one(kRecipe);
  const Runtime two(kRecipe);
  Engine a(one.handle);
  Engine b(two.handle);
  ASSERT_EQ(a.build(8, 8), BD_OK);
  bd_write_params p = a.write_params(8);
  p.layer = b.layer;
  EXPECT_EQ(bd_write(&p), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "different runtimes");

  bd_layer_options wide = layer_options();
  wide.page_size = 128;
  bd_layer* layer = nullptr;
  ASSERT_EQ(bd_layer_create(one.handle, &wide, &layer), BD_OK);
  p = a.write_params(8);
  p.layer = layer;
  EXPECT_EQ(bd_write(&p), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "pages of 128 tokens");
  bd_layer_destroy(layer);
}

TEST(CapiVerbs, WritesStayInsideThePagesAndCountNonFiniteInput) {
  const Runtime runtime(kRecipe);
  Engine engine(runtime.handle);
  engine.rows[3] = NAN;
  engine.rows[40 * kHeads * kDim + 9] = INFINITY;
  ASSERT_EQ(engine.build(200, 200), BD_OK) << bd_last_error();
  bd_write_params p = engine.write_params(200);
  ASSERT_EQ(bd_write(&p), BD_OK) << bd_last_error();
  for (std::size_t i = engine.pages.size() - 64; i < engine.pages.size(); ++i) {
    EXPECT_EQ(engine.pages[i], 0xA5);
  }
  // Pages 0, 4 and 7 belong to nobody; 5 is in the table beyond the length.
  for (const int page : {0, 4, 7}) {
    const auto begin = static_cast<std::size_t>(page * kHeads * engine.head_bytes);
    for (std::size_t i = 0; i < static_cast<std::size_t>(kHeads * engine.head_bytes); ++i) {
      ASSERT_EQ(engine.pages[begin + i], 0xA5) << page;
    }
  }
  auto counters = sized<bd_counters>();
  ASSERT_EQ(bd_counters_get(runtime.handle, &counters), BD_OK);
  // Each is in K once, and in V too: V's rows begin 17 elements later in the same array.
  EXPECT_GE(counters.non_finite, 2U);
  EXPECT_LE(counters.non_finite, 4U);
  EXPECT_EQ(counters.steps, 1U);
  EXPECT_GT(counters.used_slots, 0U);
  ASSERT_EQ(engine.build(201, 1), BD_OK);
  p = engine.write_params(1);
  ASSERT_EQ(bd_write(&p), BD_OK) << bd_last_error();
  bd_attend_params attend = engine.attend_params(1);
  ASSERT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
  for (int i = 0; i < 2 * kHeads * kDim; ++i) {
    EXPECT_TRUE(std::isfinite(engine.output[static_cast<std::size_t>(i)]));
    EXPECT_NE(engine.output[static_cast<std::size_t>(i)], -77.0F);
  }
  EXPECT_EQ(engine.output[2 * kHeads * kDim], -77.0F);
}

// ---- padding -----------------------------------------------------------------------------------

struct Padded {
  std::vector<std::int32_t> starts, lengths;
  std::vector<std::int64_t> slots;
  std::int64_t rows = 0;  // of the tensors
};

struct Written {
  std::vector<std::uint8_t> pages;
  std::vector<std::uint16_t> shadow;
  std::vector<float> output;
};

// One step in pages 0, 1, ...; `slots` is where the step's mapping lies.
Written run_padded(const std::string& backend, const Padded& step, const std::int64_t* slots) {
  const Runtime runtime(kRecipe, nullptr, backend.c_str());
  Engine engine(runtime.handle);
  const auto real = static_cast<std::size_t>(step.lengths[0]);
  std::fill(engine.rows.begin() + static_cast<std::ptrdiff_t>(real * kHeads * kDim),
            engine.rows.begin() + static_cast<std::ptrdiff_t>(step.rows * kHeads * kDim), NAN);
  const std::vector<std::int32_t> table(2 * step.lengths.size(), 0);
  std::vector<std::int32_t> pages = table;
  pages[1] = 1;
  auto input = sized<bd_step_input>();
  input.num_requests = static_cast<std::int32_t>(step.lengths.size());
  input.block_table = pages.data();
  input.block_table_stride = 2;
  input.query_start = step.starts.data();
  input.seq_lens = step.lengths.data();
  input.slot_mapping = slots;
  input.num_tokens = static_cast<std::int64_t>(step.slots.size());
  EXPECT_EQ(bd_steps_build(engine.steps, &input), BD_OK) << bd_last_error();
  bd_write_params write = engine.write_params(static_cast<int>(step.rows));
  write.value = write.key;
  EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
  bd_attend_params attend = engine.attend_params(static_cast<int>(step.rows));
  attend.value = attend.key;
  EXPECT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
  auto counters = sized<bd_counters>();
  EXPECT_EQ(bd_counters_get(runtime.handle, &counters), BD_OK);
  EXPECT_EQ(counters.non_finite, 0U);
  const auto outputs = static_cast<std::ptrdiff_t>(real * 2 * kHeads * kDim);
  return {engine.pages, engine.shadow, {engine.output.begin(), engine.output.begin() + outputs}};
}

void expect_same(const Written& got, const Written& want) {
  EXPECT_EQ(got.pages, want.pages);
  EXPECT_EQ(got.shadow, want.shadow);
  EXPECT_EQ(got.output, want.output);
}

std::vector<std::int64_t> first_slots(std::int64_t n) {
  std::vector<std::int64_t> slots;
  for (std::int64_t i = 0; i < n; ++i) slots.push_back(i);
  return slots;
}

class CapiPadding : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backend, CapiPadding, testing::Values("cpu", "reference"),
                         [](const auto& backend) { return backend.param; });

// A step of a captured size: the tensors' rows behind the real ones hold anything.
TEST_P(CapiPadding, RowsBehindTheMappingAreNotRead) {
  const Padded exact{{0, 37}, {37}, first_slots(37), 37};
  Padded more = exact;
  more.rows = 64;
  test::ReservedMemory memory(4096);
  constexpr std::int64_t kBytes = 37 * 8;
  void* guarded = memory.open_before_the_end(kBytes);
  std::memcpy(guarded, more.slots.data(), kBytes);
  expect_same(run_padded(GetParam(), more, static_cast<const std::int64_t*>(guarded)),
              run_padded(GetParam(), exact, exact.slots.data()));
}

// -1 is neither the last slot nor slot 0, which a real request owns here.
TEST_P(CapiPadding, SkippedRowsLeaveEveryByteAlone) {
  const Padded exact{{0, 3}, {3}, first_slots(3), 3};
  const Written want = run_padded(GetParam(), exact, exact.slots.data());
  Padded loose = exact;  // rows of no request
  loose.slots.resize(8, -1);
  loose.rows = 8;
  expect_same(run_padded(GetParam(), loose, loose.slots.data()), want);
  Padded empty = loose;  // and a request without rows and tokens
  empty.starts = {0, 3, 3};
  empty.lengths = {3, 0};
  expect_same(run_padded(GetParam(), empty, empty.slots.data()), want);
  Padded owned = loose;  // and one of five rows, without tokens
  owned.starts = {0, 3, 8};
  owned.lengths = {3, 0};
  expect_same(run_padded(GetParam(), owned, owned.slots.data()), want);
}

// The caller writes zeros over a page that holds a sink and part of the tail, then attends.
std::vector<float> output_with_a_replaced_page(bool forget, bd_counters* counters) {
  const Runtime runtime(kRecipe);
  Engine engine(runtime.handle);
  EXPECT_EQ(engine.build(100, 100), BD_OK) << bd_last_error();
  bd_write_params write = engine.write_params(100);
  EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
  const std::int64_t page_bytes = kHeads * engine.head_bytes;
  std::fill_n(engine.pages.begin() + 3 * page_bytes, page_bytes, std::uint8_t{0});
  if (forget) {
    EXPECT_EQ(bd_steps_forget(engine.steps, 3), BD_OK) << bd_last_error();
    // The old plan named slots that are gone.
    EXPECT_EQ(bd_write(&write), BD_INVALID_ARGUMENT);
    EXPECT_HAS(bd_last_error(), "have no plan");
  }
  EXPECT_EQ(bd_counters_get(runtime.handle, counters), BD_OK);
  const std::uint64_t used = counters->used_slots;
  EXPECT_EQ(engine.build(101, 1), BD_OK) << bd_last_error();
  write = engine.write_params(1);
  EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
  const bd_attend_params attend = engine.attend_params(1);
  EXPECT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
  EXPECT_EQ(bd_counters_get(runtime.handle, counters), BD_OK);
  counters->used_slots = used;
  return {engine.output.begin(), engine.output.begin() + std::ptrdiff_t{2} * kHeads * kDim};
}

TEST(CapiVerbs, AForgottenPageIsReadFromItsCodes) {
  auto kept = sized<bd_counters>();
  auto forgotten = sized<bd_counters>();
  const std::vector<float> from_slots = output_with_a_replaced_page(false, &kept);
  const std::vector<float> from_codes = output_with_a_replaced_page(true, &forgotten);
  EXPECT_EQ(kept.missing_tokens, 0U);
  // The sink, and positions 32 to 63: the tail of 101 tokens begins at 32.
  EXPECT_EQ(forgotten.missing_tokens, 16U + 32U);
  EXPECT_EQ(forgotten.used_slots, kept.used_slots - 3);
  EXPECT_NE(from_slots, from_codes);
}

TEST(CapiVerbs, OnlyPagesOfThePoolCanBeForgotten) {
  const Runtime runtime(kRecipe);
  Engine engine(runtime.handle);
  EXPECT_EQ(bd_steps_forget(nullptr, 0), BD_INVALID_ARGUMENT);
  ASSERT_EQ(engine.build(8, 8), BD_OK) << bd_last_error();
  for (const std::int64_t page : {std::int64_t{-1}, std::int64_t{kPages}}) {
    EXPECT_EQ(bd_steps_forget(engine.steps, page), BD_OUT_OF_RANGE);
    EXPECT_HAS(bd_last_error(), "expected 0 to 7");
  }
  // A refusal leaves the plan as it was.
  const bd_write_params write = engine.write_params(8);
  EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
}

// The BF16 rows move on once a step, not once a layer.
TEST(CapiVerbs, OnePlanServesAllLayersOfAStep) {
  const Runtime runtime(kRecipe);
  Engine one(runtime.handle);
  bd_layer_options options = layer_options();
  options.layer_index = 1;
  Engine two(runtime.handle, options);
  int tokens = 0;
  for (const int n : {20, 1, 1, 30, 1}) {
    tokens += n;
    ASSERT_EQ(one.build(tokens, n), BD_OK) << bd_last_error();
    for (Engine* engine : {&one, &two}) {
      bd_write_params write = engine->write_params(n);
      bd_attend_params attend = engine->attend_params(n);
      write.steps = attend.steps = one.steps;
      ASSERT_EQ(bd_write(&write), BD_OK) << bd_last_error();
      ASSERT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
    }
    ASSERT_EQ(one.pages, two.pages);
    ASSERT_EQ(one.shadow, two.shadow);
    ASSERT_EQ(one.output, two.output);
  }
  auto counters = sized<bd_counters>();
  ASSERT_EQ(bd_counters_get(runtime.handle, &counters), BD_OK);
  EXPECT_EQ(counters.steps, 5U);
  EXPECT_EQ(counters.lost_partial_groups, 0U);
  EXPECT_EQ(counters.used_slots, 4U);  // 53 tokens: all in BF16
}

TEST(CapiVerbs, ErrorsBelongToTheirThread) {
  bd_runtime* runtime = nullptr;
  EXPECT_NE(bd_runtime_create(nullptr, &runtime), BD_OK);
  const std::string mine = bd_last_error();
  std::string other = "unset";
  std::thread([&] { other = bd_last_error(); }).join();
  EXPECT_EQ(other, "");
  EXPECT_EQ(bd_last_error(), mine);
  EXPECT_NE(mine, "");
}

TEST(CapiVerbs, LayersOfOneRuntimeRunOnTheirOwnThreads) {
  const Runtime runtime(kRecipe);
  std::vector<std::unique_ptr<Engine>> engines;
  for (int i = 0; i < 4; ++i) engines.push_back(std::make_unique<Engine>(runtime.handle));
  std::vector<std::thread> threads;
  for (auto& engine : engines) {
    threads.emplace_back([&engine] {
      ASSERT_EQ(engine->build(100, 100), BD_OK);
      bd_write_params write = engine->write_params(100);
      ASSERT_EQ(bd_write(&write), BD_OK);
      ASSERT_EQ(engine->build(101, 1), BD_OK);
      write = engine->write_params(1);
      ASSERT_EQ(bd_write(&write), BD_OK);
      bd_attend_params attend = engine->attend_params(1);
      ASSERT_EQ(bd_attend(&attend), BD_OK);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& engine : engines) {
    EXPECT_EQ(engine->pages, engines[0]->pages);
    EXPECT_EQ(engine->output, engines[0]->output);
  }
  auto counters = sized<bd_counters>();
  ASSERT_EQ(bd_counters_get(runtime.handle, &counters), BD_OK);
  EXPECT_EQ(counters.steps, 8U);
}

TEST(CapiMemory, HugePagesAreAWish) {
  std::vector<char> memory(1 << 20);
  std::int64_t advised = -1;
  EXPECT_EQ(bd_advise_huge_pages(memory.data(), 1 << 20, &advised), BD_OK);
  EXPECT_GE(advised, 0);
  EXPECT_LE(advised, 1 << 20);
  EXPECT_EQ(bd_advise_huge_pages(memory.data(), 10, &advised), BD_OK);
  EXPECT_EQ(advised, 0);
  EXPECT_EQ(bd_advise_huge_pages(nullptr, 10, nullptr), BD_INVALID_ARGUMENT);
  EXPECT_EQ(bd_advise_huge_pages(memory.data(), -1, nullptr), BD_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace bitdecoding
