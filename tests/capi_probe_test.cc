// SPDX-License-Identifier: Apache-2.0
// A probe gives what an engine of its own recipe gives, bit for bit, and else changes nothing.
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "capi_engine.h"

namespace bitdecoding {
namespace {

constexpr const char* kBf16 = R"({"mode": "bf16"})";
constexpr const char* kSmall = R"({"key_shift": false, "tail_tokens": 16})";

bd_layer_options one_layer() {
  bd_layer_options options = layer_options();
  options.num_layers = 1;
  return options;
}

// A prompt in two chunks and some single tokens; the outputs of all steps.
std::vector<float> run(Engine* engine) {
  std::vector<float> all;
  int length = 0;
  for (const int count : {150, 90, 1, 1, 1}) {
    length += count;
    EXPECT_EQ(engine->build(length, count), BD_OK) << bd_last_error();
    bd_write_params write = engine->write_params(count);
    EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    bd_attend_params attend = engine->attend_params(count);
    EXPECT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
    all.insert(all.end(), engine->output.begin(),
               engine->output.begin() + count * 2 * kHeads * kDim);
  }
  return all;
}

std::vector<float> alone(const char* recipe, const char* backend) {
  const Runtime runtime(recipe, nullptr, backend);
  Engine engine(runtime.handle, one_layer());
  return run(&engine);
}

class Probe : public ::testing::TestWithParam<const char*> {};

TEST_P(Probe, ReplacedOutputsAreThoseOfTheRecipe) {
  const Runtime runtime(kBf16, nullptr, GetParam());
  Engine engine(runtime.handle, one_layer());
  ASSERT_EQ(bd_probe_start(runtime.handle, kSmall), BD_OK) << bd_last_error();
  const std::int32_t layer = 0;
  ASSERT_EQ(bd_probe_replace(runtime.handle, &layer, 1), BD_OK);
  EXPECT_EQ(run(&engine), alone(kSmall, GetParam()));
}

TEST_P(Probe, ComparingChangesNothing) {
  const Runtime runtime(kBf16, nullptr, GetParam());
  Engine engine(runtime.handle, one_layer());
  ASSERT_EQ(bd_probe_start(runtime.handle, kSmall), BD_OK) << bd_last_error();
  EXPECT_EQ(run(&engine), alone(kBf16, GetParam()));
  const auto json = nlohmann::json::parse(bd_probe_describe(runtime.handle));
  ASSERT_EQ(json["layers"].size(), 1U);
  const auto& found = json["layers"][0];
  EXPECT_EQ(found["output"].size(), 2U * kHeads);
  for (const auto& error : found["output"]) {
    EXPECT_GT(error.get<double>(), 1e-5);
    EXPECT_LT(error.get<double>(), 0.3);
  }
  EXPECT_EQ(found["bits"], 4.5);
  EXPECT_EQ(json["written_rows"], 243 * kHeads);
  EXPECT_GT(json["write_seconds"].get<double>(), 0);
}

// Of another layer, the output stays the runtime's own; of one recipe after the other, each counts.
TEST_P(Probe, OtherLayersAndLaterRecipes) {
  const Runtime runtime(kBf16, nullptr, GetParam());
  Engine engine(runtime.handle, one_layer());
  ASSERT_EQ(bd_probe_start(runtime.handle, kSmall), BD_OK);
  const std::int32_t other = 7;
  ASSERT_EQ(bd_probe_replace(runtime.handle, &other, 1), BD_OK);
  EXPECT_EQ(run(&engine), alone(kBf16, GetParam()));
  const char* wide = R"({"key_shift": false, "hadamard": false, "arithmetic": "wide"})";
  ASSERT_EQ(bd_probe_start(runtime.handle, wide), BD_OK);
  const std::int32_t layer = 0;
  ASSERT_EQ(bd_probe_replace(runtime.handle, &layer, 1), BD_OK);
  EXPECT_EQ(run(&engine), alone(wide, GetParam()));
  ASSERT_EQ(bd_probe_start(runtime.handle, nullptr), BD_OK);
  EXPECT_EQ(run(&engine), alone(kBf16, GetParam()));
  EXPECT_STREQ(bd_probe_describe(runtime.handle), "{}");
}

INSTANTIATE_TEST_SUITE_P(Backends, Probe, ::testing::Values("reference", "cpu"));

TEST(ProbeErrors, NeedBf16AndAValidRecipe) {
  const Runtime fp4(kSmall);
  EXPECT_EQ(bd_probe_start(fp4.handle, kSmall), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "must run mode bf16");
  const Runtime runtime(kBf16);
  EXPECT_EQ(bd_probe_start(runtime.handle, "{\"mode\": \"nvfp\"}"), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "the probe's recipe");
  EXPECT_EQ(bd_probe_replace(runtime.handle, nullptr, 0), BD_INVALID_ARGUMENT);
  EXPECT_EQ(bd_probe_start(nullptr, kSmall), BD_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace bitdecoding
