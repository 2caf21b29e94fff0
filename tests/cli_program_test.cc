// SPDX-License-Identifier: Apache-2.0
// The program as a user runs it: output, exit codes, suggestions.
#include <cstring>

#include "bitdecoding/page.h"
#include "cli_world.h"
#include "io/key_shift.h"
#include "io/outer_scale.h"

namespace bitdecoding {
namespace {

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

// ---- inspect, doctor, completion ---------------------------------------------------------------

TEST_F(Cli, InspectsFormats) {
  const nlohmann::json json = json_of("inspect nvfp4 --json");
  EXPECT_EQ(json["tile_bytes"], 9216);
  EXPECT_EQ(json["bits_per_element"], 4.5);
  EXPECT_HAS(program("inspect nvfp4").out, "3.56 times smaller than BF16");
  EXPECT_EQ(json["orders"]["fp16_mma"], "the CUDA backend");
  EXPECT_HAS(program("inspect mxfp4").out, "quad (the CPU backend), fp16_mma (the CUDA backend)");
  EXPECT_FALSE(json_of("inspect bf16 --json").contains("orders"));
  EXPECT_NE(program("inspect nvfp4 --head-dim 72").code, 0);
  const Outcome nothing = program("inspect " + path("none"));
  EXPECT_EQ(nothing.code, 4);
}

// Whatever order a cache keeps them in, pages leave it in one.
TEST_F(Cli, PagesOfTheCudaOrderAreInspected) {
  const PageGeometry geometry =
      PageGeometry::make(Format::kMxfp4, FragmentOrder::kFp16Mma, 64, 64).take();
  std::vector<std::uint8_t> head(static_cast<std::size_t>(geometry.head_bytes), 0x22);
  const std::uint8_t* heads = head.data();
  const std::vector<std::uint8_t> bytes = export_page(geometry, {&heads, 1}, 0).take();
  write("page", std::string(bytes.begin(), bytes.end()));
  const nlohmann::json json = json_of("inspect --json " + path("page"));
  EXPECT_EQ(json["order"], "fp4_mma");
  EXPECT_EQ(json["heads"][0]["key"]["zeros"], 0);
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

TEST_F(Cli, InspectsRegularFilesOfASaneSizeAlone) {
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  for (const std::string& what : {std::string("/dev/zero"), path("pipe"), path("model")}) {
    const Outcome run = program("inspect " + what);
    EXPECT_EQ(run.code, 1) << what;
    EXPECT_HAS(run.out, "'" + what + "' is no regular file");
  }
  write("large", "BD4P");
  fs::resize_file(path("large"), std::uintmax_t{1} << 33);
  const Outcome large = program("inspect " + path("large"));
  EXPECT_EQ(large.code, 1);
  EXPECT_HAS(large.out, "is longer than 268435456 bytes");
}

TEST_F(Cli, InspectSaysWhatAFileIsNot) {
  write("notes.md", "# Notes\n\nNothing that this program reads.\n");
  const Outcome run = program("inspect " + path("notes.md"));
  EXPECT_EQ(run.code, 5);
  EXPECT_HAS(run.out, "no page file");
  EXPECT_HAS(run.out, "no recipe");
  EXPECT_HAS(run.out, "no safetensors file");
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

TEST_F(Cli, InspectsAndChecksOuterScales) {
  OuterScales scales;
  scales.num_layers = 2;
  scales.num_kv_heads = 2;
  scales.value = {-3, 0, 5, 1};
  ASSERT_TRUE(save_outer_scales(scales, path("o.safetensors")).ok());
  const nlohmann::json json = json_of("inspect --json " + path("o.safetensors"));
  EXPECT_EQ(json["kind"], "outer_scales");
  EXPECT_TRUE(json["outer_scales"]["key"].is_null());
  EXPECT_EQ(json["outer_scales"]["value"]["least"], -3);
  EXPECT_EQ(json["outer_scales"]["value"]["greatest"], 5);
  EXPECT_HAS(program("inspect " + path("o.safetensors")).out, "value: 2^-3 to 2^5");
  write("r.json", R"({"key_shift": false, "outer_scale_file": "o.safetensors"})");
  EXPECT_EQ(program("recipe check " + path("r.json")).code, 0);
  EXPECT_EQ(program(serve("--dry-run --recipe " + path("r.json"))).code, 0);
  scales.value[2] = 65;
  ASSERT_TRUE(save_outer_scales(scales, path("o.safetensors")).ok());
  for (const std::string& run :
       {"recipe check " + path("r.json"), serve("--dry-run --recipe " + path("r.json")),
        "inspect " + path("o.safetensors")}) {
    const Outcome bad = program(run);
    EXPECT_EQ(bad.code, 1) << run;
    EXPECT_HAS(bad.out, "layer 1, KV head 0");
  }
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
