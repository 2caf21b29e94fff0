// SPDX-License-Identifier: Apache-2.0
// The two kinds of engine: a server of our own, one a mode, and one that is there already.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "engine/launch.h"
#include "engine/server.h"
#include "run/host.h"

namespace bitdecoding::eval {

// What the log and the metrics of a server say about its cache: "kv_cache_dtype", "attention",
// "engine_line", "capacity_tokens", "pages", "backend", "bytes_per_token_head". What is not said is
// absent.
nlohmann::json facts_in_log(const std::string& log);
nlohmann::json facts_in_metrics(const std::string& metrics);

class LocalHost : public EngineHost {
 public:
  struct Options {
    ServeSettings serve;
    std::string mode;
    CacheChoice cache;
    std::string log_folder;
    std::chrono::seconds start_timeout{600};
    std::function<void(double, const std::string&)> progress;  // while it starts
  };
  explicit LocalHost(Options options) : options_(std::move(options)) {}

  // The command, found out without starting anything; its recipe decides what the mode is.
  Result<Command> command();
  Result<Endpoint> up() override;
  bool running() override { return server_ != nullptr && server_->running(); }
  std::string explain_end() override;
  void down() override;
  bool can_restart() const override { return true; }
  nlohmann::json facts() override;
  int port() const { return port_; }

 private:
  Options options_;
  std::unique_ptr<Server> server_;
  Command command_;
  int port_ = 0;
  int starts_ = 0;
};

class RemoteHost : public EngineHost {
 public:
  explicit RemoteHost(Endpoint endpoint) : endpoint_(std::move(endpoint)) {}
  Result<Endpoint> up() override;
  bool running() override;
  std::string explain_end() override;
  void down() override {}
  bool can_restart() const override { return false; }
  nlohmann::json facts() override;

 private:
  Endpoint endpoint_;
};

}  // namespace bitdecoding::eval
