// SPDX-License-Identifier: Apache-2.0
// Recipes: presets, round trips, and an error sentence for every kind of mistake.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "bitdecoding/recipe.h"
#include "io/recipe_fields.h"

namespace bitdecoding {
namespace {

std::string error_of(std::string_view json) {
  const Result<Recipe> recipe = parse_recipe(json, "here");
  if (recipe.ok()) return "(accepted)";
  EXPECT_EQ(recipe.status().message().rfind("here: ", 0), 0U) << recipe.status().message();
  return recipe.status().message();
}

#define EXPECT_HAS(text, part)                    \
  EXPECT_NE((text).find(part), std::string::npos) \
      << "\"" << (text) << "\" lacks \"" << (part) << "\""

TEST(RecipeModes, SevenNamesInOrder) {
  const std::vector<std::string> expected = {"bf16",
                                             "fp8",
                                             "turboquant-4bit-nc",
                                             "turboquant-4bit-nc-all-layers",
                                             "nvfp4",
                                             "bitdecoding-nvfp4",
                                             "bitdecoding-mxfp4"};
  EXPECT_EQ(mode_names(), expected);
}

TEST(RecipeModes, Presets) {
  const Recipe nv = mode_recipe("bitdecoding-nvfp4").take();
  EXPECT_EQ(nv.format, Format::kNvfp4);
  EXPECT_EQ(nv.key_rule, ScaleRule::kFourSix);
  EXPECT_EQ(nv.value_rule, ScaleRule::kAmax6);
  EXPECT_TRUE(nv.hadamard && nv.key_shift);
  EXPECT_EQ(nv.sink_tokens, 16);
  EXPECT_EQ(nv.tail_tokens, 64);
  EXPECT_EQ(nv.query_terms, 2);
  EXPECT_EQ(nv.probability_c, 8.0F);

  const Recipe mx = mode_recipe("bitdecoding-mxfp4").take();
  EXPECT_EQ(mx.format, Format::kMxfp4);
  EXPECT_EQ(mx.key_rule, ScaleRule::kMxfp4Search);
  EXPECT_EQ(mx.value_rule, ScaleRule::kMxfp4Search);

  const Recipe plain = mode_recipe("nvfp4").take();
  EXPECT_EQ(plain.format, Format::kNvfp4Rows);
  EXPECT_EQ(plain.key_rule, ScaleRule::kAmax6);
  EXPECT_EQ(plain.value_rule, ScaleRule::kAmax6);
  for (const char* mode : {"bf16", "fp8", "nvfp4"}) {
    const Recipe recipe = mode_recipe(mode).take();
    EXPECT_EQ(recipe.reproducible, !is_tiled(recipe.format)) << mode;
    EXPECT_EQ(recipe.mode, mode);
    EXPECT_EQ(recipe.sink_tokens, 0) << mode;
    EXPECT_EQ(recipe.tail_tokens, 0) << mode;
    EXPECT_FALSE(recipe.hadamard || recipe.key_shift) << mode;
    EXPECT_TRUE(validate_recipe(recipe).ok()) << mode;
  }
  EXPECT_EQ(mode_recipe("bf16").value().format, Format::kBf16);
  EXPECT_EQ(mode_recipe("fp8").value().format, Format::kFp8E4m3);
}

TEST(RecipeModes, TurboquantIsRefusedWithTheReason) {
  for (const char* mode : {"turboquant-4bit-nc", "turboquant-4bit-nc-all-layers"}) {
    const Result<Recipe> recipe = mode_recipe(mode);
    ASSERT_FALSE(recipe.ok());
    EXPECT_EQ(recipe.status().code(), StatusCode::kUnsupported);
    EXPECT_HAS(recipe.status().message(), "CUDA");
  }
}

TEST(RecipeModes, UnknownModeSuggests) {
  const Result<Recipe> recipe = mode_recipe("bitdecoding_nvfp");
  ASSERT_FALSE(recipe.ok());
  EXPECT_EQ(recipe.status().code(), StatusCode::kInvalidArgument);
  EXPECT_HAS(recipe.status().message(), "did you mean 'bitdecoding-nvfp4'?");
}

TEST(RecipeNames, RoundTrip) {
  for (const ScaleRule rule : {ScaleRule::kAmax6, ScaleRule::kFourSix, ScaleRule::kCodeSearch,
                               ScaleRule::kMxfp4Search, ScaleRule::kMxfp4Floor}) {
    EXPECT_EQ(parse_scale_rule(scale_rule_name(rule)).take(), rule);
  }
  for (const Arithmetic a : {Arithmetic::kWide, Arithmetic::kFp4, Arithmetic::kInt8}) {
    EXPECT_EQ(parse_arithmetic(arithmetic_name(a)).take(), a);
  }
  EXPECT_HAS(parse_scale_rule("four-sixx").status().message(), "did you mean 'four_six'?");
  EXPECT_HAS(parse_arithmetic("int4").status().message(), "did you mean 'int8'?");
}

TEST(RecipeParse, OverridesEveryKey) {
  const Recipe r = parse_recipe(R"({"mode": "bitdecoding-nvfp4", "sink_tokens": 32,
      "tail_tokens": 128, "hadamard": false, "key_shift": true, "key_shift_file": "a.safetensors",
      "outer_scale_file": "o.safetensors", "key_rule": "code_search", "value_rule": "four_six", "query_terms": 1, "probability_c": 1,
      "probability_tau": 0.5, "arithmetic": "fp4", "reproducible": true,
      "shadow_pool_share": 0.1, "calibrate_file": "b.safetensors"})",
                                "test")
                       .take();
  EXPECT_EQ(r.sink_tokens, 32);
  EXPECT_EQ(r.tail_tokens, 128);
  EXPECT_FALSE(r.hadamard);
  EXPECT_TRUE(r.key_shift);
  EXPECT_EQ(r.key_shift_file, "a.safetensors");
  EXPECT_EQ(r.outer_scale_file, "o.safetensors");
  EXPECT_EQ(r.key_rule, ScaleRule::kCodeSearch);
  EXPECT_EQ(r.value_rule, ScaleRule::kFourSix);
  EXPECT_EQ(r.query_terms, 1);
  EXPECT_EQ(r.probability_c, 1.0F);
  EXPECT_EQ(r.probability_tau, 0.5F);
  EXPECT_EQ(r.arithmetic, Arithmetic::kFp4);
  EXPECT_TRUE(r.reproducible);
  EXPECT_EQ(r.shadow_pool_share, 0.1);
  EXPECT_EQ(r.calibrate_file, "b.safetensors");
}

