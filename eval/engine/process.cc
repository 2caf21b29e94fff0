// SPDX-License-Identifier: Apache-2.0
#include "engine/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <pthread.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <thread>

extern char** environ;

namespace bitdecoding::eval {
namespace {

std::atomic<bool> was_interrupted{false};
std::atomic<bool> must_stop{false};

// The groups that run now; the signal thread needs them.
std::mutex groups_mutex;
std::set<pid_t> groups;

struct ProcessId {
  pid_t pid;
  unsigned long long start_time;
};

struct ProcessLine {
  pid_t parent = 0;
  char state = '?';
  unsigned long long start_time = 0;
};

// /proc/PID/stat: the name may hold spaces and brackets, so fields are counted from the last ')'.
bool read_process(pid_t pid, ProcessLine* out) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return false;
  const std::size_t end = line.rfind(')');
  if (end == std::string::npos) return false;
  std::istringstream fields(line.substr(end + 1));
  fields >> out->state >> out->parent;
  std::string skipped;
  for (int field = 5; field <= 21; ++field) fields >> skipped;
  return static_cast<bool>(fields >> out->start_time);
}

std::vector<ProcessId> descendants_of(pid_t root) {
  std::map<pid_t, ProcessLine> all;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const pid_t pid = static_cast<pid_t>(std::strtol(name.c_str(), nullptr, 10));
    ProcessLine line;
    if (read_process(pid, &line)) all.emplace(pid, line);
  }
  std::vector<ProcessId> found;
  std::set<pid_t> tree{root};
  for (bool grew = true; grew;) {
    grew = false;
    for (const auto& [pid, line] : all) {
      if (tree.count(pid) != 0 || tree.count(line.parent) == 0) continue;
      tree.insert(pid);
      found.push_back({pid, line.start_time});
      grew = true;
    }
  }
  return found;
}

bool alive(const ProcessId& id) {
  ProcessLine line;
  return read_process(id.pid, &line) && line.start_time == id.start_time && line.state != 'Z';
}

void signal_all(pid_t group, const std::vector<ProcessId>& others, int signal_number) {
  kill(-group, signal_number);
  for (const ProcessId& id : others) {
    if (alive(id)) kill(id.pid, signal_number);
  }
}

bool group_exists(pid_t group) { return kill(-group, 0) == 0 || errno == EPERM; }

void signal_groups(int signal_number) {
  const std::lock_guard<std::mutex> lock(groups_mutex);
  for (const pid_t group : groups) kill(-group, signal_number);
}

// What the child runs between fork and exec: async-signal-safe calls only.
[[noreturn]] void become(char* const* argv, char* const* environment, int log, int error_pipe,
                         pid_t parent) {
  setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  // If this program is killed outright, the server must not live on.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  const int empty = open("/dev/null", O_RDONLY);
  if (empty >= 0) dup2(empty, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execvpe(argv[0], argv, environment);
  const int error = errno;
  if (write(error_pipe, &error, sizeof(error)) < 0) _exit(126);
  _exit(127);
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& changes) {
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (changes.count(std::string(text.substr(0, text.find('=')))) == 0) out.emplace_back(text);
  }
  for (const auto& [name, value] : changes) {
    if (!value.empty()) out.push_back(fmt::format("{}={}", name, value));
  }
  return out;
}

std::vector<char*> pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  out.reserve(strings.size() + 1);
  for (std::string& text : strings) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

std::string describe_end(int status) {
  if (WIFEXITED(status)) return fmt::format("exit status {}", WEXITSTATUS(status));
  const int number = WTERMSIG(status);
  return fmt::format("signal {} ({})", number, strsignal(number));
}

std::string quoted(const std::string& word) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string out = "'";
  for (const char c : word) {
    if (c == '\'') {
      out += "'\\''";
    } else {
      out += c;
    }
  }
  return out + "'";
}

}  // namespace

std::string shell_line(const Command& command) {
  std::string out;
  for (const auto& [name, value] : command.environment) out += name + "=" + quoted(value) + " ";
  for (const std::string& word : command.argv) out += quoted(word) + " ";
  if (!out.empty()) out.pop_back();
  return out;
}

