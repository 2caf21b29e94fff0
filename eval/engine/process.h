// SPDX-License-Identifier: Apache-2.0
// A child process in a process group of its own, and the end of everything that it started.
//
// A vLLM server is three processes (API server, engine core, worker) that do not reliably take each
// other down. So the group is what is stopped, and any descendant that left the group is followed
// by its id and start time, which together never name a stranger.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct Command {
  std::vector<std::string> argv;
  std::map<std::string, std::string> environment;  // on top of our own; an empty value unsets
};

// The command as a line that a shell would take.
std::string shell_line(const Command& command);

class ChildProcess {
 public:
  // stdout and stderr go to `log_path`, which is truncated first.
  static Result<std::unique_ptr<ChildProcess>> start(const Command& command,
                                                     const std::string& log_path);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  bool running();
  // "exit status 1", "signal 9 (Killed)"; empty while it runs.
  const std::string& how_it_ended() const { return ended_; }
  // SIGTERM to all of its processes, SIGKILL to those that are left after `grace`. Returns when
  // none is left.
  void stop(std::chrono::milliseconds grace);

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}

  pid_t pid_;
  bool reaped_ = false;
  bool stopped_ = false;
  std::string ended_;
};

// Orphans of our children become our own children, so that none survives unseen.
void adopt_orphans();

// SIGINT, SIGTERM, SIGHUP: the first signal asks every running child to end and makes
// `interrupted()` true; a second one, or `patience`, kills them. Call once, before any thread is
// started.
void watch_signals(std::chrono::seconds patience = std::chrono::seconds(8));
// The first signal only makes `interrupted()` true: what is in flight may finish. The second one
// makes `stop_now()` true, and children are ended as above.
void watch_signals_gently(std::chrono::seconds patience = std::chrono::seconds(8));
bool interrupted();
bool stop_now();

}  // namespace bitdecoding::eval
