// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/lcb/sandbox.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>

#include "benchmarks/lcb/seccomp.h"
#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kErrorBytes = 4096;
constexpr unsigned kCloseOnExec = 4;  // CLOSE_RANGE_CLOEXEC, of Linux 5.11

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
  int get() const { return fd_; }
  void reset() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

Status refused(const std::string& why) {
  return {StatusCode::kUnsupported,
          fmt::format("Programs that a model wrote are only run in a sandbox, and none can be set "
                      "up here: {}",
                      why)};
}

// Text as a file in memory, at its beginning.
Fd memory_file(const std::string& text) {
  Fd fd(memfd_create("case", MFD_CLOEXEC));
  std::size_t done = 0;
  while (fd.get() >= 0 && done < text.size()) {
    const ssize_t n = write(fd.get(), text.data() + done, text.size() - done);
    if (n <= 0) return Fd();
    done += static_cast<std::size_t>(n);
  }
  if (fd.get() >= 0) lseek(fd.get(), 0, SEEK_SET);
  return fd;
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0 ? name : "";
  const char* path = std::getenv("PATH");
  std::string_view rest = path == nullptr ? "/usr/bin:/bin" : path;
  while (!rest.empty()) {
    const std::size_t end = std::min(rest.find(':'), rest.size());
    const fs::path candidate = fs::path(rest.substr(0, end)) / name;
    if (access(candidate.c_str(), X_OK) == 0) return candidate.string();
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return "";
}

// What a trusted program prints, by the shell's way of quoting.
std::string printed(const std::string& program, const std::string& arguments) {
  std::string quoted;
  for (const char c : program) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  const std::string line = fmt::format("'{}' {} 2>/dev/null", quoted, arguments);
  std::FILE* pipe = popen(line.c_str(), "r");  // NOLINT(cert-env33-c): our own interpreter
  if (pipe == nullptr) return "";
  std::string out;
  char buffer[4096];
  for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
    out.append(buffer, n);
  }
  return pclose(pipe) == 0 ? out : "";
}

void limit(int what, std::size_t value) {
  const rlimit bound{value, value};
  setrlimit(static_cast<__rlimit_resource>(what), &bound);
}

// Between fork and exec: only calls that are safe there.
[[noreturn]] void become(const char* const* argv, int input, int output, int errors,
                         const std::vector<int>& kept, const SandboxLimits& limits) {
  setpgid(0, 0);
  dup2(input, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(errors, STDERR_FILENO);
  // Nothing else that this process has open goes on into the sandbox.
  if (syscall(SYS_close_range, 3U, ~0U, kCloseOnExec) != 0) _exit(126);
  for (const int fd : kept) fcntl(fd, F_SETFD, 0);
  limit(RLIMIT_AS, limits.memory);
  limit(RLIMIT_CPU, static_cast<std::size_t>(limits.time.count() / 1000 + 2));
  limit(RLIMIT_FSIZE, limits.disk);
  limit(RLIMIT_CORE, 0);
  limit(RLIMIT_NOFILE, 256);
  execv(argv[0], const_cast<char* const*>(argv));
  _exit(127);
}

// Reads both pipes until they close, the time is over or there is too much.
SandboxEnd collect(int output, int errors, const SandboxLimits& limits, SandboxRun& run) {
  const auto end = Clock::now() + limits.time;
  pollfd polled[2] = {{output, POLLIN, 0}, {errors, POLLIN, 0}};
  char buffer[65536];
  while (polled[0].fd >= 0 || polled[1].fd >= 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    if (left.count() <= 0) return SandboxEnd::kTime;
    if (poll(polled, 2, static_cast<int>(left.count())) < 0 && errno != EINTR) break;
    for (pollfd& each : polled) {
      if (each.fd < 0 || each.revents == 0) continue;
      const ssize_t n = read(each.fd, buffer, sizeof buffer);
      if (n <= 0) {
        each.fd = -1;
        continue;
      }
      std::string& into = each.fd == output ? run.output : run.errors;
      into.append(buffer, static_cast<std::size_t>(n));
      if (run.output.size() > limits.output) return SandboxEnd::kOutput;
      if (run.errors.size() > 2 * kErrorBytes) run.errors.erase(0, run.errors.size() - kErrorBytes);
    }
  }
  return SandboxEnd::kExited;
}

// Ends what is left and says how it ended.
void finish(pid_t child, SandboxRun& run, const SandboxLimits& limits) {
  int status = 0;
  const auto end = Clock::now() + limits.time;
  if (run.end == SandboxEnd::kExited) {
    // It has closed its output; it may still run.
    while (waitpid(child, &status, WNOHANG) == 0) {
      if (Clock::now() > end) {
        run.end = SandboxEnd::kTime;
        break;
      }
      usleep(500);
    }
  }
  if (run.end == SandboxEnd::kTime || run.end == SandboxEnd::kOutput) {
    kill(-child, SIGKILL);
    waitpid(child, &status, 0);
    return;
  }
  run.code = WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status);
  if (WIFSIGNALED(status)) run.end = SandboxEnd::kSignalled;
  // bubblewrap gives on a signal as a shell does.
  if (WIFEXITED(status) && run.code > 128) {
    run.end = SandboxEnd::kSignalled;
    run.code -= 128;
  }
}

