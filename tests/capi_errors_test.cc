// Bad input through the C ABI: each a status and a sentence, and nothing is written. Also counters,
// calibration, sidecars and threads.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bitdecoding/bitdecoding.h"
#include "io/key_shift.h"

namespace bitdecoding {
namespace {

#define EXPECT_HAS(text, part)                               \
  EXPECT_NE(std::string(text).find(part), std::string::npos) \
      << "\"" << (text) << "\" lacks \"" << (part) << "\""

constexpr int kHeads = 2;
constexpr int kDim = 64;
constexpr int kPage = 64;
constexpr int kPages = 8;
constexpr int kSlots = 32;

template <class T>
T sized() {
  T value;
  std::memset(&value, 0, sizeof(value));
  value.struct_size = sizeof(value);
  return value;
}

struct Runtime {
  explicit Runtime(const char* recipe, const char* file = nullptr) {
    auto options = sized<bd_runtime_options>();
    options.recipe_json = recipe;
    options.recipe_file = file;
    options.origin = "test";
    options.backend = "reference";
    options.model = "tiny";
    status = bd_runtime_create(&options, &handle);
    error = bd_last_error();
  }
  ~Runtime() { bd_runtime_destroy(handle); }
  bd_runtime* handle = nullptr;
  bd_status status = BD_OK;
  std::string error;
};

bd_layer_options layer_options() {
  auto o = sized<bd_layer_options>();
  o.num_layers = 2;
  o.num_q_heads = 2 * kHeads;
  o.num_kv_heads = kHeads;
  o.total_kv_heads = kHeads;
  o.head_dim = kDim;
  o.page_size = kPage;
  o.sm_scale = 0.125F;
  o.window_left = -1;
  return o;
}

bd_steps_options steps_options() {
  auto o = sized<bd_steps_options>();
  o.head_dim = kDim;
  o.page_size = kPage;
  o.num_pages = kPages;
  o.num_slots = kSlots;
  o.max_requests = 2;
  return o;
}

// One layer and its steps over poisoned memory with canaries behind it.
struct Engine {
  explicit Engine(bd_runtime* runtime, bd_layer_options options = layer_options()) {
    auto info = sized<bd_page_info>();
    EXPECT_EQ(bd_page_info_get(runtime, kDim, kPage, 2, &info), BD_OK) << bd_last_error();
    EXPECT_EQ(bd_layer_create(runtime, &options, &layer), BD_OK) << bd_last_error();
    const bd_steps_options so = steps_options();
    EXPECT_EQ(bd_steps_create(runtime, &so, &steps), BD_OK) << bd_last_error();
    head_bytes = info.head_bytes;
    pages.assign(static_cast<std::size_t>(kPages * kHeads * info.head_bytes + 64), 0xA5);
    shadow.assign(static_cast<std::size_t>(kSlots * kHeads * info.slot_bytes_per_head / 2), 0x7FC0);
    rows.resize(300 * kHeads * kDim);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      rows[i] = std::sin(0.37F * static_cast<float>(i)) + 0.5F;
    }
    query.resize(2 * rows.size(), 0.25F);
    output.resize(query.size(), -77.0F);
  }
  ~Engine() {
    bd_layer_destroy(layer);
    bd_steps_destroy(steps);
  }

  bd_status build(int seq_len, int count) {
    std::vector<std::int32_t> table = {3, 1, 6, 2, 5};
    std::vector<std::int64_t> slots;
    for (int i = seq_len - count; i < seq_len; ++i) {
      slots.push_back(std::int64_t{table[static_cast<std::size_t>(i / kPage)]} * kPage + i % kPage);
    }
    const std::int32_t query_start[] = {0, count};
    const std::int32_t seq_lens[] = {seq_len};
    auto input = sized<bd_step_input>();
    input.num_requests = 1;
    input.block_table = table.data();
    input.block_table_stride = 5;
    input.query_start = query_start;
    input.seq_lens = seq_lens;
    input.slot_mapping = slots.data();
    input.num_tokens = count;
    return bd_steps_build(steps, &input);
  }

