// SPDX-License-Identifier: Apache-2.0
#include "bitdecoding/recipe.h"

#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.h"
#include "io/key_shift.h"
#include "io/outer_scale.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

struct Options {
  std::string mode;
  std::string file;
  std::string either;
  std::vector<std::string> parts;
  bool json = false;
};

int print_mode(const Options& options) {
  const Result<Recipe> recipe = mode_recipe(options.mode);
  if (!recipe.ok()) return fail(recipe.status());
  print(recipe_to_json(recipe.value()) + "\n");
  if (recipe.value().key_shift) {
    print_note(
        "Set key_shift_file to the calibrated key means of your model, or \"key_shift\": false.");
  }
  return kExitOk;
}

// The files that a recipe names are part of what is checked.
Status check_files(const Recipe& recipe) {
  if (!recipe.outer_scale_file.empty()) {
    if (Status s = load_outer_scales(recipe.outer_scale_file).status(); !s.ok()) return s;
  }
  if (!recipe.key_shift || recipe.key_shift_file.empty()) return {};
  const Result<KeyShift> sidecar = load_key_shift(recipe.key_shift_file);
  if (!sidecar.ok()) return sidecar.status();
  for (const std::string& warning : sidecar.value().warnings) print_note(warning);
  return {};
}

int check_file(const Options& options) {
  const Result<Recipe> recipe = load_recipe(options.file);
  Status status = recipe.status();
  if (status.ok()) status = check_files(recipe.value());
  if (options.json) {
    nlohmann::ordered_json object = {{"ok", status.ok()}};
    if (status.ok()) {
      object["recipe"] = nlohmann::ordered_json::parse(recipe_to_json(recipe.value()));
    } else {
      object["error"] = status.message();
    }
    print(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
    return static_cast<int>(status.code());
  }
  if (!status.ok()) return fail(status);
  print(fmt::format("{}: {}\n", options.file, styled(Style::kGood, "good")));
  return kExitOk;
}

int explain(const Options& options) {
  Result<Recipe> recipe = mode_recipe(options.either);
  // A name that is no mode is a file's; the error about a near-miss of a mode is worth more than
  // one about a file that does not exist.
  if (recipe.status().code() == StatusCode::kInvalidArgument) {
    Result<Recipe> loaded = load_recipe(options.either);
    if (loaded.ok() || loaded.status().code() != StatusCode::kNotFound) recipe = loaded;
  }
  if (!recipe.ok()) return fail(recipe.status());
  print(explain_recipe(recipe.value()));
  return kExitOk;
}

// The ranks of a tensor-parallel model write FILE.headsA-B each; a recipe names one file.
int join_key_shift_files(const Options& options) {
  std::vector<KeyShift> parts;
  for (const std::string& path : options.parts) {
    Result<KeyShift> part = load_key_shift(path);
    if (!part.ok()) return fail(part.status());
    parts.push_back(part.take());
  }
  const Result<KeyShift> joined = join_key_shift(parts);
  if (!joined.ok()) return fail(joined.status());
  const KeyShift& whole = joined.value();
  if (Status s = save_key_shift(whole, options.file); !s.ok()) return fail(s);
  print(fmt::format("{}: key means of {} layers, {} KV heads, head_dim {}, from {} files\n",
                    options.file, whole.num_layers, whole.num_kv_heads, whole.head_dim,
                    parts.size()));
  return kExitOk;
}

}  // namespace

void add_recipe(CLI::App& app, int* exit_code) {
  CLI::App* command =
      app.add_subcommand("recipe", "Print, check or explain a KV mode's choices; join key means");
  command->require_subcommand(1);
  auto options = std::make_shared<Options>();

  CLI::App* print_command = command->add_subcommand("print", "Print a mode's preset as JSON");
  print_command->add_option("MODE", options->mode, "A KV mode, such as bitdecoding-nvfp4")
      ->required();
  print_command->callback([options, exit_code] { *exit_code = print_mode(*options); });

  CLI::App* check = command->add_subcommand("check", "Check a recipe file and its sidecar");
  check->add_option("FILE", options->file, "A recipe in JSON")->required();
  check->add_flag("--json", options->json, "Print one JSON object");
  check->callback([options, exit_code] { *exit_code = check_file(*options); });

  CLI::App* explain_command =
      command->add_subcommand("explain", "Say what every key of a mode or file does");
  explain_command->add_option("MODE_OR_FILE", options->either, "A KV mode or a recipe file")
      ->required();
  explain_command->callback([options, exit_code] { *exit_code = explain(*options); });

  CLI::App* join = command->add_subcommand(
      "join-key-shift", "Join the key means that the ranks of a tensor-parallel model wrote");
  join->add_option("OUT", options->file, "The sidecar to write")->required();
  join->add_option("PARTS", options->parts, "The ranks' files, OUT.headsA-B")->required();
  join->callback([options, exit_code] { *exit_code = join_key_shift_files(*options); });
}

}  // namespace bitdecoding::cli
