// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/longbench_pro/segmenter.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>

namespace bitdecoding::eval {
namespace {

// A Python program that answers each line with a line.
class LineServer {
 public:
  LineServer(const std::string& python, const std::string& script) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
      problem_ = std::strerror(errno);
      return;
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", 1 /* O_WRONLY */, 0);
    std::string program = python;
    std::string file = script;
    char* argv[] = {program.data(), file.data(), nullptr};
    const int error = posix_spawnp(&pid_, program.c_str(), &actions, nullptr, argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    socket_ = ends[0];
    if (error != 0) {
      pid_ = -1;
      problem_ = fmt::format("'{}' cannot be started: {}", python, std::strerror(error));
      return;
    }
    const std::string hello = read_line();
    if (hello != "ready") problem_ = hello.empty() ? "it ended at once" : hello;
  }
  ~LineServer() {
    if (socket_ >= 0) close(socket_);  // its input ends, and so does it
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  LineServer(const LineServer&) = delete;
  LineServer& operator=(const LineServer&) = delete;

  const std::string& problem() const { return problem_; }

  // Empty when the process is gone.
  std::string ask(std::string line) {
    line.push_back('\n');
    for (std::size_t sent = 0; sent < line.size();) {
      const ssize_t n = send(socket_, line.data() + sent, line.size() - sent, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return "";
      sent += static_cast<std::size_t>(n);
    }
    return read_line();
  }

 private:
  std::string read_line() {
    for (;;) {
      const std::size_t end = pending_.find('\n');
      if (end != std::string::npos) {
        std::string line = pending_.substr(0, end);
        pending_.erase(0, end + 1);
        return line;
      }
      char buffer[65536];
      const ssize_t n = recv(socket_, buffer, sizeof buffer, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return "";
      pending_.append(buffer, static_cast<std::size_t>(n));
    }
  }

  pid_t pid_ = -1;
  int socket_ = -1;
  std::string pending_;
  std::string problem_;
};

}  // namespace

Result<std::vector<std::string>> Segmenter::cut(const std::string& python,
                                                const std::string& tools_folder,
                                                const std::vector<std::string>& texts) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<LineServer>> servers;
  const std::string program = python.empty() ? "python3" : python;
  const std::string folder = tools_folder.empty() ? BITDECODING_EVAL_TOOLS : tools_folder;
  const std::string script = (std::filesystem::path(folder) / "segment.py").string();
  const std::lock_guard lock(mutex);
  auto& server = servers[program + '\n' + script];
  if (!server) server = std::make_unique<LineServer>(program, script);
  if (!server->problem().empty()) {
    return Status(StatusCode::kUnsupported,
                  fmt::format("Chinese text cannot be cut into words: {}. Install jieba 0.42.1 for "
                              "'{}' (pip install jieba==0.42.1).",
                              server->problem(), program));
  }
  nlohmann::json answer =
      nlohmann::json::parse(server->ask(nlohmann::json(texts).dump()), nullptr, false);
  if (!answer.is_array() || answer.size() != texts.size()) {
    server.reset();  // the next call starts another
    return Status(StatusCode::kIo, "The process that cuts Chinese text into words has ended.");
  }
  return answer.get<std::vector<std::string>>();
}

}  // namespace bitdecoding::eval
