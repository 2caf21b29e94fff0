// SPDX-License-Identifier: Apache-2.0
// Outer scales through the C ABI: from a recipe's file and from the caller, the same numbers.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "capi_engine.h"
#include "io/outer_scale.h"

namespace bitdecoding {
namespace {

class CapiOuterScale : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() /
             ("bitdecoding_capi_outer_" + std::to_string(::getpid())))
                .string();
  }
  void TearDown() override { std::filesystem::remove(path_); }

  // Two layers of two heads; layer 1 is what the layers of these tests take.
  void save(std::vector<std::int8_t> key, std::vector<std::int8_t> value) const {
    OuterScales scales;
    scales.num_layers = 2;
    scales.num_kv_heads = kHeads;
    scales.key = std::move(key);
    scales.value = std::move(value);
    scales.metadata["model"] = "another";
    ASSERT_TRUE(save_outer_scales(scales, path_).ok());
  }
  std::string recipe() const {
    return nlohmann::json({{"key_shift", false},
                           {"hadamard", false},
                           {"arithmetic", "wide"},
                           {"sink_tokens", 0},
                           {"tail_tokens", 0},
                           {"outer_scale_file", path_}})
        .dump();
  }
  std::string path_;
};

bd_layer_options second_layer() {
  bd_layer_options options = layer_options();
  options.layer_index = 1;
  return options;
}

// Pages and the output of a decoded token whose K and V are those of the engine times `factor`.
struct Served {
  std::vector<std::uint8_t> pages;
  std::vector<float> output;
  bd_counters counters = sized<bd_counters>();
};

Served serve(const Runtime& runtime, const bd_layer_options& options, float factor) {
  EXPECT_EQ(runtime.status, BD_OK) << runtime.error;
  Engine engine(runtime.handle, options);
  for (float& x : engine.rows) x *= factor;
  for (float& x : engine.query) x /= factor;
  EXPECT_EQ(engine.build(200, 200), BD_OK) << bd_last_error();
  bd_write_params write = engine.write_params(200);
  EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
  EXPECT_EQ(engine.build(201, 1), BD_OK) << bd_last_error();
  write = engine.write_params(1);
  EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
  const bd_attend_params attend = engine.attend_params(1);
  EXPECT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
  Served result;
  result.pages = engine.pages;
  result.output.assign(engine.output.begin(), engine.output.begin() + 2 * kHeads * kDim);
  EXPECT_EQ(bd_counters_get(runtime.handle, &result.counters), BD_OK);
  return result;
}

constexpr const char* kPlain =
    R"({"key_shift": false, "hadamard": false, "arithmetic": "wide", "sink_tokens": 0,
        "tail_tokens": 0})";

// Rows times 2^-12 under outer scales of 2^-12 are the same codes as the rows themselves; without
// them every block's scale rounds to zero.
TEST_F(CapiOuterScale, KeepsSmallValuesOutOfTheSubnormals) {
  save({0, 0, -12, -12}, {0, 0, -12, -12});
  const float factor = 0x1p-12F;
  const Runtime with(recipe().c_str());
  const Runtime plain(kPlain);
  const Served expected = serve(plain, second_layer(), 1.0F);
  const Served scaled = serve(with, second_layer(), factor);
  EXPECT_EQ(scaled.pages, expected.pages);
  EXPECT_EQ(scaled.counters.flushed_blocks, 0U);
  for (std::size_t i = 0; i < expected.output.size(); ++i) {
    EXPECT_EQ(scaled.output[i], factor * expected.output[i]) << i;
  }
  const Runtime without(kPlain);
  EXPECT_GT(serve(without, second_layer(), factor).counters.flushed_blocks, 0U);
}

TEST_F(CapiOuterScale, TheCallersExponentsAreTheFiles) {
  save({9, 9, 2, -3}, {9, 9, -1, 4});
  const Runtime from_file(recipe().c_str());
  const Runtime from_caller(kPlain);
  const std::int8_t key[] = {2, -3};
  const std::int8_t value[] = {-1, 4};
  bd_layer_options options = second_layer();
  options.key_outer = key;
  options.value_outer = value;
  const Served file = serve(from_file, second_layer(), 1.0F);
  const Served caller = serve(from_caller, options, 1.0F);
  EXPECT_EQ(file.pages, caller.pages);
  EXPECT_EQ(file.output, caller.output);
  const Runtime plain(kPlain);
  EXPECT_NE(serve(plain, second_layer(), 1.0F).pages, caller.pages);
  // A rank takes its own heads' exponents.
  options = second_layer();
  options.num_kv_heads = 1;
  options.num_q_heads = 2;
  options.first_kv_head = 1;
  bd_layer* layer = nullptr;
  EXPECT_EQ(bd_layer_create(from_file.handle, &options, &layer), BD_OK) << bd_last_error();
  bd_layer_destroy(layer);
}

TEST_F(CapiOuterScale, TheRuntimeSaysWhatItUses) {
  save({}, {0, 0, 1, 1});
  const Runtime runtime(recipe().c_str());
  ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
  const nlohmann::json json = nlohmann::json::parse(bd_runtime_describe(runtime.handle));
  EXPECT_EQ(json["outer_scales"]["path"], path_);
  EXPECT_EQ(json["outer_scales"]["layers"], 2);
  EXPECT_EQ(json["outer_scales"]["key"], false);
  EXPECT_EQ(json["outer_scales"]["value"], true);
  EXPECT_HAS(json["warnings"].dump(), "the model 'another', and this is 'tiny'");
  EXPECT_EQ(bd_runtime_recipe_value(runtime.handle, "outer_scale_file"), path_);
  const Runtime plain(kPlain);
  EXPECT_TRUE(nlohmann::json::parse(bd_runtime_describe(plain.handle))["outer_scales"].is_null());
}

TEST_F(CapiOuterScale, RefusesWhatDoesNotFit) {
  save({0, 0, 1, 1}, {});
  const std::int8_t exponents[] = {1, -65};
  const auto error_of = [](const Runtime& runtime, const bd_layer_options& options) {
    bd_layer* layer = nullptr;
    EXPECT_EQ(bd_layer_create(runtime.handle, &options, &layer), BD_INVALID_ARGUMENT);
    EXPECT_EQ(layer, nullptr);
    return std::string(bd_last_error());
  };
  const Runtime from_file(recipe().c_str());
  ASSERT_EQ(from_file.status, BD_OK) << from_file.error;
  bd_layer_options options = second_layer();
  options.num_layers = 3;
  EXPECT_HAS(error_of(from_file, options), "2 layers and 2 KV heads, and the model has 3 layers");
  options = second_layer();
  options.total_kv_heads = 4;
  EXPECT_HAS(error_of(from_file, options), "another model");
  options = second_layer();
  options.value_outer = exponents;
  EXPECT_HAS(error_of(from_file, options), "leave out one of them");
  const Runtime plain(kPlain);
  EXPECT_HAS(error_of(plain, options), "the value outer scale of KV head 1 is 2^-65");
  const Runtime rows(R"({"mode": "bf16"})");
  EXPECT_HAS(error_of(rows, options), "bf16 pages have no scales");

  save({0, 0, 1, 99}, {});
  const Runtime bad(recipe().c_str());
  EXPECT_EQ(bad.status, BD_INVALID_ARGUMENT);
  EXPECT_HAS(bad.error, "the exponent 99 at layer 1, KV head 1");
  std::filesystem::remove(path_);
  const Runtime missing(recipe().c_str());
  EXPECT_EQ(missing.status, BD_NOT_FOUND);
  EXPECT_HAS(missing.error, path_);
}

}  // namespace
}  // namespace bitdecoding
