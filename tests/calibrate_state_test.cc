// SPDX-License-Identifier: Apache-2.0
// A calibration's state on the disk, the joining of ranks, what it becomes, and what it belongs to.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "calibrate/finish.h"
#include "io/calibration_identity.h"
#include "io/calibration_state.h"

namespace bitdecoding {
namespace {

namespace fs = std::filesystem;

constexpr int kLayers = 2;
constexpr int kHeads = 4;
constexpr int kDim = 64;

class CalibrationFiles : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("bitdecoding_state_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(path(name)) << text;
  }
  fs::path folder_;
};

// Heads [first, first + count) of a model whose head h has the mean h in every channel.
CalibrationState part(int first, int count, const std::string& note = "n") {
  CalibrationState state;
  state.num_layers = kLayers;
  state.head_dim = kDim;
  state.first_kv_head = first;
  state.num_kv_heads = count;
  state.total_kv_heads = kHeads;
  state.layers = {0, 1};
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int h = first; h < first + count; ++h) {
      state.keys.rows.push_back(200);
      state.keys.skipped.push_back(layer);
      for (int d = 0; d < kDim; ++d) {
        state.keys.sums.push_back(200.0 * h);
        state.keys.squares.push_back(200.0 * (h * h + 1));
        state.values.sums.push_back(-100.0 * h);
        state.values.squares.push_back(200.0 * (h * h + 2));
      }
      state.values.rows.push_back(200);
      state.values.skipped.push_back(0);
    }
  }
  state.probabilities.resize(kLayers * kCalibratedFactors.size());
  for (ProbabilityHistogram& histogram : state.probabilities) {
    histogram.count()[3] = first + 1;
    histogram.error_sixth()[3] = 2;
    histogram.error_half()[3] = 1;
    histogram.mass = 10;
  }
  state.metadata["note"] = note;
  return state;
}

TEST_F(CalibrationFiles, AStateComesBackAsItWas) {
  const CalibrationState state = part(1, 2);
  ASSERT_TRUE(save_calibration_state(state, path("s")).ok());
  const CalibrationState back = load_calibration_state(path("s")).take();
  EXPECT_EQ(back.keys.sums, state.keys.sums);
  EXPECT_EQ(back.keys.squares, state.keys.squares);
  EXPECT_EQ(back.keys.rows, state.keys.rows);
  EXPECT_EQ(back.values.sums, state.values.sums);
  EXPECT_EQ(back.values.squares, state.values.squares);
  EXPECT_EQ(back.values.rows, state.values.rows);
  EXPECT_EQ(back.layers, state.layers);
  EXPECT_EQ(back.first_kv_head, 1);
  EXPECT_EQ(back.probabilities[5].rows, state.probabilities[5].rows);
  EXPECT_EQ(back.probabilities[5].mass, 10.0);
  EXPECT_EQ(back.metadata.at("note"), "n");
}

// Every cut of the file is an error, none is a state.
TEST_F(CalibrationFiles, ACutStateIsNone) {
  ASSERT_TRUE(save_calibration_state(part(0, 4), path("s")).ok());
  const auto size = fs::file_size(path("s"));
  for (std::uintmax_t keep = 0; keep < size; keep += 1 + size / 97) {
    fs::copy_file(path("s"), path("cut"), fs::copy_options::overwrite_existing);
    fs::resize_file(path("cut"), keep);
    EXPECT_FALSE(load_calibration_state(path("cut")).ok()) << keep;
  }
}

TEST_F(CalibrationFiles, AnotherFileIsNoState) {
  KeyShift means;
  means.num_layers = means.num_kv_heads = 1;
  means.head_dim = kDim;
  means.values.assign(kDim, 1.0F);
  ASSERT_TRUE(save_key_shift(means, path("k")).ok());
  const Status status = load_calibration_state(path("k")).status();
  EXPECT_EQ(status.code(), StatusCode::kCorrupt);
  EXPECT_NE(status.message().find("is no state of a calibration"), std::string::npos);
}

TEST_F(CalibrationFiles, AFullDiskLeavesTheOldState) {
  ASSERT_TRUE(save_calibration_state(part(0, 4, "old"), path("s")).ok());
  EXPECT_FALSE(save_calibration_state(part(0, 4, "new"), "/dev/full/s").ok());
  // The name is only taken when the bytes are on the disk.
  EXPECT_EQ(load_calibration_state(path("s")).value().metadata.at("note"), "old");
}

