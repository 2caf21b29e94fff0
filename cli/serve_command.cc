// SPDX-License-Identifier: Apache-2.0
#include "serve_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>
#include <utility>

#include "bitdecoding/recipe.h"
#include "calibration_path.h"
#include "io/key_shift.h"
#include "io/outer_scale.h"
#include "io/suggest.h"

namespace bitdecoding::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPageTokens = "128";
constexpr const char* kShutdownSeconds = "60";
constexpr const char* kWorkerExtension = "bitdecoding_vllm.worker.WorkerExtension";

// Page format -> the --kv-cache-dtype of vLLM that carries it through the plugin.
constexpr std::array<std::pair<Format, const char*>, 5> kCarriers = {{
    {Format::kBf16, "bfloat16"},
    {Format::kFp8E4m3, "fp8_e4m3"},
    {Format::kNvfp4Rows, "nvfp4"},
    {Format::kNvfp4, "nvfp4"},
    {Format::kMxfp4, "nvfp4"},
}};

const char* carrier(Format format) {
  for (const auto& [known, dtype] : kCarriers) {
    if (known == format) return dtype;
  }
  return "auto";
}

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

bool has_flag(const std::vector<std::string>& words, std::string_view flag) {
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    return word == flag || word.compare(0, flag.size() + 1, std::string(flag) + "=") == 0;
  });
}

bool is_folder(const std::string& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

bool path_exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

std::string absolute(const std::string& path) {
  std::error_code error;
  const fs::path full = fs::absolute(path, error);
  return error ? path : full.lexically_normal().string();
}

Status check_model(const std::string& model) {
  if (is_folder(model)) {
    if (path_exists(fs::path(model) / "config.json")) return {};
    return {StatusCode::kNotFound,
            fmt::format("the folder '{}' holds no config.json; expected a model in Hugging Face's "
                        "layout",
                        model)};
  }
  const bool is_path = model[0] == '/' || model[0] == '.' || model[0] == '~';
  const bool is_name = std::count(model.begin(), model.end(), '/') == 1;
  if (!is_path && is_name) return {};
  return {StatusCode::kNotFound,
          fmt::format("there is no model folder '{}'; expected a folder with config.json, or a "
                      "name such as owner/model",
                      model)};
}

Result<Recipe> chosen_recipe(const ServeOptions& options) {
  if (options.recipe.empty()) {
    return mode_recipe(options.mode.empty() ? "bitdecoding-nvfp4" : options.mode);
  }
  Result<Recipe> recipe = read_recipe(options.recipe);  // the flags complete it
  if (!recipe.ok()) return recipe;
  if (!options.mode.empty() && options.mode != recipe.value().mode) {
    return invalid(
        fmt::format("--mode {} and the recipe '{}', of mode {}, contradict each other; "
                    "give one",
                    options.mode, options.recipe, recipe.value().mode));
  }
  return recipe;
}

// Where the key means come from: named, or lying in the model's folder. A recipe file that asks for
// them is not served without: only a mode's preset is, which the user cannot have meant to the
// letter, and with a warning.
Status choose_key_shift(const ServeOptions& options, Recipe* recipe,
                        std::vector<std::string>* notes) {
  if (!options.key_shift.empty()) {
    recipe->key_shift = true;
    recipe->key_shift_file = absolute(options.key_shift);
  }
  if (!options.calibrate.empty()) {
    recipe->calibrate_file = absolute(options.calibrate);
    notes->push_back("key means are written to " + recipe->calibrate_file +
                     "; send it some long prompts, then stop the server with Ctrl-C");
  }
  const bool wants_file = recipe->key_shift && recipe->key_shift_file.empty();
  if (wants_file && recipe->calibrate_file.empty()) {
    const std::string found = saved_calibration(options.model);
    if (!found.empty()) {
      recipe->key_shift_file = found;
      notes->push_back("key means from " + recipe->key_shift_file);
    } else if (options.recipe.empty()) {
      recipe->key_shift = recipe->value_shift = false;
      notes->push_back(fmt::format(
          "WARNING: this is not all of mode {}: there are no key and value means for this "
          "model, so both are quantized without (\"key_shift\": false, \"value_shift\": false), "
          "less "
          "accurately. `bitdecoding "
          "calibrate {}` makes them, once",
          recipe->mode, options.model));
    }
  }
  if (!recipe->key_shift || recipe->key_shift_file.empty()) return {};
  recipe->key_shift_file = absolute(recipe->key_shift_file);
  const Result<KeyShift> sidecar = load_key_shift(recipe->key_shift_file);
  if (!sidecar.ok()) return sidecar.status();
  for (const std::string& warning : sidecar.value().warnings) notes->push_back(warning);
  if (recipe->value_shift && sidecar.value().value_means.empty()) {
    notes->push_back(fmt::format(
        "WARNING: '{}' holds no value means, so values are quantized without, less accurately",
        recipe->key_shift_file));
  }
  return check_calibration(options.model, *recipe, sidecar.value());
}

Status choose_outer_scales(Recipe* recipe) {
  if (recipe->outer_scale_file.empty()) return {};
  recipe->outer_scale_file = absolute(recipe->outer_scale_file);
  return load_outer_scales(recipe->outer_scale_file).status();
}

Status check_extra(const std::vector<std::string>& extra) {
  for (const char* flag : {"--kv-cache-dtype", "--worker-extension-cls"}) {
    if (has_flag(extra, flag)) {
      return invalid(fmt::format("{} is what --mode and --recipe decide; leave it out", flag));
    }
  }
  if (has_flag(extra, "--model")) return invalid("the model is given already; leave --model out");
  return {};
}

void add_program(const ServeOptions& options, const PythonFacts& python,
                 std::vector<std::string>* argv) {
  // The CPU wheel's own `vllm` program only starts when a distribution of that name is installed.
  const fs::path command = fs::path(python.python).parent_path() / "vllm";
  if (python.python.empty()) {
    *argv = {"vllm", "serve", options.model};
  } else if (python.vllm_command && path_exists(command)) {
    *argv = {command.string(), "serve", options.model};
  } else {
    *argv = {python.python, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model};
  }
}

void add_flags(const ServeOptions& options, const char* cache_dtype, bool bf16_matrix,
               ServeCommand* command) {
  std::vector<std::string>& argv = command->argv;
  argv.insert(argv.end(), {"--kv-cache-dtype", cache_dtype});
  if (!has_flag(options.extra, "--block-size")) {
    argv.insert(argv.end(), {"--block-size", kPageTokens});
  }
  argv.insert(argv.end(), {"--worker-extension-cls", kWorkerExtension});
  if (!bf16_matrix && !has_flag(options.extra, "--dtype")) {
    argv.insert(argv.end(), {"--dtype", "float32"});
    command->notes.push_back(
        "this processor has no BF16 matrix instructions, so the model computes in float32 (--dtype "
        "float32); the KV cache keeps its format");
  }
  // A worker that is killed at once, or while a busy machine keeps it from ending, cannot write its
  // means. Both clocks matter: the engine's, and the one it gives its workers.
  if (!options.calibrate.empty()) {
    command->environment.emplace_back("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", kShutdownSeconds);
    if (!has_flag(options.extra, "--shutdown-timeout")) {
      argv.insert(argv.end(), {"--shutdown-timeout", kShutdownSeconds});
    }
  }
  argv.insert(argv.end(), options.extra.begin(), options.extra.end());
}

std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,/:@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string text(1, '\'');
  for (const char c : word) {
    if (c == '\'') {
      text += "'\\''";
    } else {
      text += c;
    }
  }
  text += '\'';
  return text;
}

}  // namespace

