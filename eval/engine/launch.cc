// SPDX-License-Identifier: Apache-2.0
#include "engine/launch.h"

#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

namespace bitdecoding::eval {
namespace {

// Runs a short command to its end; its output is what the file then holds.
Result<std::string> run_and_read(const Command& command, const std::string& scratch) {
  Result<std::unique_ptr<ChildProcess>> started = ChildProcess::start(command, scratch);
  if (!started.ok()) return started.status();
  const std::unique_ptr<ChildProcess> process = started.take();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (process->running() && std::chrono::steady_clock::now() < end && !interrupted()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const bool ended = !process->running();
  process->stop(std::chrono::seconds(2));
  std::ifstream file(scratch);
  std::stringstream content;
  content << file.rdbuf();
  if (ended && process->how_it_ended() == "exit status 0") return content.str();
  return Status(StatusCode::kInvalidArgument, fmt::format("{} failed ({}): {}", shell_line(command),
                                                          process->how_it_ended(), content.str()));
}

}  // namespace

std::vector<std::string> shared_flags(const ServeSettings& settings, int port) {
  std::vector<std::string> flags = {"--host",
                                    "127.0.0.1",
                                    "--port",
                                    std::to_string(port),
                                    "--dtype",
                                    settings.dtype,
                                    "--max-model-len",
                                    std::to_string(settings.max_model_len),
                                    "--max-num-batched-tokens",
                                    std::to_string(settings.chunk_tokens),
                                    "--max-num-seqs",
                                    std::to_string(settings.max_requests),
                                    "--kv-cache-memory-bytes",
                                    std::to_string(settings.cache_bytes),
                                    "--enforce-eager",
                                    "--distributed-executor-backend",
                                    "uni",
                                    "--enable-prompt-tokens-details"};
  if (!settings.prefix_caching) flags.emplace_back("--no-enable-prefix-caching");
  return flags;
}

std::map<std::string, std::string> shared_environment(const ServeSettings& settings) {
  // vLLM would keep one core for its front end and bind the worker to the others; the front end is
  // idle while the worker computes, so all cores compute and nothing spins. A worker in a process
  // of its own would make the engine poll for its answers, on a core that the worker needs, and
  // take another 10 s to start: "uni" and this variable keep it in the engine's process.
  return {{"VLLM_ENABLE_V1_MULTIPROCESSING", "0"},
          {"VLLM_SERVER_DEV_MODE", "1"},
          {"VLLM_NO_USAGE_STATS", "1"},
          {"HF_HUB_OFFLINE", "1"},
          {"VLLM_CPU_OMP_THREADS_BIND", "nobind"},
          {"VLLM_CPU_NUM_OF_RESERVED_CPU", "0"},
          {"OMP_NUM_THREADS", std::to_string(settings.threads)},
          {"OMP_WAIT_POLICY", "passive"},
          {"PYTHONUNBUFFERED", "1"}};
}

Result<Command> parse_serve_command(const std::string& json) {
  const nlohmann::json answer = nlohmann::json::parse(json, nullptr, false);
  const Status bad(StatusCode::kCorrupt,
                   fmt::format("`bitdecoding serve --dry-run --json` printed no command, but: {}",
                               json.substr(0, 2000)));
  if (!answer.is_object() || !answer.contains("argv") || !answer.contains("environment") ||
      !answer["environment"].is_object()) {
    return bad;
  }
  Command command;
  try {
    command.argv = answer["argv"].get<std::vector<std::string>>();
    for (const auto& [name, value] : answer["environment"].items()) {
      // null takes the variable away, as an empty value does here.
      command.environment[name] = value.is_null() ? "" : value.get<std::string>();
    }
  } catch (const nlohmann::json::exception&) {
    return bad;
  }
  if (command.argv.empty()) return bad;
  return command;
}

Result<Command> serve_command(const ServeSettings& settings, const std::string& mode,
                              const CacheChoice& means, int port, const std::string& scratch) {
  Command ask;
  ask.argv = {settings.program, "serve",    settings.model, "--dry-run",
              "--json",         "--python", settings.python};
  if (!mode.empty()) ask.argv.insert(ask.argv.end(), {"--mode", mode});
  if (!means.use.empty()) ask.argv.insert(ask.argv.end(), {"--key-shift", means.use});
  if (!means.observe.empty()) ask.argv.insert(ask.argv.end(), {"--calibrate", means.observe});
  if (!means.recipe.empty()) ask.argv.insert(ask.argv.end(), {"--recipe", means.recipe});
  ask.argv.emplace_back("--");
  const std::vector<std::string> flags = shared_flags(settings, port);
  ask.argv.insert(ask.argv.end(), flags.begin(), flags.end());
  const Result<std::string> answer = run_and_read(ask, scratch);
  if (!answer.ok()) return answer.status();
  Result<Command> command = parse_serve_command(answer.value());
  if (command.ok()) command.value().environment.merge(shared_environment(settings));
  return command;
}

}  // namespace bitdecoding::eval
