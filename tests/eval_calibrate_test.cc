// SPDX-License-Identifier: Apache-2.0
// What a calibration sends, how it estimates what is left, and its folder's lock.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "calibrate/corpus.h"
#include "calibrate/prompts.h"
#include "calibrate/runner.h"
#include "engine/folder_lock.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

class CalibrateFolder : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("bitdecoding_calibrate_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name) << text;
    return (folder_ / name).string();
  }
  fs::path folder_;
};

TEST(BuiltinCorpus, IsLongOfSeveralKindsAndAlwaysTheSame) {
  const std::vector<CalibrationText> texts = builtin_corpus();
  std::set<std::string> kinds;
  std::size_t bytes = 0;
  for (const CalibrationText& text : texts) {
    kinds.insert(text.name.substr(0, text.name.rfind(' ')));
    bytes += text.text.empty() ? text.messages.dump().size() : text.text.size();
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"builtin code", "builtin dialogue", "builtin numbers",
                                          "builtin prose"}));
  // Five bytes a token is more than any tokenizer reaches on such texts.
  EXPECT_GT(bytes, 5U * 100000U);
  // Of every compiler: a calibration is told apart by it.
  EXPECT_EQ(corpus_hash(texts), "17469b69a35ddb8e");
}

TEST_F(CalibrateFolder, ReadsTextsAndConversations) {
  const std::string path = write("d.jsonl",
                                 "{\"text\": \"one\"}\n\n"
                                 "{\"messages\": [{\"role\": \"user\", \"content\": \"two\"}]}\n");
  const std::vector<CalibrationText> texts = read_corpus(path).take();
  ASSERT_EQ(texts.size(), 2U);
  EXPECT_EQ(texts[0].text, "one");
  EXPECT_EQ(texts[1].messages[0]["content"], "two");
  EXPECT_EQ(texts[1].name, "d.jsonl line 3");
}

TEST_F(CalibrateFolder, RefusesLinesThatAreNoTexts) {
  for (const char* line :
       {"{", "[]", "{}", R"({"text": 5})", R"({"text": ""})", R"({"messages": []})",
        R"({"messages": [{"role": "user"}]})", R"({"messages": [{"role": 1, "content": "x"}]})"}) {
    const std::string path = write("d.jsonl", std::string("{\"text\": \"ok\"}\n") + line + "\n");
    const Status status = read_corpus(path).status();
    EXPECT_NE(status.message().find("d.jsonl line 2: expected"), std::string::npos)
        << line << ": " << status.message();
  }
  EXPECT_NE(read_corpus(write("e.jsonl", "\n \n")).status().message().find("holds no text"),
            std::string::npos);
  EXPECT_EQ(read_corpus("/nowhere/x.jsonl").status().code(), StatusCode::kNotFound);
}

TEST(CutPrompts, LongTextsCountByTheirTokens) {
  Tokens body(1000);
  for (int i = 0; i < 1000; ++i) body[static_cast<std::size_t>(i)] = i;
  std::vector<CalibrationPrompt> prompts;
  std::size_t total = 0;
  cut_prompts("t", {7}, body, 2000, 301, 16, &prompts, &total);
  ASSERT_EQ(prompts.size(), 4U);
  EXPECT_EQ(prompts[0].tokens.size(), 301U);
  EXPECT_EQ(prompts[0].tokens[0], 7);
  EXPECT_EQ(prompts[1].tokens[1], 300);
  EXPECT_EQ(prompts[3].tokens.size(), 101U);
  EXPECT_EQ(prompts[3].name, "t, part 4");
  EXPECT_EQ(total, 1004U);
  // No more than wanted, and nothing that holds sinks alone.
  prompts.clear();
  total = 0;
  cut_prompts("t", {}, body, 350, 300, 16, &prompts, &total);
  EXPECT_EQ(total, 350U);
  prompts.clear();
  total = 0;
  cut_prompts("t", {}, Tokens(16, 1), 350, 300, 16, &prompts, &total);
  EXPECT_TRUE(prompts.empty());
}