// The folders that hold the interpreter and its packages, less those of the system.
std::vector<std::string> prefixes(const std::string& listed) {
  std::vector<std::string> out;
  std::size_t begin = 0;
  for (std::size_t end = listed.find('\n'); end != std::string::npos;
       end = listed.find('\n', begin)) {
    const std::string folder = listed.substr(begin, end - begin);
    begin = end + 1;
    const bool system = folder == "/usr" || folder.starts_with("/usr/");
    if (!system && folder.size() > 1 && std::find(out.begin(), out.end(), folder) == out.end()) {
      out.push_back(folder);
    }
  }
  return out;
}

std::string reason_of(const SandboxRun& run) {
  const std::string said = run.errors.substr(0, run.errors.find_last_not_of(" \n") + 1);
  const bool namespaces = said.find("namespace") != std::string::npos ||
                          said.find("uid map") != std::string::npos ||
                          said.find("ermitted") != std::string::npos;
  std::string out =
      fmt::format("bubblewrap says '{}'.", said.empty() ? "nothing" : valid_utf8(said));
  if (namespaces) {
    out +=
        " User namespaces are switched off here: on the machine set sysctl "
        "kernel.unprivileged_userns_clone=1 (Ubuntu 24.04: "
        "kernel.apparmor_restrict_unprivileged_userns=0); a container needs to be started with "
        "--security-opt seccomp=unconfined, or as privileged.";
  }
  return out;
}

}  // namespace

Result<Sandbox> Sandbox::make(const std::string& python) {
  static std::mutex mutex;
  static std::map<std::string, Result<Sandbox>> known;
  Sandbox out;
  out.bwrap_ = find_program("bwrap");
  if (out.bwrap_.empty()) {
    return refused("bubblewrap is not installed. Install it: apt-get install bubblewrap.");
  }
  const std::string program = find_program(python.empty() ? "python3" : python);
  if (program.empty()) {
    return refused(fmt::format("there is no Python '{}'.", python.empty() ? "python3" : python));
  }
  if (seccomp_filter().empty())
    return refused("no system call filter is written for this processor.");
  const std::lock_guard lock(mutex);
  const std::string key = out.bwrap_ + '\n' + program;
  if (const auto it = known.find(key); it != known.end()) return it->second;
  const std::string listed =
      printed(program,
              "-I -c 'import sys; print(sys.executable, sys.prefix, sys.base_prefix, "
              "sep=\"\\n\")'");
  const std::size_t first = listed.find('\n');
  if (first == std::string::npos) return refused(fmt::format("'{}' does not run.", program));
  out.interpreter_ = listed.substr(0, first);
  out.read_only_ = prefixes(listed.substr(first + 1));
  SandboxLimits limits;
  limits.time = std::chrono::seconds(20);
  const Result<SandboxRun> run = out.run({"-c", "print(open('/case/hello').read() + input())"},
                                         {{"hello", "a"}}, "b\n", limits);
  Result<Sandbox> result = out;
  if (!run.ok()) {
    result = run.status();
  } else if (run.value().output != "ab\n") {
    result = refused(reason_of(run.value()));
  }
  known.emplace(key, result);
  return result;
}

