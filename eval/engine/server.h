// SPDX-License-Identifier: Apache-2.0
// A vLLM server as a child process: started, waited for, stopped.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "bitdecoding/status.h"
#include "engine/process.h"

namespace bitdecoding::eval {

// The last `count` lines of a file that say something, each cut to `width` characters.
std::string log_tail(const std::string& path, int count, std::size_t width = 200);

class Server {
 public:
  // `name` is for messages. `port` must be the one that `command` makes the server listen on.
  static Result<std::unique_ptr<Server>> start(std::string name, const Command& command, int port,
                                               std::string log_path);

  // Returns once /health answers 200. `progress` is called about twice a second with the seconds
  // since the start and the log's last line. An early end, a time-out and an interruption are
  // errors that show the log's tail and name its path.
  Status wait_ready(std::chrono::seconds timeout,
                    const std::function<void(double, const std::string&)>& progress);
  void stop() { process_->stop(std::chrono::seconds(10)); }
  bool running() { return process_->running(); }
  // Why it is not running, with the log's tail; for an error after a request failed.
  std::string explain_end();

  const std::string& name() const { return name_; }
  const std::string& log_path() const { return log_path_; }
  int port() const { return port_; }
  pid_t pid() const { return process_->pid(); }
  double seconds_to_ready() const { return seconds_to_ready_; }

 private:
  Server(std::string name, std::unique_ptr<ChildProcess> process, int port, std::string log_path)
      : name_(std::move(name)),
        process_(std::move(process)),
        port_(port),
        log_path_(std::move(log_path)) {}

  std::string name_;
  std::unique_ptr<ChildProcess> process_;
  int port_;
  std::string log_path_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  double seconds_to_ready_ = 0.0;
};

}  // namespace bitdecoding::eval
