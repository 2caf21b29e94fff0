// SPDX-License-Identifier: Apache-2.0
// ablate: what every element of the recipe buys on a model.
#include "probe/ablate.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "bitdecoding/recipe.h"
#include "calibration_path.h"
#include "commands.h"
#include "engine/folder_lock.h"
#include "engine/process.h"
#include "eval_options.h"
#include "io/file.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

struct Options {
  EngineOptions engine;
  eval::ProbeOptions probe;
  std::string key_shift;
  std::string out;
  std::vector<std::string> recipes;  // files
  bool only = false;
  bool fp4 = false;
};

// The table's rows, and those of the user's own recipes, which take the calibration unless they
// name another.
Result<std::vector<eval::AblationRow>> wanted_rows(const Options& options,
                                                   const std::string& means) {
  std::vector<eval::AblationRow> rows;
  if (!options.only) rows = eval::ablation_rows(means, options.fp4);
  for (const std::string& file : options.recipes) {
    Result<Recipe> recipe = read_recipe(file);
    if (!recipe.ok()) return recipe.status();
    Recipe& own = recipe.value();
    if (is_tiled(own.format) && own.key_shift_file.empty()) own.key_shift_file = means;
    if (Status s = validate_recipe(own); !s.ok()) {
      return Status(s.code(), fmt::format("{}: {}", file, s.message()));
    }
    eval::AblationRow row;
    row.group = "own";
    row.name = std::filesystem::path(file).stem().string();
    row.recipe = recipe_to_json(own, -1);
    rows.push_back(std::move(row));
  }
  if (!rows.empty()) return rows;
  return Status(StatusCode::kInvalidArgument,
                "--only-recipes measures nothing without --recipe FILE; name one");
}

int run(const Options& options) {
  eval::ProbeOptions probe = options.probe;
  if (Status s = complete(options.engine, &probe.program, &probe.python, &probe.model, &probe.dtype,
                          &probe.threads);
      !s.ok()) {
    return fail(s);
  }
  // In BF16 every change of an activation is some thousandths of a nat.
  if (options.engine.dtype.empty()) probe.dtype = "float32";
  probe.start_timeout = options.engine.start_timeout;
  const Result<std::string> means = calibration_path(options.key_shift, probe.model);
  if (!means.ok()) return fail(means.status());
  probe.scratch = options.out.empty() ? "out/ablate" : options.out;
  probe.scratch = std::filesystem::absolute(probe.scratch).lexically_normal().string();
  eval::watch_signals();
  eval::adopt_orphans();
  eval::Progress progress(STDOUT_FILENO);
  const Result<eval::FolderLock> lock = eval::FolderLock::take(probe.scratch);
  if (!lock.ok()) return fail(lock.status());
  Result<std::vector<eval::AblationRow>> wanted = wanted_rows(options, means.value());
  if (!wanted.ok()) return fail(wanted.status());
  eval::ProbeEngine engine(probe, &progress);
  if (Status s = engine.start(); !s.ok()) return ended(s, /*goes_on=*/false);
  Result<std::vector<eval::AblationRow>> rows =
      eval::run_ablation(&engine, wanted.take(), &progress);
  if (!rows.ok()) return ended(rows.status(), /*goes_on=*/false);
  progress.say(fmt::format(
      "\n{} tokens of {}, scored from position {} on, chunks of {}; key means "
      "{}\n{}",
      engine.tokens(), probe.text, engine.first_scored(), probe.chunk_tokens, means.value(),
      eval::format_table(eval::ablation_table(rows.value()), progress.style())));
  const std::string file = probe.scratch + "/ablation.json";
  const Status saved =
      write_file_atomic(file, eval::ablation_json(rows.value(), engine).dump(2) + "\n");
  if (!saved.ok()) return fail(saved);
  progress.say("Figures: " + file);
  return kExitOk;
}

}  // namespace

void add_ablate(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "ablate",
      "Every element of the recipe off on its own: divergence from bf16, bits, write time");
  auto options = std::make_shared<Options>();
  eval::ProbeOptions* o = &options->probe;
  add_engine_options(command, &options->engine, /*with_recipe=*/false);
  command->add_option("--key-shift", options->key_shift,
                      "Key means; default: the calibration in the model's folder");
  command->add_option("--text", o->text, "A long text, not among those of the calibration")
      ->capture_default_str();
  command->add_option("--tokens", o->tokens, "Tokens of it")
      ->check(CLI::Range(512, 131072))
      ->capture_default_str();
  command->add_option("--out", options->out,
                      "Folder for logs and ablation.json; default: out/ablate");
  command->add_option("--recipe", options->recipes,
                      "Recipe files to measure beside the table's rows; key means as above unless "
                      "they name a file");
  command->add_flag("--only-recipes", options->only, "Measure those and leave out the table");
  command->add_flag("--fp4", options->fp4,
                    "Also FP4 arithmetic (two-term queries, c, tau): an emulation, slow");
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace bitdecoding::cli
