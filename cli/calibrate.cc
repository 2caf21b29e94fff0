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
#include "io/file.h"
#include "output.h"
#include "probe/layers.h"

namespace bitdecoding::cli {
namespace {

struct Options {
  EngineOptions engine;
  eval::CalibrateOptions calibrate;
  bool report = false;
  std::string text = "/usr/share/common-licenses/GPL-3";
  std::size_t report_tokens = 2048;
};

// report.html and report.json beside the sidecar.
Status report(const Options& options, const eval::CalibrateOptions& calibrate,
              const std::string& sidecar, eval::Progress* progress) {
  Recipe recipe = calibrate.recipe;
  recipe.key_shift_file = recipe.key_shift ? sidecar : "";
  eval::ProbeOptions probe;
  probe.program = calibrate.program;
  probe.python = calibrate.python;
  probe.model = calibrate.model;
  // In BF16 every change of an activation is some thousandths of a nat, more than a layer's FP4.
  probe.dtype = options.engine.dtype.empty() ? "float32" : options.engine.dtype;
  probe.threads = calibrate.threads;
  probe.start_timeout = calibrate.start_timeout;
  probe.text = options.text;
  probe.tokens = options.report_tokens;
  probe.scratch = calibrate.out + "/report";
  eval::ProbeEngine engine(probe, progress);
  if (Status s = engine.start(); !s.ok()) return s;
  Result<eval::SensitivityReport> found =
      eval::measure_layers(&engine, recipe_to_json(recipe, -1), progress);
  if (!found.ok()) return found.status();
  found.value().model = std::filesystem::path(calibrate.model).filename().string();
  found.value().text = options.text;
  for (const auto& [name, content] :
       {std::pair("/report.html", eval::sensitivity_page(found.value())),
        std::pair("/report.json", eval::sensitivity_json(found.value()).dump(2) + "\n")}) {
    if (Status s = write_file_atomic(calibrate.out + name, content); !s.ok()) return s;
  }
  progress->say(fmt::format("Layers and heads: {}/report.html", calibrate.out));
  return {};
}

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
  if (Status s = runner.run(); !s.ok()) return ended(s, /*goes_on=*/true);
  if (!options.report) return kExitOk;
  return ended(report(options, calibrate, runner.sidecar_path(), &progress), /*goes_on=*/true);
}

}  // namespace

void add_calibrate(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "calibrate",
      "Find a model's means of keys and values and tau, on the real engine, into its folder");
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
  command->add_flag("--report", options->report,
                    "Also measure every layer and head, and one layer at a time in FP4: "
                    "report.html and report.json beside the calibration");
  command->add_option("--report-text", options->text, "The text that the report is measured on")
      ->capture_default_str();
  command->add_option("--report-tokens", options->report_tokens, "Tokens of it")
      ->check(CLI::Range(512, 131072))
      ->capture_default_str();
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace bitdecoding::cli