TEST(RecipeParse, PrintedRecipesParseBackToThemselves) {
  for (const char* text :
       {R"({"mode": "bf16"})", R"({"mode": "fp8"})", R"({"mode": "nvfp4"})",
        R"({"key_shift": false})", R"({"mode": "bitdecoding-mxfp4", "key_shift": false})",
        R"({"key_shift": false, "outer_scale_file": "o"})",
        R"({"key_shift": false, "probability_tau": 0.1, "probability_c": 3.3})",
        R"({"calibrate_file": "x \" \\ ü", "probability_tau": "calibrate"})"}) {
    const Recipe recipe = parse_recipe(text, "test").take();
    const std::string printed = recipe_to_json(recipe);
    const Result<Recipe> again = parse_recipe(printed, "printed");
    ASSERT_TRUE(again.ok()) << again.status().message();
    EXPECT_EQ(recipe_to_json(again.value()), printed) << text;
    EXPECT_EQ(again.value().probability_tau, recipe.probability_tau);
    EXPECT_EQ(again.value().probability_c, recipe.probability_c);
  }
}

TEST(RecipeParse, EveryKeyIsPrintedAndExplained) {
  const Recipe recipe = mode_recipe("bitdecoding-nvfp4").take();
  const nlohmann::json printed = nlohmann::json::parse(recipe_to_json(recipe));
  const std::string explained = explain_recipe(recipe);
  EXPECT_EQ(printed.size(), recipe_fields().size() + 1);
  for (const RecipeField& field : recipe_fields()) {
    EXPECT_TRUE(printed.contains(field.name)) << field.name;
    EXPECT_HAS(explained, std::string("\n") + field.name + " ");
  }
}

TEST(RecipeErrors, UnknownKeyNamesTheNearest) {
  const std::string error = error_of(R"({"sink_token": 16, "key_shift": false})");
  EXPECT_HAS(error, "unknown recipe key \"sink_token\"");
  EXPECT_HAS(error, "did you mean 'sink_tokens'?");
  EXPECT_HAS(error_of(R"({"zzzzzzzzzzzz": 1})"), "expected mode, format, sink_tokens");
}