TEST(RemainingTime, IsOfMeasuredRatesOnly) {
  Remaining remaining({1000, 1000});
  EXPECT_FALSE(remaining.seconds_left(0).has_value());
  EXPECT_NE(remaining.words(0, 0).find("the first prompt shows"), std::string::npos);
  remaining.done(0, 500, 5.0);
  EXPECT_NEAR(*remaining.seconds_left(0), 15.0, 1e-9);
  remaining.done(0, 500, 5.0);
  remaining.done(1, 500, 10.0);  // the second phase is slower, and its own rate counts
  EXPECT_NEAR(*remaining.seconds_left(1), 10.0, 1e-9);
  EXPECT_NEAR(remaining.share(), 0.75, 1e-9);
  EXPECT_NE(remaining.words(1, 4).find("75 %  about 6 s left"), std::string::npos)
      << remaining.words(1, 4);
  // What an earlier process did is done, but says nothing of this one's speed.
  Remaining resumed({1000});
  resumed.done(0, 600, 0);
  EXPECT_FALSE(resumed.seconds_left(0).has_value());
  resumed.done(0, 200, 2.0);
  EXPECT_NEAR(*resumed.seconds_left(0), 2.0, 1e-9);
}

TEST_F(CalibrateFolder, OneAtATime) {
  Result<FolderLock> first = FolderLock::take((folder_ / "x").string());
  ASSERT_TRUE(first.ok());
  const Status second = FolderLock::take((folder_ / "x").string()).status();
  EXPECT_NE(second.message().find("another process is at work"), std::string::npos);
  { const FolderLock gone = first.take(); }
  EXPECT_TRUE(FolderLock::take((folder_ / "x").string()).ok());
  EXPECT_EQ(FolderLock::take("/proc/nothing").status().code(), StatusCode::kIo);
}

CalibrateOptions tiny_model(const fs::path& folder) {
  fs::create_directories(folder / "model");
  std::ofstream(folder / "model/config.json") << R"({"model_type": "llama"})";
  std::ofstream(folder / "model/model.safetensors") << "weights";
  CalibrateOptions options;
  options.program = "/bin/false";
  options.model = (folder / "model").string();
  options.dtype = "float32";
  return options;
}

TEST_F(CalibrateFolder, RefusesBeforeAnythingStarts) {
  Progress progress(-1);
  CalibrateOptions options = tiny_model(folder_);
  options.data = write("empty.jsonl", "");
  EXPECT_NE(CalibrateRunner(options, &progress).run().message().find("holds no text"),
            std::string::npos);
  options = tiny_model(folder_);
  options.recipe = mode_recipe("bf16").value();
  EXPECT_NE(CalibrateRunner(options, &progress).run().message().find("no key means and no tau"),
            std::string::npos);
  options.model = "/nowhere";
  EXPECT_EQ(CalibrateRunner(options, &progress).run().code(), StatusCode::kNotFound);
}

// A sidecar that lies there is reused when all fields agree, and else refused with the field.
TEST_F(CalibrateFolder, ASavedCalibrationIsReusedOrRefused) {
  Progress progress(-1);
  const CalibrateOptions options = tiny_model(folder_);
  KeyShift sidecar;
  sidecar.num_layers = sidecar.num_kv_heads = 1;
  sidecar.head_dim = 64;
  sidecar.values.assign(64, 1.0F);
  sidecar.values[0] = 2.0F;
  fs::create_directories(folder_ / "model/calibration");
  const std::string path = (folder_ / "model/calibration/key_shift.safetensors").string();
  ASSERT_TRUE(save_key_shift(sidecar, path).ok());
  EXPECT_NE(CalibrateRunner(options, &progress).run().message().find("was not made by"),
            std::string::npos);
  Recipe recipe = options.recipe;
  sidecar.metadata = model_identity(options.model).take();
  sidecar.metadata.merge(recipe_identity(recipe));
  sidecar.metadata["calibration_version"] = kCalibrationVersion;
  sidecar.metadata["corpus"] = corpus_hash(builtin_corpus());
  sidecar.metadata["tokens_wanted"] = "16384";
  sidecar.metadata["prompt_tokens"] = "2048";
  sidecar.metadata["dtype"] = "float32";
  ASSERT_TRUE(save_key_shift(sidecar, path).ok());
  EXPECT_TRUE(CalibrateRunner(options, &progress).run().ok());
  sidecar.metadata["recipe.hadamard"] = "false";
  ASSERT_TRUE(save_key_shift(sidecar, path).ok());
  const Status status = CalibrateRunner(options, &progress).run();
  EXPECT_NE(status.message().find("its recipe.hadamard is false, and this one is true"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace bitdecoding::eval
