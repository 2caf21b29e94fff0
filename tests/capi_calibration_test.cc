// SPDX-License-Identifier: Apache-2.0
// Calibration through the C ABI: key means and tau are observed, saved, loaded and used.
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "capi_engine.h"
#include "io/key_shift.h"

namespace bitdecoding {
namespace {

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

KeyShift no_means() {
  KeyShift sidecar;
  sidecar.num_layers = 2;
  sidecar.num_kv_heads = kHeads;
  sidecar.head_dim = kDim;
  sidecar.values.assign(2 * kHeads * kDim, 0.0F);
  return sidecar;
}

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
    EXPECT_EQ(tokens, 184U);  // the 16 sinks are left out
  }
  const Runtime runtime(recipe("key_shift_file").c_str());
  ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
  const nlohmann::json json = nlohmann::json::parse(bd_runtime_describe(runtime.handle));
  EXPECT_EQ(json["sidecar"]["layers"], 2);
  EXPECT_EQ(json["sidecar"]["metadata"]["tokens"], "184");
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

// Values far from zero, as some channels of real models are: means observed in one runtime take
// their error out of the outputs of another, and the recipe can do without them.
TEST_F(CapiCalibration, ValueMeansAreObservedAndTaken) {
  bd_layer_options options = layer_options();
  options.num_layers = 1;
  const auto fill = [](Engine* engine, std::vector<float>* values) {
    *values = engine->rows;
    for (std::size_t i = 0; i < values->size(); ++i) {
      (*values)[i] += static_cast<float>(static_cast<int>(i % (kHeads * kDim)) - kDim) * 0.3F;
    }
  };
  std::vector<float> values;
  {
    const Runtime runtime(recipe("calibrate_file").c_str());
    Engine engine(runtime.handle, options);
    fill(&engine, &values);
    ASSERT_EQ(engine.build(250, 250), BD_OK);
    bd_write_params p = engine.write_params(250);
    p.value.data = values.data();
    ASSERT_EQ(bd_write(&p), BD_OK) << bd_last_error();
    ASSERT_EQ(bd_calibration_save(runtime.handle, nullptr, nullptr), BD_OK) << bd_last_error();
  }
  ASSERT_EQ(load_key_shift(path_).value().value_means.size(), std::size_t{kHeads * kDim});
  const auto output = [&](nlohmann::json changes) {
    nlohmann::json whole = {{"key_shift_file", path_}};
    whole.update(changes);
    const Runtime runtime(whole.dump().c_str());
    EXPECT_EQ(runtime.status, BD_OK) << runtime.error;
    Engine engine(runtime.handle, options);
    fill(&engine, &values);
    EXPECT_EQ(engine.build(249, 249), BD_OK);
    bd_write_params write = engine.write_params(249);
    write.value.data = values.data();
    EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    EXPECT_EQ(engine.build(250, 1), BD_OK);
    write = engine.write_params(1);
    EXPECT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    bd_attend_params attend = engine.attend_params(1);
    EXPECT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
    return std::vector<float>(engine.output.begin(), engine.output.begin() + 4 * kDim);
  };
  const auto distance = [](const std::vector<float>& a, const std::vector<float>& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(sum);
  };
  const std::vector<float> exact = output({{"mode", "bf16"}, {"key_shift_file", ""}});
  const std::vector<float> with = output(nlohmann::json::object());
  const std::vector<float> without = output({{"value_shift", false}});
  EXPECT_GT(distance(without, exact), 5 * distance(with, exact));
  // The means of values alone.
  EXPECT_LT(distance(output({{"key_shift", false}}), exact), distance(without, exact));
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
            nlohmann::json::parse(sidecar.metadata.at("probability_taus")).at("1").get<float>());
  recipe["probability_c"] = 7;
  const Runtime other(recipe.dump().c_str());
  EXPECT_EQ(other.status, BD_INVALID_ARGUMENT);
  EXPECT_HAS(other.error, "a tau for each probability_c of 1, 12, 1536, ");
  KeyShift plain = sidecar;
  plain.metadata.erase("probability_taus");
  ASSERT_TRUE(save_key_shift(plain, path_).ok());
  const Runtime without(recipe.dump().c_str());
  EXPECT_EQ(without.status, BD_INVALID_ARGUMENT);
  EXPECT_HAS(without.error, "holds no calibrated tau");
}

