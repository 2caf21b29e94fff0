// SPDX-License-Identifier: Apache-2.0
// The program `bitdecoding`: finds the subcommand and turns mistakes into sentences.
#include <fmt/format.h>

#include <csignal>
#include <exception>
#include <string>
#include <vector>

#include "commands.h"
#include "io/suggest.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

constexpr const char* kFooter =
    "\nExit codes: 0 done; 1 invalid argument; 2 out of range; 3 unsupported; 4 not found; 5 "
    "corrupt;\n6 input or output; 7 out of resources; 8 a defect of the program; 64 wrong "
    "usage;\n130 interrupted.\n"
    "Colours are used on a terminal only, and never with NO_COLOR set.";

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

void add_flags(const CLI::App& app, std::vector<std::string>* flags) {
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames())
      flags->push_back(fmt::format("--{}", name));
  }
}

// The chosen subcommand, and its chosen subcommand, and so on.
const CLI::App* deepest(const CLI::App* app) {
  while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
  return app;
}

// "bench decode", or the program's own name.
std::string path_of(const CLI::App& app) {
  std::string path;
  for (const CLI::App* command = &app; !command->get_subcommands().empty();) {
    command = command->get_subcommands().front();
    path += (path.empty() ? "" : " ") + command->get_name();
  }
  return path.empty() ? app.get_name() : path;
}

// CLI11 says "The following argument was not expected"; this says which one was meant.
std::string explain(const CLI::App& app, const CLI::ParseError& error,
                    const std::vector<std::string>& arguments) {
  const CLI::App* command = deepest(&app);
  std::vector<std::string> flags = {"--help"};
  add_flags(*command, &flags);
  const std::vector<std::string> names = subcommand_names(*command);
  for (const std::string& argument : arguments) {
    if (argument == "--") break;
    const std::string flag = argument.substr(0, argument.find('='));
    const bool is_flag = flag.size() > 2 && flag.compare(0, 2, "--") == 0;
    bool known = !is_flag;
    for (const std::string& name : flags) known = known || name == flag;
    if (known) continue;
    return fmt::format("{} has no option '{}'{}", path_of(app), flag, did_you_mean(flag, flags));
  }
  const bool needs_subcommand = !names.empty();
  if (needs_subcommand) {
    for (const std::string& argument : arguments) {
      if (argument.empty() || argument[0] == '-' || argument == command->get_name()) continue;
      return fmt::format("{} has no subcommand '{}'; expected {}{}", path_of(app), argument,
                         join_or(names), did_you_mean(argument, names));
    }
    return fmt::format("{} needs a subcommand: {}", path_of(app), join_or(names));
  }
  return fmt::format("{}: {}", path_of(app), error.what());
}

int run(int argc, char** argv) {
  CLI::App app("NVFP4 KV caches: what this machine can do, serving, pages, recipes", "bitdecoding");
  app.footer(kFooter);
  app.require_subcommand(1);
  app.set_help_all_flag("--help-all", "Print the help of all subcommands");
  int exit_code = kExitOk;
  for (const AddCommand add : commands()) add(app, &exit_code);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& success) {
    return finish(app.exit(success));
  } catch (const CLI::ParseError& error) {
    const int code = fail_usage(explain(app, error, arguments));
    const std::string path = deepest(&app) == &app ? "" : " " + path_of(app);
    print_note(fmt::format("See `bitdecoding{} --help`.", path));
    return code;
  }
  return finish(exit_code);
}

}  // namespace
}  // namespace bitdecoding::cli

int main(int argc, char** argv) {
  // A closed pipe is an error of output, found when it is flushed.
  std::signal(SIGPIPE, SIG_IGN);
  try {
    return bitdecoding::cli::run(argc, argv);
  } catch (const std::exception& error) {
    return bitdecoding::cli::fail({bitdecoding::StatusCode::kInternal, error.what()});
  }
}
