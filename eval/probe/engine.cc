// SPDX-License-Identifier: Apache-2.0
#include "probe/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "engine/port.h"
#include "io/file.h"
#include "score/logits_file.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

// A capture of a large vocabulary is scored on fewer positions, the last ones.
constexpr std::size_t kMostCaptureBytes = std::size_t{1} << 30;

}  // namespace

ProbeEngine::~ProbeEngine() {
  if (server_ != nullptr) server_->stop();
  std::error_code error;
  for (const char* name : {"exact.bin", "exact.bin.json", "probed.bin", "probed.bin.json"}) {
    fs::remove(path(name), error);
  }
}

Status ProbeEngine::read_model() {
  const Result<std::string> text = read_file(options_.model + "/config.json", 16 << 20);
  if (!text.ok()) return text.status();
  Json config = Json::parse(text.value(), nullptr, false);
  if (config.is_object() && config.contains("text_config")) config = Json(config["text_config"]);
  if (!config.is_object() || !config.contains("num_hidden_layers") ||
      !config.contains("vocab_size")) {
    return {
        StatusCode::kCorrupt,
        fmt::format("'{}/config.json' has no num_hidden_layers and vocab_size", options_.model)};
  }
  num_layers_ = config.value("num_hidden_layers", 0);
  const std::size_t row = config.value("vocab_size", std::size_t{1}) * sizeof(float);
  const std::size_t rows =
      std::max<std::size_t>(64, kMostCaptureBytes / std::max<std::size_t>(row, 1));
  first_ = std::max(options_.first_scored,
                    options_.tokens > rows ? options_.tokens - rows : std::size_t{0});
  return {};
}

Status ProbeEngine::start_server() {
  ServeSettings settings;
  settings.program = options_.program;
  settings.python = options_.python;
  settings.model = options_.model;
  settings.dtype = options_.dtype;
  settings.cache_bytes = options_.cache_bytes;
  settings.chunk_tokens = options_.chunk_tokens;
  settings.max_model_len = options_.tokens + 64;
  settings.max_requests = 1;
  settings.threads = options_.threads;
  settings.prefix_caching = false;  // a probe sees a sequence from its beginning or not at all
  const Result<int> port = free_loopback_port();
  if (!port.ok()) return port.status();
  const Result<Command> command =
      serve_command(settings, "bf16", {}, port.value(), path("launch.log"));
  if (!command.ok()) return command.status();
  progress_->begin("starting the engine (bf16)");
  Result<std::unique_ptr<Server>> server =
      Server::start("bf16", command.value(), port.value(), path("server.log"));
  if (!server.ok()) return server.status();
  server_ = server.take();
  Status ready =
      server_->wait_ready(std::chrono::seconds(options_.start_timeout),
                          [&](double, const std::string& line) { progress_->update(line); });
  if (!ready.ok()) return ready;
  progress_->done(fmt::format("ready on port {}", port.value()));
  client_.emplace(port.value(), options_.model);
  return {};
}

Status ProbeEngine::make_prompt() {
  const Result<std::string> text = read_file(options_.text, std::int64_t{64} << 20);
  if (!text.ok()) return text.status();
  Result<Tokens> tokens = client_->tokenize(text.value(), true);
  if (!tokens.ok()) return tokens.status();
  prompt_ = tokens.take();
  if (prompt_.size() < options_.tokens) {
    return {StatusCode::kInvalidArgument,
            fmt::format("the text '{}' has {} tokens, and {} are wanted; name a longer one with "
                        "--text, or ask for fewer with --tokens",
                        options_.text, prompt_.size(), options_.tokens)};
  }
  prompt_.resize(options_.tokens);
  return {};
}

Status ProbeEngine::capture(const std::string& file) {
  const Result<Json> begun = client_->collective_rpc("bitdecoding_capture_logits",
                                                     {file, "float32", std::to_string(first_)});
  if (!begun.ok()) return begun.status();
  CompletionRequest request;
  request.prompt = prompt_;
  request.max_tokens = 1;
  request.prompt_logprobs = 0;
  const Result<Completion> reply = client_->complete(request);
  const Result<Json> ended = client_->collective_rpc("bitdecoding_capture_logits", {""});
  if (interrupted()) return {StatusCode::kIo, "interrupted"};
  if (!reply.ok()) {
    return server_->running() ? reply.status() : Status(StatusCode::kIo, server_->explain_end());
  }
  return ended.ok() ? Status() : ended.status();
}

Status ProbeEngine::start() {
  std::error_code error;
  fs::create_directories(options_.scratch, error);
  if (Status s = read_model(); !s.ok()) return s;
  if (Status s = start_server(); !s.ok()) return s;
  if (Status s = make_prompt(); !s.ok()) return s;
  progress_->begin("logits of bf16");
  if (Status s = capture(path("exact.bin")); !s.ok()) return s;
  progress_->done(fmt::format("{} tokens, scored from position {} on", prompt_.size(), first_));
  return {};
}

Result<ProbeResult> ProbeEngine::measure(const std::string& recipe_json,
                                         const std::string& layers) {
  const Result<Json> set = client_->collective_rpc("bitdecoding_probe", {recipe_json, layers});
  if (!set.ok()) return set.status();
  ProbeResult out;
  const auto begin = std::chrono::steady_clock::now();
  if (Status s = capture(path("probed.bin")); !s.ok()) return s;
  out.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const Result<Json> told = client_->collective_rpc("bitdecoding_probe_report", {});
  if (!told.ok()) return told.status();
  const Json results = told.value().value("results", Json::array());
  if (!results.empty()) out.probe = results[0];
  const Result<LogitsFile> exact = LogitsFile::open(path("exact.bin"));
  if (!exact.ok()) return exact.status();
  const Result<LogitsFile> probed = LogitsFile::open(path("probed.bin"));
  if (!probed.ok()) return probed.status();
  Result<Divergence> divergence =
      compare_logits(exact.value(), probed.value(), first_, options_.threads);
  if (!divergence.ok()) return divergence.status();
  out.divergence = divergence.take();
  return out;
}

}  // namespace bitdecoding::eval
