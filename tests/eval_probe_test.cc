// SPDX-License-Identifier: Apache-2.0
// The ablation table and the sensitivity report, from figures that are given.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "bitdecoding/recipe.h"
#include "probe/ablate.h"
#include "probe/layers.h"
#include "report/html.h"

namespace bitdecoding::eval {
namespace {

TEST(Ablation, EveryRowIsARecipeOfItsOwn) {
  std::set<std::string> recipes;
  for (const AblationRow& row : ablation_rows("/x/key_shift.safetensors", true)) {
    const Result<Recipe> recipe = parse_recipe(row.recipe, row.name);
    EXPECT_TRUE(recipe.ok()) << recipe.status().message();
    EXPECT_TRUE(recipes.insert(row.recipe).second) << row.name;
  }
}

TEST(Ablation, EachElementIsOffAlone) {
  const auto rows = ablation_rows("/x/k.safetensors", false);
  const auto of = [&](const std::string& name) {
    for (const AblationRow& row : rows) {
      if (row.name == name) return parse_recipe(row.recipe, name).value();
    }
    ADD_FAILURE() << name;
    return Recipe{};
  };
  EXPECT_EQ(of("without BF16 sink").sink_tokens, 0);
  EXPECT_EQ(of("without BF16 sink").tail_tokens, 64);
  EXPECT_FALSE(of("without key means").key_shift);
  EXPECT_TRUE(of("without key means").hadamard);
  EXPECT_TRUE(of("without key means").value_shift);
  EXPECT_FALSE(of("without value means").value_shift);
  EXPECT_TRUE(of("without value means").key_shift);
  const Recipe off = of("all of these off");
  EXPECT_EQ(off.sink_tokens + off.tail_tokens, 0);
  EXPECT_FALSE(off.hadamard || off.key_shift || off.value_shift);
  EXPECT_EQ(off.key_rule, ScaleRule::kAmax6);
}

SensitivityReport report() {
  SensitivityReport out;
  out.model = "a <model>";
  out.text = "t";
  out.recipe = R"({"mode": "bitdecoding-nvfp4"})";
  out.bits = 4.5;
  for (int i = 0; i < 4; ++i) {
    LayerReport layer;
    layer.layer = i;
    layer.key = {0.1, std::nan("")};
    layer.score = layer.output = {0.1 * i, 0.2, 0.3};
    layer.kl = i == 2 ? 0.5 : 0.1 * (3 - i);
    out.layers.push_back(layer);
  }
  return out;
}

TEST(Sensitivity, LayersAreSortedByWhatTheyCost) {
  EXPECT_EQ(report().order(), (std::vector<int>{2, 0, 1, 3}));
  EXPECT_NEAR(report().compression(0), 16 / 4.5, 1e-12);
  EXPECT_NEAR(report().compression(2), 16 / 10.25, 1e-12);
  EXPECT_NEAR(report().compression(4), 1.0, 1e-12);
}

TEST(Sensitivity, ThePageAndTheJsonHoldAll) {
  const std::string page = sensitivity_page(report());
  EXPECT_NE(page.find("a &lt;model&gt;"), std::string::npos);
  EXPECT_NE(page.find("--kv-cache-dtype-skip-layers 0 2"), std::string::npos);
  EXPECT_EQ(page.find("nan"), std::string::npos);
  const Json json = sensitivity_json(report());
  EXPECT_EQ(json["layers"].size(), 4U);
  EXPECT_EQ(json["keep_in_bf16"][0]["layer"], 2);
  EXPECT_TRUE(json["layers"][0]["key_error"][1].is_null());
}

TEST(HeatMaps, EmptyAndZeroMapsAreDrawn) {
  EXPECT_NE(heat_map({"t", "r", "c", {}, {}}).find("<svg"), std::string::npos);
  const std::string zero = heat_map({"t", "r", "c", {"0"}, {{0.0, std::nan("")}}});
  EXPECT_NE(zero.find("fill-opacity=\"0.000\""), std::string::npos);
  EXPECT_EQ(zero.find("nan"), std::string::npos);
}

}  // namespace
}  // namespace bitdecoding::eval