TEST(RecipeErrors, WrongTypesAndRangesSayWhatIsAccepted) {
  const char* bad[][2] = {
      {"sink_tokens", "-1"},
      {"sink_tokens", "4097"},
      {"sink_tokens", "16.5"},
      {"sink_tokens", "\"16\""},
      {"sink_tokens", "null"},
      {"sink_tokens", "true"},
      {"sink_tokens", "1e99"},
      {"sink_tokens", "18446744073709551615"},
      {"tail_tokens", "[64]"},
      {"tail_tokens", "{\"a\": {\"b\": [1]}}"},
      {"hadamard", "1"},
      {"hadamard", "\"true\""},
      {"key_shift", "0"},
      {"key_shift_file", "7"},
      {"key_shift_file", "\"a\\u0000b\""},
      {"outer_scale_file", "true"},
      {"outer_scale_file", "[1, 2]"},
      {"key_rule", "\"amax7\""},
      {"key_rule", "6"},
      {"value_rule", "[]"},
      {"query_terms", "0"},
      {"query_terms", "3"},
      {"probability_c", "0"},
      {"probability_c", "2689"},
      {"probability_tau", "-0.1"},
      {"probability_tau", "448.5"},
      {"probability_tau", "\"on\""},
      {"arithmetic", "\"INT8\""},
      {"reproducible", "\"yes\""},
      {"shadow_pool_share", "0.51"},
      {"shadow_pool_share", "\"3%\""},
      {"calibrate_file", "false"},
      {"format", "\"nvfp5\""},
  };
  for (const auto& [key, value] : bad) {
    const std::string error = error_of(std::string("{\"") + key + "\": " + value + "}");
    EXPECT_HAS(error, std::string("of '") + key + "' is not accepted; expected ");
  }
  EXPECT_HAS(error_of(R"({"mode": 4})"), "of 'mode' is not accepted");
}

TEST(RecipeErrors, BrokenJson) {
  EXPECT_HAS(error_of(""), "it is empty");
  EXPECT_HAS(error_of("   \n"), "it is empty");
  EXPECT_HAS(error_of("mode: bf16"), "it does not begin with '{'");
  EXPECT_HAS(error_of(R"({"mode": "bf16",})"), "not valid JSON");
  EXPECT_HAS(error_of(R"({"mode": "bf16"} x)"), "not valid JSON");
  EXPECT_HAS(error_of("{\"mode\": \"bf16\xff\"}"), "not valid JSON");
  using namespace std::string_literals;
  EXPECT_HAS(error_of("{\"mode\": \"bf16\"}\0"s), "byte 16 is zero");
  EXPECT_HAS(error_of("{\"mode\": \"bf16\"}\0, \"hadamard\": 7}"s), "byte 16 is zero");
  EXPECT_HAS(error_of("[]"), "must be a JSON object");
  EXPECT_HAS(error_of("\"bf16\""), "must be a JSON object");
  EXPECT_HAS(error_of(R"({"hadamard": true, "hadamard": false})"),
             "names the key \"hadamard\" twice");
}

TEST(RecipeErrors, HostileSizes) {
  EXPECT_HAS(error_of(std::string((1 << 20) + 1, ' ')), "1048576");
  const std::string deep = "{\"sink_tokens\": " + std::string(400000, '[');
  EXPECT_HAS(error_of(deep), "");
  const std::string nested =
      "{\"sink_tokens\": " + std::string(400000, '[') + std::string(400000, ']') + "}";
  EXPECT_HAS(error_of(nested), "'sink_tokens' is not accepted");
  const std::string long_key = "{\"" + std::string(500000, 'k') + "\": 1}";
  EXPECT_LT(error_of(long_key).size(), 600U);
}

TEST(RecipeErrors, KeyShiftNamesThePathAndTheCommand) {
  const std::string error = error_of(R"({"mode": "bitdecoding-nvfp4"})");
  EXPECT_HAS(error, "key_shift_file");
  EXPECT_HAS(error, "bitdecoding calibrate MODEL");
  EXPECT_HAS(error, "\"key_shift\": false");
  EXPECT_TRUE(parse_recipe(R"({"key_shift": false})", "t").ok());
  EXPECT_TRUE(parse_recipe(R"({"key_shift_file": "x"})", "t").ok());
  EXPECT_TRUE(parse_recipe(R"({"calibrate_file": "x"})", "t").ok());
}