  bd_cache cache() {
    bd_cache c{};
    c.pages = pages.data();
    c.num_pages = kPages;
    c.stride_head = head_bytes;
    c.stride_page = kHeads * head_bytes;
    c.shadow = shadow.data();
    c.num_slots = kSlots;
    return c;
  }
  static bd_tensor tensor(const float* data, int heads) {
    bd_tensor t{};
    t.data = data;
    t.stride_token = heads * kDim;
    t.stride_head = kDim;
    t.dtype = BD_F32;
    return t;
  }
  bd_write_params write_params(int count) {
    auto p = sized<bd_write_params>();
    p.layer = layer;
    p.steps = steps;
    p.cache = cache();
    p.key = tensor(rows.data(), kHeads);
    p.value = tensor(rows.data() + 17, kHeads);
    p.num_tokens = count;
    return p;
  }
  bd_attend_params attend_params(int count) {
    auto p = sized<bd_attend_params>();
    p.layer = layer;
    p.steps = steps;
    p.cache = cache();
    p.query = tensor(query.data(), 2 * kHeads);
    p.key = tensor(rows.data(), kHeads);
    p.value = tensor(rows.data() + 17, kHeads);
    p.output = tensor(output.data(), 2 * kHeads);
    p.num_tokens = count;
    return p;
  }

