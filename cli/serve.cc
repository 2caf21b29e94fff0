// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <system_error>

#include "commands.h"
#include "output.h"
#include "serve_command.h"

namespace bitdecoding::cli {
namespace {

Status check_python(const ServeOptions& options, const PythonFacts& python) {
  if (python.python.empty()) {
    return {StatusCode::kNotFound,
            fmt::format("no Python was found{}; `bitdecoding doctor` says how to get it",
                        options.python.empty() ? "" : " at '" + options.python + "'")};
  }
  if (python.vllm_version.empty()) {
    return {StatusCode::kNotFound,
            fmt::format("vLLM is not installed for {}; `bitdecoding doctor` says how to get it",
                        python.python)};
  }
  if (!python.plugin) {
    return {StatusCode::kNotFound,
            fmt::format("the plugin bitdecoding-vllm is not installed for {}; `bitdecoding doctor` "
                        "says how to get it",
                        python.python)};
  }
  return {};
}

void print_json(const ServeCommand& command) {
  nlohmann::ordered_json environment = {
      {"BITDECODING_RECIPE", command.recipe_json.empty()
                                 ? nlohmann::ordered_json(nullptr)
                                 : nlohmann::ordered_json(command.recipe_json)}};
  for (const auto& [name, value] : command.environment) environment[name] = value;
  const nlohmann::ordered_json object = {
      {"argv", command.argv}, {"environment", environment}, {"notes", command.notes}};
  print(object.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

// Becomes vLLM: its signals, its exit code and its output are then the terminal's own.
Status become(const ServeCommand& command) {
  if (command.recipe_json.empty()) {
    ::unsetenv("BITDECODING_RECIPE");
  } else {
    ::setenv("BITDECODING_RECIPE", command.recipe_json.c_str(), 1);
  }
  for (const auto& [name, value] : command.environment) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  std::vector<char*> argv;
  for (const std::string& word : command.argv) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  std::fflush(nullptr);
  std::signal(SIGPIPE, SIG_DFL);  // an ignored signal would be inherited
  ::execvp(argv[0], argv.data());
  const int error = errno;
  return {error == ENOENT ? StatusCode::kNotFound : StatusCode::kIo,
          fmt::format("'{}' cannot be started: {}", command.argv[0],
                      std::generic_category().message(error))};
}

int run(const ServeOptions& options) {
  const PythonFacts python = python_facts(options.python);
  // What was asked comes first: a wrong mode is wrong whatever is installed.
  const Result<ServeCommand> command = make_serve_command(options, python, cpu_facts().bf16_matrix);
  if (!command.ok()) return fail(command.status());
  if (!options.dry_run) {
    if (Status s = check_python(options, python); !s.ok()) return fail(s);
  }
  if (options.json) {
    print_json(command.value());
  } else {
    for (const std::string& note : command.value().notes) print_note("note: " + note);
    print(styled(Style::kStrong, shell_line(command.value())) + "\n");
  }
  if (options.dry_run) return kExitOk;
  return fail(become(command.value()));
}

}  // namespace

void add_serve(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "serve", "Start `vllm serve` in a KV mode; further flags of vLLM follow after --");
  auto options = std::make_shared<ServeOptions>();
  command->add_option("MODEL", options->model, "A folder with config.json, or owner/name")
      ->required();
  command->add_option("--mode", options->mode,
                      fmt::format("{} (default: the recipe's, or bitdecoding-nvfp4)",
                                  fmt::join(served_modes(), ", ")));
  command->add_option("--recipe", options->recipe, "A recipe file instead of the mode's preset");
  command->add_option(
      "--key-shift", options->key_shift,
      "Calibrated key means; default: those of `bitdecoding calibrate` in the model's folder");
  command->add_option("--calibrate", options->calibrate,
                      "Observe keys while serving and write their means to this file");
  command->add_option("--python", options->python, "The Python that has vLLM and the plugin");
  command->add_flag("--dry-run", options->dry_run, "Print the command and do not start it");
  command->add_flag("--json", options->json, "Print the command as one JSON object");
  command->add_option("VLLM_FLAGS", options->extra, "After --: passed on to vLLM");
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace bitdecoding::cli