std::vector<std::string> served_modes() {
  std::vector<std::string> modes;
  for (const std::string& mode : mode_names()) {
    if (mode_recipe(mode).ok()) modes.push_back(mode);
  }
  modes.emplace_back(kStockMode);
  return modes;
}

Result<ServeCommand> make_serve_command(const ServeOptions& options, const PythonFacts& python,
                                        bool bf16_matrix) {
  if (options.model.empty()) return invalid("the model is empty");
  if (Status s = check_model(options.model); !s.ok()) return s;
  if (Status s = check_extra(options.extra); !s.ok()) return s;
  ServeCommand command;
  add_program(options, python, &command.argv);
  if (options.mode == kStockMode) {
    if (!options.recipe.empty() || !options.key_shift.empty() || !options.calibrate.empty()) {
      return invalid(
          "mode 'stock' is vLLM's own cache and takes no recipe, key means or "
          "calibration; leave them out or choose another mode");
    }
    add_flags(options, "auto", bf16_matrix, &command);
    return command;
  }
  Result<Recipe> recipe = chosen_recipe(options);
  if (!recipe.ok()) return recipe.status();
  if (Status s = choose_key_shift(options, &recipe.value(), &command.notes); !s.ok()) return s;
  if (Status s = choose_outer_scales(&recipe.value()); !s.ok()) return s;
  if (Status s = validate_recipe(recipe.value()); !s.ok()) {
    if (options.recipe.empty()) return s;
    return Status(s.code(), fmt::format("{}: {}", options.recipe, s.message()));
  }
  command.recipe_json = recipe_to_json(recipe.value(), -1);
  add_flags(options, carrier(recipe.value().format), bf16_matrix, &command);
  return command;
}

std::string shell_line(const ServeCommand& command) {
  std::string line = "env -u BITDECODING_RECIPE";
  if (!command.recipe_json.empty()) {
    line = fmt::format("BITDECODING_RECIPE={}", quoted(command.recipe_json));
  }
  for (const auto& [name, value] : command.environment) {
    line += fmt::format(" {}={}", name, quoted(value));
  }
  for (const std::string& word : command.argv) line += fmt::format(" {}", quoted(word));
  return line;
}

}  // namespace bitdecoding::cli
