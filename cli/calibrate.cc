// SPDX-License-Identifier: Apache-2.0
// calibrate: key means and tau of a model, found with the real engine.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <memory>

#include "calibrate/runner.h"
#include "commands.h"
#include "engine/folder_lock.h"
#include "engine/process.h"
#include "eval_options.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

struct Options {
  EngineOptions engine;
  eval::CalibrateOptions calibrate;
};

int run(const Options& options) {
  eval::CalibrateOptions calibrate = options.calibrate;
  if (Status s = complete(options.engine, &calibrate.program, &calibrate.python, &calibrate.model,
                          &calibrate.dtype, &calibrate.threads);
      !s.ok()) {
    return fail(s);
  }
  calibrate.start_timeout = options.engine.start_timeout;
  Result<Recipe> recipe = engine_recipe(options.engine);
  if (!recipe.ok()) return fail(recipe.status());
  calibrate.recipe = recipe.take();
  if (calibrate.out.empty()) calibrate.out = calibrate.model + "/" + kCalibrationFolder;
  calibrate.out = std::filesystem::absolute(calibrate.out).lexically_normal().string();
  eval::watch_signals();
  eval::adopt_orphans();
  eval::Progress progress(STDOUT_FILENO);
  const Result<eval::FolderLock> lock = eval::FolderLock::take(calibrate.out);
  if (!lock.ok()) return fail(lock.status());
  eval::CalibrateRunner runner(calibrate, &progress);
  const Status status = runner.run();
  return status.ok() ? kExitOk : fail(status);
}

}  // namespace

void add_calibrate(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "calibrate", "Find a model's key means and tau, on the real engine, into its folder");
  auto options = std::make_shared<Options>();
  eval::CalibrateOptions* o = &options->calibrate;
  add_engine_options(command, &options->engine);
  command
      ->add_option("--data", o->data,
                   "builtin, or a JSONL file: {\"text\": ...} or {\"messages\": [...]} a line")
      ->capture_default_str();
  command->add_option("--out", o->out, "Folder of the calibration; default: MODEL/calibration");
  command->add_option("--tokens", o->tokens, "Tokens to observe")
      ->check(CLI::Range(std::size_t{256}, std::size_t{1} << 30))
      ->capture_default_str();
  command->add_option("--prompt-tokens", o->prompt_tokens, "Longest prompt")
      ->check(CLI::Range(128, 131072))
      ->capture_default_str();
  command->add_flag("--force", o->force, "Replace a calibration that is there");
  command->add_flag("--measure-overhead", o->measure_overhead,
                    "Prefill once more without observing, and say what observing costs");
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace bitdecoding::cli
