// SPDX-License-Identifier: Apache-2.0
// Other systems' operators live in Python, so they are compared in a Python process that calls
// this library too, in turn with the peer.
#include <fcntl.h>
#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "bench_verbs.h"
#include "machine.h"

extern char** environ;

namespace bitdecoding::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kScript = "bench/peers/compare.py";

// The source tree: above the program, or above the current folder.
Result<fs::path> find_tree() {
  std::error_code error;
  for (const fs::path& start :
       {fs::read_symlink("/proc/self/exe", error), fs::current_path(error) / "."}) {
    for (fs::path folder = start.parent_path(); !folder.empty(); folder = folder.parent_path()) {
      if (fs::exists(folder / kScript, error)) return folder;
      if (folder == folder.root_path()) break;
    }
  }
  return Status(
      StatusCode::kNotFound,
      fmt::format("{} was not found above this program or the current folder; peers are "
                  "compared from a source tree only, so run it there, or with --peer none",
                  kScript));
}

std::vector<std::string> peer_command(const char* verb, const BenchOptions& o,
                                      const std::string& python, const fs::path& tree) {
  std::vector<std::string> command = {python, (tree / kScript).string(), verb};
  const auto add = [&](const char* flag, const std::string& value) {
    if (value.empty()) return;
    command.emplace_back(flag);
    command.push_back(value);
  };
  add("--peer", o.peer);
  add("--peer-dtype", o.peer_dtype);
  if (o.peer_huge_pages) command.emplace_back("--peer-huge-pages");
  add("--backend", o.backend);
  add("--isa", o.isa);
  add("--q-heads", std::to_string(o.q_heads));
  add("--kv-heads", std::to_string(o.kv_heads));
  add("--head-dim", std::to_string(o.head_dim));
  add("--page-size", std::to_string(o.page_size));
  add("--context", std::to_string(o.context));
  add("--tokens", std::to_string(o.tokens));
  add("--batch", std::to_string(o.batch));
  add("--threads", std::to_string(o.threads));
  add("--mode", o.mode);
  add("--recipe", o.recipe);
  add("--arithmetic", o.arithmetic);
  add("--dtype", o.dtype);
  add("--seconds", fmt::format("{}", o.seconds));
  add("--repeat", std::to_string(o.repeat));
  return command;
}

Result<std::string> read_output(std::vector<std::string> command) {
  std::array<int, 2> pipe_ends{};
  if (pipe2(pipe_ends.data(), O_CLOEXEC) != 0) {
    return Status(StatusCode::kIo, fmt::format("no pipe to the peers: {}", std::strerror(errno)));
  }
  std::vector<char*> arguments;
  arguments.reserve(command.size() + 1);
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pipe_ends[1], STDOUT_FILENO);
  pid_t child = 0;
  const int failed =
      posix_spawn(&child, arguments[0], &actions, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pipe_ends[1]);
  std::string text;
  std::array<char, 4096> chunk{};
  for (ssize_t got = 0;
       failed == 0 && (got = read(pipe_ends[0], chunk.data(), chunk.size())) != 0;) {
    if (got > 0) text.append(chunk.data(), static_cast<std::size_t>(got));
    if (got < 0 && errno != EINTR) break;
  }
  close(pipe_ends[0]);
  if (failed != 0) {
    return Status(StatusCode::kNotFound,
                  fmt::format("{} could not be started ({}); make the environment with "
                              "tools/setup/venv.sh, or name its Python with --python",
                              command[0], std::strerror(failed)));
  }
  int state = 0;
  waitpid(child, &state, 0);
  if (WIFSIGNALED(state)) {
    return Status(
        StatusCode::kIo,
        fmt::format("{} was ended by a signal ({}): an operator of the peer crashed, or memory "
                    "ran out; --peer none measures this library alone",
                    command[1], strsignal(WTERMSIG(state))));
  }
  if (!WIFEXITED(state) || WEXITSTATUS(state) != 0) {
    return Status(StatusCode::kIo,
                  fmt::format("{} failed; its own message stands above", command[1]));
  }
  return text;
}

}  // namespace

Status add_peers(const char* verb, const BenchOptions& options, Json* row) {
  if (options.peer == "none") return {};
  Result<fs::path> tree = find_tree();
  if (!tree.ok()) return tree.status();
  const std::string python = python_facts(options.python).python;
  if (python.empty()) {
    return {StatusCode::kNotFound,
            "no Python was found for the peers; make the environment with tools/setup/venv.sh, or "
            "name one with --python"};
  }
  Result<std::string> text = read_output(peer_command(verb, options, python, tree.value()));
  if (!text.ok()) return text.status();
  // The last line is the result; what a peer prints while it loads stands before it.
  std::string_view last = text.value();
  while (!last.empty() && last.back() == '\n') last.remove_suffix(1);
  last.remove_prefix(last.rfind('\n') == std::string_view::npos ? 0 : last.rfind('\n') + 1);
  Json peers = Json::parse(last, nullptr, false);
  if (!peers.is_array() || peers.empty()) {
    return {StatusCode::kInternal, fmt::format("{} printed no list of peers", kScript)};
  }
  (*row)["peer"] = peers[0];
  (*row)["ratio"] = peers[0]["ratio"];
  (*row)["peers"] = peers;
  return {};
}

}  // namespace bitdecoding::cli
