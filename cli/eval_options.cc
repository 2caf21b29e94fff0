// SPDX-License-Identifier: Apache-2.0
#include "eval_options.h"

#include <fmt/format.h>

#include <filesystem>

#include "engine/process.h"
#include "machine.h"
#include "output.h"

namespace bitdecoding::cli {

void add_engine_options(CLI::App* command, EngineOptions* options, bool with_recipe) {
  command->add_option("MODEL", options->model, "A model folder with config.json")->required();
  if (with_recipe) {
    auto* mode = command->add_option("--mode", options->mode, "KV mode")->capture_default_str();
    command->add_option("--recipe", options->recipe, "Recipe file, instead of a mode")
        ->excludes(mode);
  }
  command->add_option("--dtype", options->dtype,
                      "Weights and activations; default: bfloat16 where the processor multiplies "
                      "BF16 matrices, else float32; divergences are always measured in float32");
  command->add_option("--python", options->python, "The Python that has vLLM and the plugin");
  command->add_option("--threads", options->threads, "Threads; default: all usable cores");
  command->add_option("--start-timeout", options->start_timeout, "Seconds for the engine to start")
      ->capture_default_str();
}

Result<Recipe> engine_recipe(const EngineOptions& options) {
  return options.recipe.empty() ? mode_recipe(options.mode) : read_recipe(options.recipe);
}

int ended(const Status& status, bool goes_on) {
  if (eval::interrupted()) {
    print_note(goes_on ? "Interrupted; the same command goes on from here."
                       : "Interrupted; the same command begins anew.");
    return kExitInterrupted;
  }
  return status.ok() ? kExitOk : fail(status);
}

Status complete(const EngineOptions& options, std::string* program, std::string* python,
                std::string* model, std::string* dtype, int* threads) {
  namespace fs = std::filesystem;
  std::error_code error;
  *program = fs::read_symlink("/proc/self/exe", error).string();
  *model = fs::absolute(options.model, error).lexically_normal().string();
  while (model->size() > 1 && model->back() == '/') model->pop_back();
  if (!fs::exists(*model + "/config.json", error)) {
    return {StatusCode::kNotFound,
            fmt::format("'{}' is no model: expected a folder with config.json and weights in "
                        "Hugging Face's layout",
                        *model)};
  }
  const PythonFacts facts = python_facts(options.python);
  if (facts.python.empty() || facts.vllm_version.empty() || !facts.plugin) {
    return {StatusCode::kNotFound,
            fmt::format("no Python with vLLM and the plugin was found{}; `bitdecoding doctor` says "
                        "how to get it",
                        facts.python.empty() ? "" : " (" + facts.python + " lacks them)")};
  }
  *python = facts.python;
  const CpuFacts cpu = cpu_facts();
  *dtype = !options.dtype.empty() ? options.dtype : (cpu.bf16_matrix ? "bfloat16" : "float32");
  *threads = options.threads > 0 ? options.threads : cpu.usable;
  return {};
}

}  // namespace bitdecoding::cli