// Keys, then probabilities with the means applied; in between all is saved, and another runtime
// goes on from there.
TEST_F(CapiCalibration, GoesInStepsAndResumes) {
  const nlohmann::json recipe = {{"calibrate_file", path_}, {"probability_tau", "calibrate"}};
  const std::string state = (folder_ / "state").string();
  const auto told = [](const Runtime& r) {
    return nlohmann::json::parse(bd_calibration_describe(r.handle));
  };
  const auto step = [](Engine* engine) {
    ASSERT_EQ(engine->build(250, 250), BD_OK);
    bd_write_params write = engine->write_params(250);
    ASSERT_EQ(bd_write(&write), BD_OK) << bd_last_error();
    bd_attend_params attend = engine->attend_params(250);
    ASSERT_EQ(bd_attend(&attend), BD_OK) << bd_last_error();
  };
  bd_layer_options options = layer_options();
  options.num_layers = 1;
  {
    const Runtime runtime(recipe.dump().c_str());
    EXPECT_EQ(bd_calibration_phase(runtime.handle, "keys"), BD_INVALID_ARGUMENT);  // no layers
    Engine engine(runtime.handle, options);
    EXPECT_EQ(bd_calibration_phase(runtime.handle, "sums"), BD_INVALID_ARGUMENT);
    EXPECT_HAS(bd_last_error(), "all, off, keys or probabilities");
    ASSERT_EQ(bd_calibration_phase(runtime.handle, "off"), BD_OK);
    step(&engine);
    EXPECT_EQ(told(runtime)["tokens"], 0);
    EXPECT_EQ(bd_calibration_phase(runtime.handle, "probabilities"), BD_INVALID_ARGUMENT);
    EXPECT_HAS(bd_last_error(), "has seen 0 tokens");
    ASSERT_EQ(bd_calibration_phase(runtime.handle, "keys"), BD_OK);
    step(&engine);
    EXPECT_EQ(told(runtime)["tokens"], 234);
    EXPECT_EQ(told(runtime)["blocks"], 0);
    ASSERT_EQ(bd_calibration_state_save(runtime.handle, state.c_str(), "after 1"), BD_OK);
  }
  const Runtime runtime(recipe.dump().c_str());
  Engine engine(runtime.handle, options);
  ASSERT_EQ(bd_calibration_state_load(runtime.handle, state.c_str()), BD_OK) << bd_last_error();
  EXPECT_EQ(told(runtime)["tokens"], 234);
  ASSERT_EQ(bd_calibration_phase(runtime.handle, "probabilities"), BD_OK) << bd_last_error();
  step(&engine);
  EXPECT_EQ(told(runtime)["tokens"], 234);
  EXPECT_GT(told(runtime)["blocks"], 0);
  ASSERT_EQ(bd_calibration_state_save(runtime.handle, state.c_str(), nullptr), BD_OK);
  EXPECT_NE(bd_calibration_state_save(runtime.handle, "/dev/full/x", nullptr), BD_OK);
  // Of another shape.
  options.num_layers = 2;
  const Runtime other(recipe.dump().c_str());
  Engine larger(other.handle, options);
  EXPECT_EQ(bd_calibration_state_load(other.handle, state.c_str()), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "of another model");
}

