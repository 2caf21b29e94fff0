// SPDX-License-Identifier: Apache-2.0
// The engine of one mode, as the runner sees it: up, or not.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "bitdecoding/status.h"
#include "engine/endpoint.h"

namespace bitdecoding::eval {

class EngineHost {
 public:
  virtual ~EngineHost() = default;
  // Starts it where it is not running and waits until it answers. An error holds the log's end.
  virtual Result<Endpoint> up() = 0;
  virtual bool running() = 0;
  // Why it is not running.
  virtual std::string explain_end() = 0;
  virtual void down() = 0;
  // Whether `up` after an end starts another one.
  virtual bool can_restart() const = 0;
  // What was resolved, read back from it: backend, cache dtype, bytes a token, capacity, version.
  virtual nlohmann::json facts() = 0;
};

}  // namespace bitdecoding::eval