std::vector<std::string> Sandbox::command_line(const std::vector<std::string>& arguments,
                                               const std::vector<File>& files,
                                               const SandboxLimits& limits,
                                               const Keep& keep) const {
  std::vector<std::string> line = {bwrap_,
                                   "--unshare-all",
                                   "--die-with-parent",
                                   "--new-session",
                                   "--cap-drop",
                                   "ALL",
                                   "--clearenv",
                                   "--setenv",
                                   "PATH",
                                   "/usr/bin:/bin",
                                   "--setenv",
                                   "HOME",
                                   "/tmp",
                                   "--setenv",
                                   "PYTHONHASHSEED",
                                   "0",
                                   "--uid",
                                   "65534",
                                   "--gid",
                                   "65534",
                                   "--hostname",
                                   "sandbox",
                                   "--ro-bind",
                                   "/usr",
                                   "/usr",
                                   "--symlink",
                                   "usr/bin",
                                   "/bin",
                                   "--symlink",
                                   "usr/lib",
                                   "/lib",
                                   "--ro-bind-try",
                                   "/usr/lib64",
                                   "/lib64",
                                   "--proc",
                                   "/proc",
                                   "--dev",
                                   "/dev",
                                   "--remount-ro",
                                   "/dev",
                                   "--size",
                                   std::to_string(limits.disk),
                                   "--tmpfs",
                                   "/tmp"};
  for (const std::string& folder : read_only_)
    line.insert(line.end(), {"--ro-bind", folder, folder});
  for (const File& file : files) {
    line.insert(line.end(), {"--ro-bind-data", keep(file.text), "/case/" + file.name});
  }
  line.insert(line.end(), {"--remount-ro", "/", "--chdir", "/tmp", "--seccomp",
                           keep(seccomp_filter()), "--", interpreter_, "-I", "-B"});
  line.insert(line.end(), arguments.begin(), arguments.end());
  return line;
}

Result<SandboxRun> Sandbox::run(const std::vector<std::string>& arguments,
                                const std::vector<File>& files, const std::string& input,
                                const SandboxLimits& limits) const {
  std::vector<Fd> held;
  std::vector<int> kept;
  const auto keep = [&](const std::string& text) {
    held.push_back(memory_file(text));
    kept.push_back(held.back().get());
    return std::to_string(held.back().get());
  };
  const std::vector<std::string> line = command_line(arguments, files, limits, keep);
  const Fd in = memory_file(input);
  int out_pipe[2];
  int error_pipe[2];
  if (pipe2(out_pipe, O_CLOEXEC) != 0 || pipe2(error_pipe, O_CLOEXEC) != 0 || in.get() < 0 ||
      std::find(kept.begin(), kept.end(), -1) != kept.end()) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("The sandbox cannot be fed: {}.", std::strerror(errno)));
  }
  std::vector<const char*> argv;
  argv.reserve(line.size() + 1);
  for (const std::string& word : line) argv.push_back(word.c_str());
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) become(argv.data(), in.get(), out_pipe[1], error_pipe[1], kept, limits);
  const Fd output(out_pipe[0]);
  const Fd errors(error_pipe[0]);
  close(out_pipe[1]);
  close(error_pipe[1]);
  if (child < 0) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("The sandbox cannot be started: {}.", std::strerror(errno)));
  }
  SandboxRun run;
  run.end = collect(output.get(), errors.get(), limits, run);
  finish(child, run, limits);
  if (run.errors.size() > kErrorBytes) run.errors.erase(0, run.errors.size() - kErrorBytes);
  return run;
}

}  // namespace bitdecoding::eval
