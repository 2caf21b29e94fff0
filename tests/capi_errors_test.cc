// SPDX-License-Identifier: Apache-2.0
// Bad options through the C ABI: each a status and a sentence. Also what a runtime says of itself.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "capi_engine.h"

namespace bitdecoding {
namespace {

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
  EXPECT_HAS(error_of([](auto& o) { o.num_q_heads = 17 * o.num_kv_heads; }),
             "17 query heads for each KV head are not offered");
  for (const int head_dim : {-1, 0, 32, 40, 72, 80, 100, 112, 512}) {
    const std::string error = error_of([&](auto& o) { o.head_dim = head_dim; });
    EXPECT_HAS(error, "head_dim " + std::to_string(head_dim) + " is not offered");
    EXPECT_HAS(error, "64, 96, 128, 192, 256");
  }
  EXPECT_HAS(error_of([](auto& o) { o.page_size = 96; }), "96");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float scale : {0.0F, -0.125F, NAN, kInfinity, -kInfinity, 3e38F, 1e-40F}) {
    const std::string error = error_of([&](auto& o) { o.sm_scale = scale; });
    EXPECT_HAS(error, "sm_scale is " + fmt::format("{}", scale));
    EXPECT_HAS(error, "1 / sqrt(head_dim) as a rule");
  }
  for (const float softcap : {-1.0F, NAN, kInfinity, 3e38F, 1e-40F}) {
    EXPECT_HAS(error_of([&](auto& o) { o.softcap = softcap; }), "softcap is");
  }
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

}  // namespace
}  // namespace bitdecoding