TEST(RecipeErrors, RulesMustFitTheFormat) {
  EXPECT_HAS(error_of(R"({"key_shift": false, "key_rule": "mxfp4_search"})"),
             "key_rule 'mxfp4_search' does not fit format 'nvfp4'");
  EXPECT_HAS(
      error_of(R"({"mode": "bitdecoding-mxfp4", "key_shift": false, "value_rule": "amax6"})"),
      "value_rule 'amax6' does not fit format 'mxfp4'");
  EXPECT_HAS(error_of(R"({"mode": "nvfp4", "hadamard": true})"), "hadamard needs a tiled format");
  EXPECT_HAS(error_of(R"({"mode": "fp8", "key_shift": true})"), "key_shift needs a tiled format");
  EXPECT_HAS(error_of(R"({"mode": "bf16", "arithmetic": "fp4"})"), "arithmetic 'fp4'");
  EXPECT_HAS(error_of(R"({"mode": "fp8", "arithmetic": "int8"})"), "arithmetic 'int8'");
  EXPECT_HAS(error_of(R"({"mode": "bf16", "sink_tokens": 16})"), "set both to 0");
}

TEST(RecipeErrors, OuterScalesNeedScales) {
  for (const char* mode : {"bf16", "fp8"}) {
    EXPECT_HAS(error_of(std::string(R"({"outer_scale_file": "o", "mode": ")") + mode + "\"}"),
               "outer_scale_file names powers of two");
  }
  EXPECT_TRUE(parse_recipe(R"({"mode": "nvfp4", "outer_scale_file": "o"})", "t").ok());
}

TEST(RecipeErrors, TauCalibrateIsNotServed) {
  EXPECT_HAS(error_of(R"({"key_shift": false, "probability_tau": "calibrate"})"),
             "cannot be served");
  EXPECT_TRUE(parse_recipe(R"({"probability_tau": "calibrate", "calibrate_file": "x"})", "t").ok());
}

TEST(RecipeErrors, RecipesFilledByHandAreCheckedToo) {
  Recipe recipe = mode_recipe("nvfp4").take();
  recipe.sink_tokens = -3;
  EXPECT_HAS(validate_recipe(recipe).message(), "'sink_tokens'");
  recipe.sink_tokens = 0;
  recipe.key_rule = static_cast<ScaleRule>(77);
  EXPECT_HAS(validate_recipe(recipe).message(), "'key_rule'");
}

class RecipeFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() /
              ("bitdecoding_recipe_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string write(const char* name, std::string_view text) const {
    const std::filesystem::path path = folder_ / name;
    std::ofstream(path) << text;
    return path.string();
  }
  std::filesystem::path folder_;
};

TEST_F(RecipeFile, RelativePathsBelongToTheRecipesFolder) {
  const Recipe relative = load_recipe(write("r.json", R"({"key_shift_file": "sub/../k.safetensors",
                                      "outer_scale_file": "o.safetensors",
                                      "calibrate_file": "c.safetensors"})"))
                              .take();
  EXPECT_EQ(relative.outer_scale_file, (folder_ / "o.safetensors").string());
  EXPECT_EQ(relative.key_shift_file, (folder_ / "k.safetensors").string());
  EXPECT_EQ(relative.calibrate_file, (folder_ / "c.safetensors").string());
  const Recipe absolute =
      load_recipe(write("a.json", R"({"key_shift_file": "/nowhere/k.safetensors"})")).take();
  EXPECT_EQ(absolute.key_shift_file, "/nowhere/k.safetensors");
}

TEST_F(RecipeFile, ErrorsNameTheFile) {
  const std::string path = write("r.json", R"({"sink_tokens": "x"})");
  EXPECT_EQ(load_recipe(path).status().message().rfind(path + ": ", 0), 0U);
  const Result<Recipe> missing = load_recipe((folder_ / "none.json").string());
  EXPECT_EQ(missing.status().code(), StatusCode::kNotFound);
  EXPECT_HAS(missing.status().message(), "none.json");
  const Result<Recipe> directory = load_recipe(folder_.string());
  EXPECT_EQ(directory.status().code(), StatusCode::kInvalidArgument);
  EXPECT_HAS(directory.status().message(), "is a folder");
  const std::string large = write("large.json", std::string((1 << 20) + 1, ' '));
  EXPECT_EQ(load_recipe(large).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace bitdecoding
