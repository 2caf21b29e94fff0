// SPDX-License-Identifier: Apache-2.0
// Shell completion, made from the program's own options, so that it cannot fall behind them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <memory>
#include <string>
#include <vector>

#include "bitdecoding/recipe.h"
#include "commands.h"
#include "io/suggest.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

std::vector<const CLI::App*> children(const CLI::App* app) {
  return app->get_subcommands([](const CLI::App*) { return true; });
}

// Subcommands and long flags.
std::vector<std::string> words_of(const CLI::App* app) {
  std::vector<std::string> words;
  for (const CLI::App* child : children(app)) words.push_back(child->get_name());
  for (const CLI::Option* option : app->get_options()) {
    for (const std::string& name : option->get_lnames()) words.push_back(fmt::format("--{}", name));
  }
  return words;
}

void bash_cases(const CLI::App* app, const std::string& path, std::string* text) {
  *text += fmt::format("    '{}') words='{}' ;;\n", path, fmt::join(words_of(app), " "));
  for (const CLI::App* child : children(app)) {
    bash_cases(child, path.empty() ? child->get_name() : path + " " + child->get_name(), text);
  }
}

void bash_paths(const CLI::App* app, const std::string& path, std::vector<std::string>* paths) {
  for (const CLI::App* child : children(app)) {
    const std::string next = path.empty() ? child->get_name() : path + " " + child->get_name();
    paths->push_back(fmt::format("'{}'", next));
    bash_paths(child, next, paths);
  }
}

std::string bash_script(const CLI::App* app) {
  std::vector<std::string> paths;
  bash_paths(app, "", &paths);
  std::string cases;
  bash_cases(app, "", &cases);
  std::string text = "_bitdecoding() {\n";
  text += "  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}\n";
  text += "  local path='' next words='' i\n";
  text += "  for ((i = 1; i < COMP_CWORD; i++)); do\n";
  text += "    next=${path:+$path }${COMP_WORDS[i]}\n";
  text += fmt::format("    case $next in {}) path=$next ;; esac\n", fmt::join(paths, "|"));
  text += "  done\n";
  text += "  case $path in\n" + cases + "  esac\n";
  text += fmt::format("  case $prev in --mode|print|explain) words='{}' ;; esac\n",
                      fmt::join(mode_names(), " "));
  text += "  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\"))\n";
  text += "  [[ ${#COMPREPLY[@]} -gt 0 ]] || COMPREPLY=($(compgen -f -- \"$cur\"))\n";
  text += "}\ncomplete -o filenames -F _bitdecoding bitdecoding\n";
  return text;
}

std::string fish_quoted(const std::string& text) {
  std::string quoted(1, '\'');
  for (const char c : text) {
    if (c == '\'' || c == '\\') quoted += '\\';
    quoted += c;
  }
  quoted += '\'';
  return quoted;
}

void fish_lines(const CLI::App* app, const std::string& condition, std::string* text) {
  for (const CLI::App* child : children(app)) {
    *text += fmt::format("complete -c bitdecoding -n {} -f -a {} -d {}\n", fish_quoted(condition),
                         child->get_name(), fish_quoted(child->get_description()));
    fish_lines(child, "__fish_seen_subcommand_from " + child->get_name(), text);
  }
  for (const CLI::Option* option : app->get_options()) {
    for (const std::string& name : option->get_lnames()) {
      *text += fmt::format(
          "complete -c bitdecoding -n {} -l {}{} -d {}\n", fish_quoted(condition), name,
          name == "mode" ? " -x -a " + fish_quoted(fmt::format("{}", fmt::join(mode_names(), " ")))
                         : std::string(),
          fish_quoted(option->get_description()));
    }
  }
}

int run(const CLI::App* app, const std::string& shell) {
  if (shell == "bash") {
    print(bash_script(app));
  } else if (shell == "zsh") {
    print("autoload -U +X bashcompinit && bashcompinit\n" + bash_script(app));
  } else if (shell == "fish") {
    std::string text;
    fish_lines(app, "__fish_use_subcommand", &text);
    print(text);
  } else {
    return fail_usage(
        fmt::format("there is no completion for the shell '{}'; expected bash, zsh "
                    "or fish{}",
                    shell, did_you_mean(shell, {"bash", "zsh", "fish"})));
  }
  return kExitOk;
}

}  // namespace

void add_completion(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "completion", "Print shell completion; e.g. source <(bitdecoding completion bash)");
  auto shell = std::make_shared<std::string>();
  command->add_option("SHELL", *shell, "bash, zsh or fish")->required();
  const CLI::App* root = &app;
  command->callback([root, shell, exit_code] { *exit_code = run(root, *shell); });
}

}  // namespace bitdecoding::cli
