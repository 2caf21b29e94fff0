// SPDX-License-Identifier: Apache-2.0
// How a server of one KV mode is started. What a mode means to vLLM is written down in the program
// `bitdecoding serve`; here it is asked for, and the flags that all modes share are passed on.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "bitdecoding/status.h"
#include "engine/process.h"

namespace bitdecoding::eval {

struct ServeSettings {
  std::string program;  // bitdecoding
  std::string python;   // the interpreter that has vLLM and the plugin
  std::string model;    // a Hugging Face folder
  std::string dtype = "float32";
  std::int64_t cache_bytes = std::int64_t{1} << 30;
  std::size_t max_model_len = 8192;
  std::size_t chunk_tokens = 128;
  int max_requests = 8;
  bool prefix_caching = true;
  int threads = 1;
};

// What a mode gets beyond its preset; all are paths, empty for none.
struct CacheChoice {
  std::string use;      // key means to subtract
  std::string observe;  // where to write the means of the keys that are served
  std::string recipe;   // a recipe file instead of the mode's preset
};

// The flags and the environment that every mode gets.
std::vector<std::string> shared_flags(const ServeSettings& settings, int port);
std::map<std::string, std::string> shared_environment(const ServeSettings& settings);

// The command in the JSON that `bitdecoding serve --dry-run --json` prints.
Result<Command> parse_serve_command(const std::string& json);

// `scratch` is a file for the program's answer.
Result<Command> serve_command(const ServeSettings& settings, const std::string& mode,
                              const CacheChoice& means, int port, const std::string& scratch);

}  // namespace bitdecoding::eval
