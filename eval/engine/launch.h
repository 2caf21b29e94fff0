// How a server of one KV mode is started. What a mode means to vLLM is written down once, in the
// plugin; here it is asked for, and the flags that all modes share are added.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/status.h"
#include "engine/process.h"

namespace bitdecoding::eval {

struct ServeSettings {
  std::string venv;   // the Python environment's folder
  std::string model;  // a Hugging Face folder
  std::string dtype = "float32";
  std::int64_t cache_bytes = std::int64_t{1} << 30;
  std::size_t max_model_len = 8192;
  std::size_t chunk_tokens = 128;
  int max_requests = 8;
  int threads = 1;
};

// The flags and the environment that every mode gets.
std::vector<std::string> shared_flags(const ServeSettings& settings, int port);
std::map<std::string, std::string> shared_environment(const ServeSettings& settings);

// `recipe_changes` is an object of recipe keys, empty for none. `scratch` is a file for the
// plugin's answer.
Result<Command> serve_command(const ServeSettings& settings, const std::string& mode,
                              const nlohmann::json& recipe_changes, int port,
                              const std::string& scratch);

}  // namespace bitdecoding::eval