TEST(CalibrationJoin, RanksStandSideBySide) {
  const CalibrationState joined = join_calibration_states({part(2, 2), part(0, 2)}).take();
  const KeyShift sidecar = finish_calibration(joined).take();
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int h = 0; h < kHeads; ++h) {
      EXPECT_EQ(sidecar.slice(layer, h, 1)[7], static_cast<float>(h));
    }
  }
  EXPECT_EQ(sidecar.metadata.at("tokens"), "200");
  EXPECT_EQ(sidecar.metadata.at("skipped_rows"), "4");
  // Blocks of both ranks in both layers: 2 * (1 + 3).
  EXPECT_EQ(sidecar.metadata.at("probability_blocks"), "8");
  const auto taus = nlohmann::json::parse(sidecar.metadata.at("probability_taus"));
  EXPECT_EQ(taus.size(), kCalibratedFactors.size());
  EXPECT_EQ(taus.at("8").get<float>(), 3.5F / 512.0F);
}

TEST(CalibrationJoin, RefusesWhatIsNotOneCalibration) {
  EXPECT_EQ(join_calibration_states({}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(join_calibration_states({part(0, 2)}).status().code(), StatusCode::kNotFound);
  EXPECT_EQ(join_calibration_states({part(0, 2), part(0, 2)}).status().code(),
            StatusCode::kNotFound);
  EXPECT_EQ(join_calibration_states({part(0, 2), part(2, 2, "later")}).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(CalibrationFinish, TooFewTokensNameLayerAndHead) {
  CalibrationState state = part(0, 4);
  state.keys.rows[6] = 9;
  const Status status = finish_calibration(state).status();
  EXPECT_NE(status.message().find("layer 1, KV head 2 has seen 9 tokens"), std::string::npos)
      << status.message();
}

TEST(CalibrationFinish, DistancesAreInUnitsOfTheSpread) {
  const CalibrationState after = part(0, 4);  // deviation 1 everywhere
  CalibrationState before = after;
  for (double& sum : before.keys.sums) sum += 200.0 * 0.25;
  before.keys.sums[3] += 200.0 * 0.5;
  EXPECT_NEAR(key_mean_distance(before, after), 0.25, 0.01);
  EXPECT_NEAR(largest_key_mean_distance(before, after), 0.75, 1e-12);
  EXPECT_EQ(key_mean_distance(after, after), 0.0);
}

TEST_F(CalibrationFiles, TheDifferingFieldIsNamed) {
  write("config.json", R"({"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0})");
  write("model.safetensors", std::string(300000, 'x'));
  const Identity first = model_identity(folder_.string()).take();
  EXPECT_EQ(first.at("model.num_hidden_layers"), "2");
  KeyShift sidecar;
  sidecar.path = "k.safetensors";
  sidecar.metadata = first;
  EXPECT_TRUE(check_identity(sidecar, {{"model.rope_theta", "1"}}).ok());  // says nothing of itself
  sidecar.metadata["calibration_version"] = kCalibrationVersion;
  EXPECT_TRUE(check_identity(sidecar, first).ok());
  write("config.json", R"({"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 500.0})");
  Status status = check_identity(sidecar, model_identity(folder_.string()).value());
  EXPECT_NE(status.message().find("its model.rope_theta is 10000.0, and this one is 500.0"),
            std::string::npos)
      << status.message();
  // The same sizes with other weights are another model.
  write("config.json", R"({"model_type": "llama", "num_hidden_layers": 2, "rope_theta": 10000.0})");
  std::string weights(300000, 'x');
  weights.back() = 'y';
  write("model.safetensors", weights);
  status = check_identity(sidecar, model_identity(folder_.string()).value());
  EXPECT_NE(status.message().find("model.weights"), std::string::npos) << status.message();
}

TEST_F(CalibrationFiles, AModelNeedsConfigAndWeights) {
  EXPECT_EQ(model_identity(folder_.string()).status().code(), StatusCode::kNotFound);
  write("config.json", "{}");
  EXPECT_NE(model_identity(folder_.string()).status().message().find("holds no weights"),
            std::string::npos);
  write("config.json", "[");
  EXPECT_EQ(model_identity(folder_.string()).status().code(), StatusCode::kCorrupt);
}

TEST(CalibrationIdentity, RecipeElementsDecide) {
  Recipe a;
  Recipe b;
  b.hadamard = false;
  EXPECT_NE(recipe_identity(a), recipe_identity(b));
  b = a;
  b.shadow_pool_share = 0.2;
  EXPECT_EQ(recipe_identity(a), recipe_identity(b));
}

}  // namespace
}  // namespace bitdecoding