TEST_F(CapiCalibration, NonFiniteKeysAreNamedOnceAndLeftOut) {
  const Runtime runtime(recipe("calibrate_file").c_str());
  bd_layer_options options = layer_options();
  options.layer_index = 1;
  Engine engine(runtime.handle, options);
  engine.rows[static_cast<std::size_t>(40 * kHeads * kDim + kDim)] = NAN;  // row 40, head 1
  ASSERT_EQ(engine.build(200, 200), BD_OK);
  bd_write_params p = engine.write_params(200);
  std::vector<float> values(engine.rows.size(), 1.0F);
  p.value.data = values.data();
  ASSERT_EQ(bd_write(&p), BD_OK);
  const auto told = nlohmann::json::parse(bd_calibration_describe(runtime.handle));
  EXPECT_EQ(told["non_finite"], nlohmann::json({{"side", "key"}, {"layer", 1}, {"kv_head", 1}}));
  EXPECT_EQ(told["skipped_rows"], 1);
  EXPECT_EQ(told["tokens"], 183);
  EXPECT_TRUE(
      nlohmann::json::parse(bd_calibration_describe(runtime.handle))["non_finite"].is_null());
  engine.rows[static_cast<std::size_t>(40 * kHeads * kDim + kDim)] = 1.0F;
  values[static_cast<std::size_t>(50 * kHeads * kDim)] = INFINITY;  // row 50, head 0
  ASSERT_EQ(bd_write(&p), BD_OK);
  const auto then = nlohmann::json::parse(bd_calibration_describe(runtime.handle));
  EXPECT_EQ(then["non_finite"], nlohmann::json({{"side", "value"}, {"layer", 1}, {"kv_head", 0}}));
  EXPECT_EQ(then["skipped_rows"], 2);
  // Both in one step: one a call, and none is lost.
  engine.rows[static_cast<std::size_t>(40 * kHeads * kDim + kDim)] = NAN;
  ASSERT_EQ(bd_write(&p), BD_OK);
  for (const char* side : {"key", "value"}) {
    const auto both = nlohmann::json::parse(bd_calibration_describe(runtime.handle));
    EXPECT_EQ(both["non_finite"]["side"], side);
  }
}

TEST_F(CapiCalibration, ANewSidecarBringsItsOwnTau) {
  KeyShift sidecar = no_means();
  sidecar.values[7] = 1.0F;
  const auto save = [&](const char* name, const char* tau) {
    sidecar.metadata.clear();
    if (tau != nullptr) sidecar.metadata = {{"probability_taus", tau}};
    const std::string path = (folder_ / name).string();
    EXPECT_TRUE(save_key_shift(sidecar, path).ok());
    return path;
  };
  const std::string first = save("first.safetensors", R"({"8": 0.25})");
  const std::string second = save("second.safetensors", R"({"8": 0.5})");
  const std::string without = save("without.safetensors", nullptr);
  const nlohmann::json recipe = {{"key_shift_file", first}, {"probability_tau", "calibrate"}};
  const Runtime runtime(recipe.dump().c_str());
  ASSERT_EQ(runtime.status, BD_OK) << runtime.error;
  const auto tau = [&] {
    const char* text = bd_runtime_recipe_value(runtime.handle, "probability_tau");
    const nlohmann::json json = nlohmann::json::parse(bd_runtime_describe(runtime.handle));
    EXPECT_EQ(json["recipe"]["probability_tau"].dump(), text);
    return std::string(text);
  };
  EXPECT_EQ(tau(), "0.25");
  EXPECT_EQ(bd_runtime_load_key_shift(runtime.handle, second.c_str()), BD_OK) << bd_last_error();
  EXPECT_EQ(tau(), "0.5");
  EXPECT_STREQ(bd_runtime_recipe_value(runtime.handle, "key_shift_file"), second.c_str());
  // One without a tau would be served with another's.
  EXPECT_EQ(bd_runtime_load_key_shift(runtime.handle, without.c_str()), BD_INVALID_ARGUMENT);
  EXPECT_HAS(bd_last_error(), "without.safetensors' holds no calibrated tau");
  EXPECT_EQ(tau(), "0.5");
  EXPECT_STREQ(bd_runtime_recipe_value(runtime.handle, "key_shift_file"), second.c_str());
}

TEST_F(CapiCalibration, KeyMeansImproveShiftedKeys) {
  KeyShift sidecar = no_means();
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