  bd_layer* layer = nullptr;
  bd_steps* steps = nullptr;
  std::int64_t head_bytes = 0;
  std::vector<std::uint8_t> pages;
  std::vector<std::uint16_t> shadow;
  std::vector<float> rows, query, output;
};

constexpr const char* kRecipe = R"({"key_shift": false})";

// ---- runtime -----------------------------------------------------------------------------------

TEST(CapiRuntime, DescribesItself) {
  const Runtime runtime(R"({"key_shift": false, "sink_tokens": 32})");
  ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
  const nlohmann::json json = nlohmann::json::parse(bd_runtime_describe(runtime.handle));
  EXPECT_EQ(json["version"], bd_version());
  EXPECT_EQ(json["backend"], "reference");
  EXPECT_EQ(json["recipe"]["sink_tokens"], 32);
  EXPECT_TRUE(json["sidecar"].is_null());
  EXPECT_TRUE(json["warnings"].empty());
  EXPECT_STREQ(bd_runtime_recipe_value(runtime.handle, "format"), "nvfp4");
  EXPECT_STREQ(bd_runtime_recipe_value(runtime.handle, "sink_tokens"), "32");
  EXPECT_STREQ(bd_runtime_recipe_value(runtime.handle, "key_shift"), "false");
  EXPECT_EQ(bd_runtime_recipe_value(runtime.handle, "nope"), nullptr);
  EXPECT_EQ(bd_runtime_recipe_value(nullptr, "format"), nullptr);
}

TEST(CapiRuntime, WithoutARecipeItIsTheMethodWithoutKeyMeans) {
  const Runtime runtime(nullptr);
  ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
  EXPECT_STREQ(bd_runtime_recipe_value(runtime.handle, "mode"), "bitdecoding-nvfp4");
  EXPECT_STREQ(bd_runtime_recipe_value(runtime.handle, "key_shift"), "false");
}

TEST(CapiRuntime, RefusesBadOptions) {
  const auto error_of = [](bd_runtime_options options, bd_status expected) {
    auto* runtime = reinterpret_cast<bd_runtime*>(1);
    EXPECT_EQ(bd_runtime_create(&options, &runtime), expected);
    EXPECT_TRUE(runtime == nullptr || options.struct_size != sizeof(options));
    return std::string(bd_last_error());
  };
  auto options = sized<bd_runtime_options>();
  options.backend = "reference";
  options.recipe_json = kRecipe;
  options.struct_size = sizeof(options) - 8;
  EXPECT_HAS(error_of(options, BD_INVALID_ARGUMENT), "bd_runtime_options.struct_size is");
  options.struct_size = sizeof(options);
  options.num_threads = -1;
  EXPECT_HAS(error_of(options, BD_INVALID_ARGUMENT), "num_threads is -1");
  options.num_threads = 0;
  options.recipe_json = R"({"mode": "turboquant-4bit-nc"})";
  EXPECT_HAS(error_of(options, BD_UNSUPPORTED), "CUDA");
  options.recipe_json = R"({"key_shift_file": "/nowhere/key_shift.safetensors"})";
  EXPECT_HAS(error_of(options, BD_NOT_FOUND), "/nowhere/key_shift.safetensors");
  options.recipe_json = nullptr;
  options.recipe_file = "/nowhere/recipe.json";
  EXPECT_HAS(error_of(options, BD_NOT_FOUND), "/nowhere/recipe.json");
  EXPECT_EQ(bd_runtime_create(&options, nullptr), BD_INVALID_ARGUMENT);
}

TEST(CapiRuntime, PageInfo) {
  const Runtime runtime(kRecipe);
  auto info = sized<bd_page_info>();
  ASSERT_EQ(bd_page_info_get(runtime.handle, 128, 128, 4, &info), BD_OK);
  EXPECT_EQ(info.head_bytes, 2 * 9216);
  EXPECT_EQ(info.bytes_per_token_x1000, 144000);
  EXPECT_EQ(info.group_tokens, 16);
  EXPECT_EQ(info.groups_per_page, 8);
  EXPECT_EQ(info.slot_bytes_per_head, 2 * 16 * 128 * 2);
  EXPECT_GE(info.min_slots, 4 * 2);  // a sink and a partial group for each request
  EXPECT_NE(bd_page_info_get(runtime.handle, 72, 128, 4, &info), BD_OK);
  EXPECT_HAS(bd_last_error(), "72");
  EXPECT_NE(bd_page_info_get(runtime.handle, 128, 100, 4, &info), BD_OK);
  EXPECT_NE(bd_page_info_get(runtime.handle, 128, 128, 0, &info), BD_OK);
  EXPECT_EQ(bd_page_info_get(nullptr, 128, 128, 4, &info), BD_INVALID_ARGUMENT);
  EXPECT_EQ(bd_page_info_get(runtime.handle, 128, 128, 4, nullptr), BD_INVALID_ARGUMENT);
}

// ---- layers and steps --------------------------------------------------------------------------

TEST(CapiLayer, RefusesBadOptions) {
  const Runtime runtime(kRecipe);
  const auto error_of = [&](auto change) {
    bd_layer_options options = layer_options();
    change(options);
    bd_layer* layer = nullptr;
    EXPECT_NE(bd_layer_create(runtime.handle, &options, &layer), BD_OK);
    EXPECT_EQ(layer, nullptr);
    return std::string(bd_last_error());
  };
  EXPECT_HAS(error_of([](auto& o) { o.layer_index = 2; }), "layer_index is 2");
  EXPECT_HAS(error_of([](auto& o) { o.layer_index = -1; }), "layer_index is -1");
  EXPECT_HAS(error_of([](auto& o) { o.num_kv_heads = 0; }), "num_kv_heads is 0");
  EXPECT_HAS(error_of([](auto& o) { o.num_q_heads = 3; }), "num_q_heads is 3");
  EXPECT_HAS(error_of([](auto& o) { o.num_q_heads = -4; }), "num_q_heads is -4");
  EXPECT_HAS(error_of([](auto& o) { o.first_kv_head = 1; }), "first_kv_head is 1");
  EXPECT_HAS(error_of([](auto& o) { o.total_kv_heads = 1; }), "total_kv_heads is 1");
  EXPECT_HAS(error_of([](auto& o) { o.head_dim = 80; }), "80");
  EXPECT_HAS(error_of([](auto& o) { o.page_size = 96; }), "96");
  EXPECT_HAS(error_of([](auto& o) { o.sm_scale = 0; }), "sm_scale");
  EXPECT_HAS(error_of([](auto& o) { o.sm_scale = NAN; }), "sm_scale");
  EXPECT_HAS(error_of([](auto& o) { o.softcap = -1; }), "softcap");
  EXPECT_HAS(error_of([](auto& o) { o.window_left = -2; }), "window_left");
  const float sinks[] = {0, 0, NAN, 0};
  EXPECT_HAS(error_of([&](auto& o) { o.attn_sink = sinks; }), "attn_sink of query head 2");
}

TEST(CapiSteps, RefusesBadOptionsAndInput) {
  const Runtime runtime(kRecipe);
  const auto refused = [&](auto change, const char* part) {
    bd_steps_options options = steps_options();
    change(options);
    bd_steps* steps = nullptr;
    EXPECT_NE(bd_steps_create(runtime.handle, &options, &steps), BD_OK);
    EXPECT_HAS(bd_last_error(), part);
  };
  refused([](auto& o) { o.num_pages = 0; }, "num_pages is 0");
  refused([](auto& o) { o.num_pages = std::int64_t{1} << 40; }, "num_pages is 1099511627776");
  refused([](auto& o) { o.num_slots = -1; }, "num_slots is -1");
  refused([](auto& o) { o.max_requests = 0; }, "max_requests is 0");
  refused([](auto& o) { o.page_size = 63; }, "63");

  Engine engine(runtime.handle);
  auto input = sized<bd_step_input>();
  input.num_requests = 1;
  EXPECT_EQ(bd_steps_build(engine.steps, &input), BD_INVALID_ARGUMENT);
  input.block_table_stride = 1;
  EXPECT_EQ(bd_steps_build(engine.steps, &input), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "block_table is null");
  input.num_requests = -1;
  EXPECT_EQ(bd_steps_build(engine.steps, &input), BD_INVALID_ARGUMENT);
  // A page outside the pool is found before anything reads it.
  const std::int32_t table[] = {kPages};
  const std::int32_t query_start[] = {0, 1};
  const std::int32_t seq_lens[] = {1};
  const std::int64_t slots[] = {0};
  input.num_requests = 1;
  input.block_table = table;
  input.query_start = query_start;
  input.seq_lens = seq_lens;
  input.slot_mapping = slots;
  input.num_tokens = 1;
  EXPECT_EQ(bd_steps_build(engine.steps, &input), BD_OUT_OF_RANGE);
  bd_write_params write = engine.write_params(1);
  EXPECT_EQ(bd_write(&write), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "have no plan");
}

// ---- the verbs ---------------------------------------------------------------------------------

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

// ---- calibration and sidecars ------------------------------------------------------------------

class CapiCalibration : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ =
        std::filesystem::temp_directory_path() / ("bitdecoding_capi_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "key_shift.safetensors").string();
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string recipe(const char* key) const {
    return nlohmann::json({{"mode", "bitdecoding-nvfp4"}, {key, path_}}).dump();
  }
  std::filesystem::path folder_;
  std::string path_;
};

TEST_F(CapiCalibration, ObservesSavesAndLoads) {
  {
    const Runtime runtime(recipe("calibrate_file").c_str());
    ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
    std::uint64_t tokens = 99;
    EXPECT_NE(bd_calibration_save(runtime.handle, nullptr, &tokens), BD_OK);
    Engine first(runtime.handle);
    bd_layer_options options = layer_options();
    options.layer_index = 1;
    Engine second(runtime.handle, options);
    for (Engine* engine : {&first, &second}) {
      ASSERT_EQ(engine->build(200, 200), BD_OK);
      bd_write_params p = engine->write_params(200);
      if (engine == &second) {
        EXPECT_EQ(bd_calibration_save(runtime.handle, nullptr, &tokens), BD_INVALID_ARGUMENT);
        EXPECT_HAS(bd_last_error(), "layer 1");
        EXPECT_FALSE(std::filesystem::exists(path_));
      }
      ASSERT_EQ(bd_write(&p), BD_OK) << bd_last_error();
    }
    ASSERT_EQ(bd_calibration_save(runtime.handle, nullptr, &tokens), BD_OK) << bd_last_error();
    EXPECT_EQ(tokens, 200U);
  }
  const Runtime runtime(recipe("key_shift_file").c_str());
  ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
  const nlohmann::json json = nlohmann::json::parse(bd_runtime_describe(runtime.handle));
  EXPECT_EQ(json["sidecar"]["layers"], 2);
  EXPECT_EQ(json["sidecar"]["metadata"]["tokens"], "200");
  EXPECT_EQ(json["sidecar"]["metadata"]["model"], "tiny");
  EXPECT_TRUE(json["warnings"].empty()) << json["warnings"];
  // A slice of one rank: head 1 of 2.
  bd_layer_options options = layer_options();
  options.num_kv_heads = 1;
  options.num_q_heads = 2;
  options.first_kv_head = 1;
  bd_layer* layer = nullptr;
  EXPECT_EQ(bd_layer_create(runtime.handle, &options, &layer), BD_OK) << bd_last_error();
  EXPECT_EQ(bd_runtime_load_key_shift(runtime.handle, path_.c_str()), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "cannot change");
  bd_layer_destroy(layer);
  EXPECT_EQ(bd_runtime_load_key_shift(runtime.handle, path_.c_str()), BD_OK);
  // Another model's shape.
  options = layer_options();
  options.num_layers = 3;
  EXPECT_EQ(bd_layer_create(runtime.handle, &options, &layer), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "belongs to another model");
}

TEST_F(CapiCalibration, ARankSavesItsHeadsUnderAnotherName) {
  const Runtime runtime(recipe("calibrate_file").c_str());
  bd_layer_options options = layer_options();
  options.num_layers = 1;
  options.total_kv_heads = 8;
  options.first_kv_head = 4;
  Engine engine(runtime.handle, options);
  ASSERT_EQ(engine.build(150, 150), BD_OK);
  bd_write_params p = engine.write_params(150);
  ASSERT_EQ(bd_write(&p), BD_OK);
  ASSERT_EQ(bd_calibration_save(runtime.handle, nullptr, nullptr), BD_OK) << bd_last_error();
  EXPECT_FALSE(std::filesystem::exists(path_));
  const KeyShift part = load_key_shift(path_ + ".heads4-5").take();
  EXPECT_EQ(part.num_kv_heads, 2);
  EXPECT_EQ(part.metadata.at("kv_heads"), "4-5");
  EXPECT_EQ(part.metadata.at("total_kv_heads"), "8");
}

TEST_F(CapiCalibration, TauIsFoundSavedAndTaken) {
  nlohmann::json recipe = {{"calibrate_file", path_},
                           {"probability_tau", "calibrate"},
                           {"probability_c", 1},
                           {"sink_tokens", 0},
                           {"tail_tokens", 0}};
  {
    const Runtime runtime(recipe.dump().c_str());
    ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
    bd_layer_options options = layer_options();
    options.num_layers = 1;
    Engine engine(runtime.handle, options);
    for (std::size_t i = 0; i < engine.query.size(); ++i) {
      engine.query[i] = std::cos(2.1F * static_cast<float>(i));
    }
    ASSERT_EQ(engine.build(200, 200), BD_OK);
    bd_write_params write = engine.write_params(200);
    ASSERT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    bd_attend_params attend = engine.attend_params(200);
    ASSERT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
    ASSERT_EQ(bd_calibration_save(runtime.handle, nullptr, nullptr), BD_OK) << bd_last_error();
  }
  const KeyShift sidecar = load_key_shift(path_).take();
  // 200 tokens: 12 blocks lie before the incomplete group.
  EXPECT_EQ(sidecar.metadata.at("probability_blocks"), "12");
  recipe.erase("calibrate_file");
  recipe["key_shift_file"] = path_;
  const Runtime taken(recipe.dump().c_str());
  ASSERT_EQ(taken.status, BD_OK) << taken.error;
  EXPECT_EQ(bd_runtime_recipe_value(taken.handle, "probability_tau") != nullptr
                ? std::stof(bd_runtime_recipe_value(taken.handle, "probability_tau"))
                : -1.0F,
            std::stof(sidecar.metadata.at("probability_tau")));
  recipe["probability_c"] = 8;
  const Runtime other(recipe.dump().c_str());
  EXPECT_EQ(other.status, BD_INVALID_ARGUMENT);
  EXPECT_HAS(other.error, "calibrate again");
  KeyShift plain = sidecar;
  plain.metadata.erase("probability_tau");
  ASSERT_TRUE(save_key_shift(plain, path_).ok());
  const Runtime without(recipe.dump().c_str());
  EXPECT_EQ(without.status, BD_INVALID_ARGUMENT);
  EXPECT_HAS(without.error, "holds no calibrated tau");
}

TEST_F(CapiCalibration, KeyMeansImproveShiftedKeys) {
  KeyShift sidecar;
  sidecar.num_layers = 2;
  sidecar.num_kv_heads = kHeads;
  sidecar.head_dim = kDim;
  sidecar.values.assign(2 * kHeads * kDim, 0.0F);
  for (int layer = 0; layer < 2; ++layer) {
    for (int h = 0; h < kHeads; ++h) {
      sidecar.values[static_cast<std::size_t>((layer * kHeads + h) * kDim + 5)] = 100.0F;
    }
  }
  ASSERT_TRUE(save_key_shift(sidecar, path_).ok());
  // Outputs with a constant of 100 on channel 5 of K: with the mean subtracted they equal those of
  // exact arithmetic far better than without. The query's channel 5 is zero, so the constant itself
  // is no part of the scores, only of the quantizer's blocks.
  std::vector<std::vector<float>> outputs;
  const std::string with = recipe("key_shift_file");
  for (const char* text : {R"({"mode": "bf16"})",
                           R"({"key_shift": false, "hadamard": false, "sink_tokens": 0,
                               "tail_tokens": 0, "arithmetic": "wide"})",
                           with.c_str()}) {
    nlohmann::json json = nlohmann::json::parse(text);
    if (json["mode"] != "bf16") {
      json["hadamard"] = false;
      json["sink_tokens"] = 0;
      json["tail_tokens"] = 0;
      json["arithmetic"] = "wide";
    }
    if (json["mode"].is_null()) json.erase("mode");
    const Runtime runtime(json.dump().c_str());
    ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
    Engine engine(runtime.handle);
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < engine.rows.size(); ++i) {
      engine.rows[i] = normal(random) + (i % kDim == 5 ? 100.0F : 0.0F);
    }
    for (std::size_t i = 0; i < engine.query.size(); ++i) {
      engine.query[i] = i % kDim == 5 ? 0.0F : normal(random);
    }
    std::vector<float> values(engine.rows.size());
    for (float& v : values) v = normal(random);
    ASSERT_EQ(engine.build(200, 200), BD_OK);
    bd_write_params write = engine.write_params(200);
    write.value = Engine::tensor(values.data(), kHeads);
    ASSERT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    ASSERT_EQ(engine.build(201, 1), BD_OK);
    write = engine.write_params(1);
    ASSERT_EQ(bd_write(&write), BD_OK);
    bd_attend_params attend = engine.attend_params(1);
    attend.value = Engine::tensor(values.data(), kHeads);
    ASSERT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
    outputs.emplace_back(engine.output.begin(), engine.output.begin() + 2 * kHeads * kDim);
  }
  double without_error = 0;
  double with_error = 0;
  for (std::size_t i = 0; i < outputs[0].size(); ++i) {
    without_error += std::pow(outputs[1][i] - outputs[0][i], 2);
    with_error += std::pow(outputs[2][i] - outputs[0][i], 2);
  }
  // Channel 5 sets the scale of its block to 100 / 6, and the 15 others vanish; the other blocks of
  // K and all of V have the same errors either way.
  EXPECT_LT(with_error, 0.5 * without_error);
}

}  // namespace
}  // namespace bitdecoding
