// SPDX-License-Identifier: Apache-2.0
#include "demo/options.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <set>

#include "../cli/bf16_matrix.h"
#include "report/machine.h"

namespace bitdecoding::eval {
namespace {

const std::vector<std::string> kKnownModes = {
    "stock", "bf16", "fp8", "nvfp4", "bitdecoding-nvfp4", "bitdecoding-mxfp4"};

std::string absolute(const std::string& path) {
  return std::filesystem::absolute(path).lexically_normal().string();
}

void fill_defaults(DemoOptions* options) {
  options->root = absolute(options->root);
  if (options->venv.empty()) options->venv = options->root + "/.venv";
  if (options->model.empty()) options->model = options->root + "/out/models/SmolLM2-135M-Instruct";
  if (options->out.empty()) options->out = options->root + "/out/demo";
  options->venv = absolute(options->venv);
  options->model = absolute(options->model);
  options->out = absolute(options->out);
  if (options->modes.empty()) {
    options->modes = options->quick
                         ? std::vector<std::string>{"bf16", "bitdecoding-nvfp4"}
                         : std::vector<std::string>{"stock", "bf16", "bitdecoding-nvfp4"};
  }
  if (options->dtype.empty()) {
    options->dtype = cli::has_bf16_matrix() ? "bfloat16" : "float32";
    options->dtype_chosen = true;
  }
  if (options->threads == 0) options->threads = usable_cores();
  // bf16 is first: the others' logits are compared with its.
  std::vector<std::string> ordered;
  std::set<std::string> seen;
  if (std::count(options->modes.begin(), options->modes.end(), "bf16") > 0) {
    ordered.emplace_back("bf16");
    seen.insert("bf16");
  }
  for (const std::string& mode : options->modes) {
    if (seen.insert(mode).second) ordered.push_back(mode);
  }
  options->modes = ordered;
}

}  // namespace

bool parse_options(int argc, char** argv, DemoOptions* options, int* exit_code) {
  CLI::App app{
      "Serves one model with vLLM once for each KV cache mode and shows the modes side by side."};
  app.name("demo");
  app.add_flag("--quick", options->quick, "Shorter prompts and two modes: minutes less");
  app.add_option("--modes", options->modes,
                 "Which modes to compare, by commas: stock, bf16, fp8, nvfp4, bitdecoding-nvfp4, "
                 "bitdecoding-mxfp4; without bf16 no KL divergence is measured")
      ->delimiter(',')
      ->check(CLI::IsMember(kKnownModes));
  app.add_flag("--fresh", options->fresh, "Begin anew instead of finishing an unfinished run");
  app.add_option("--model", options->model, "A Hugging Face model folder");
  app.add_option("--text", options->text, "The long text")->check(CLI::ExistingFile);
  app.add_option("--calibration-text", options->calibration_texts,
                 "Texts from which the key means are found, by commas; not the long text")
      ->delimiter(',')
      ->check(CLI::ExistingFile);
  app.add_option("--cache-mib", options->cache_mib, "Memory of each server's KV cache")
      ->check(CLI::Range(64, 1 << 20));
  app.add_option("--dtype", options->dtype,
                 "Type of weights and activations, in every mode (default: bfloat16 on processors "
                 "with BF16 matrix instructions, else float32)")
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--threads", options->threads, "Compute threads of a server (0 = all cores)")
      ->check(CLI::Range(0, 1024));
  app.add_option("--seed", options->seed, "Chooses the hidden codes");
  app.add_option("--start-timeout", options->start_timeout, "Seconds a server may take to start")
      ->check(CLI::Range(10, 36000));
  app.add_flag("--keep-logits", options->keep_logits, "Keep the captured logits (0.2 MB a token)");
  app.add_option("--root", options->root, "The repository");
  app.add_option("--venv", options->venv, "The Python environment (default: .venv)");
  app.add_option("--out", options->out, "Where results go (default: out/demo)");
  app.footer(
      "Exit codes: 0 all measured; 1 something failed, with a sentence; 2 wrong arguments; "
      "130 interrupted. A run that was cut short is finished by the next one.");
  for (int i = 0; i < argc; ++i) {
    options->command += (i == 0 ? std::string("./demo") : std::string(" ") + argv[i]);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    *exit_code = app.exit(error) == 0 ? 0 : 2;
    return false;
  }
  fill_defaults(options);
  return true;
}

}  // namespace bitdecoding::eval