Result<std::unique_ptr<ChildProcess>> ChildProcess::start(const Command& command,
                                                          const std::string& log_path) {
  if (command.argv.empty()) {
    return Status(StatusCode::kInvalidArgument, "The command to start has no words.");
  }
  const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (log < 0) {
    return Status(StatusCode::kIo,
                  fmt::format("Cannot write the log {}: {}.", log_path, std::strerror(errno)));
  }
  int error_pipe[2];
  if (pipe2(error_pipe, O_CLOEXEC) != 0) {
    close(log);
    return Status(StatusCode::kIo, fmt::format("Cannot make a pipe: {}.", std::strerror(errno)));
  }
  std::vector<std::string> words = command.argv;
  std::vector<std::string> settings = merged_environment(command.environment);
  const std::vector<char*> argv = pointers(words);
  const std::vector<char*> environment = pointers(settings);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) become(argv.data(), environment.data(), log, error_pipe[1], parent);
  const int fork_error = errno;
  close(log);
  close(error_pipe[1]);
  int exec_error = 0;
  const bool failed = pid > 0 && read(error_pipe[0], &exec_error, sizeof(exec_error)) > 0;
  close(error_pipe[0]);
  if (pid < 0) {
    return Status(StatusCode::kIo,
                  fmt::format("Cannot start a process: {}.", std::strerror(fork_error)));
  }
  if (failed) {
    waitpid(pid, nullptr, 0);
    return Status(StatusCode::kNotFound,
                  fmt::format("Cannot run {}: {}.", words[0], std::strerror(exec_error)));
  }
  setpgid(pid,
          pid);  // whichever of parent and child comes first; the other's call fails harmlessly
  {
    const std::lock_guard<std::mutex> lock(groups_mutex);
    groups.insert(pid);
  }
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid));
}

ChildProcess::~ChildProcess() { stop(std::chrono::seconds(8)); }

bool ChildProcess::running() {
  if (reaped_) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) == pid_) {
    reaped_ = true;
    ended_ = describe_end(status);
  }
  return !reaped_;
}

void ChildProcess::stop(std::chrono::milliseconds grace) {
  if (stopped_) return;
  stopped_ = true;
  const std::vector<ProcessId> others = descendants_of(pid_);
  const auto any_left = [&] {
    running();
    while (waitpid(-pid_, nullptr, WNOHANG) > 0) {
    }
    return group_exists(pid_) || std::any_of(others.begin(), others.end(), alive);
  };
  using Clock = std::chrono::steady_clock;
  const auto wait_until = [&](Clock::time_point end) {
    while (any_left() && Clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return !any_left();
  };
  if (any_left()) {
    signal_all(pid_, others, SIGTERM);
    if (!wait_until(Clock::now() + grace)) {
      signal_all(pid_, others, SIGKILL);
      wait_until(Clock::now() + std::chrono::seconds(10));
    }
  }
  const std::lock_guard<std::mutex> lock(groups_mutex);
  groups.erase(pid_);
}

void adopt_orphans() { prctl(PR_SET_CHILD_SUBREAPER, 1); }

bool interrupted() { return was_interrupted.load(); }

bool stop_now() { return must_stop.load(); }

namespace {

void watch(std::chrono::seconds patience, bool gently) {
  sigset_t watched;
  sigemptyset(&watched);
  sigaddset(&watched, SIGINT);
  sigaddset(&watched, SIGTERM);
  sigaddset(&watched, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &watched, nullptr);
  signal(SIGPIPE, SIG_IGN);
  std::thread([watched, patience, gently] {
    int number = 0;
    while (sigwait(&watched, &number) != 0) {
    }
    was_interrupted = true;
    if (gently) {
      while (sigwait(&watched, &number) != 0) {
      }
    }
    must_stop = true;
    signal_groups(SIGTERM);
    // A server that waits for a worker that is gone already would keep a request, and with it this
    // program, waiting for ever.
    const timespec limit{static_cast<time_t>(patience.count()), 0};
    while (sigtimedwait(&watched, nullptr, &limit) < 0 && errno == EINTR) {
    }
    for (;;) {
      signal_groups(SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
  }).detach();
}

}  // namespace

void watch_signals(std::chrono::seconds patience) { watch(patience, false); }

void watch_signals_gently(std::chrono::seconds patience) { watch(patience, true); }

}  // namespace bitdecoding::eval
