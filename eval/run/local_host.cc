// SPDX-License-Identifier: Apache-2.0
#include "run/local_host.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/chat.h"
#include "engine/port.h"
#include "engine/server_log.h"

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

// What stands between position `at` of `before` and the next of `ends`.
std::string said_at(const std::string& text, std::size_t at, const std::string& before,
                    const char* ends) {
  if (at == std::string::npos) return "";
  const std::size_t begin = at + before.size();
  const std::size_t end = text.find_first_of(ends, begin);
  return text.substr(begin, end == std::string::npos ? end : end - begin);
}

// Where `before` stands last, and where it stands first.
std::string said(const std::string& text, const std::string& before, const char* ends) {
  return said_at(text, text.rfind(before), before, ends);
}
std::string first_said(const std::string& text, const std::string& before, const char* ends) {
  return said_at(text, text.find(before), before, ends);
}

void put(Json* facts, const char* name, const std::string& value) {
  if (!value.empty()) (*facts)[name] = value;
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream out;
  out << file.rdbuf();
  return out.str();
}

Json ask_facts(const Endpoint& endpoint) {
  const ChatClient client(endpoint, "", std::chrono::seconds(20));
  Json facts = Json::object();
  if (const Result<std::string> version = client.get("/version"); version.ok()) {
    const Json answer = Json::parse(version.value(), nullptr, false);
    if (answer.is_object()) put(&facts, "engine_version", answer.value("version", ""));
  }
  if (const Result<std::string> metrics = client.get("/metrics"); metrics.ok()) {
    facts.update(facts_in_metrics(metrics.value()));
  }
  return facts;
}

}  // namespace

Json facts_in_log(const std::string& log) {
  Json facts = Json::object();
  put(&facts, "kv_cache_dtype", said(log, "kv_cache_dtype=", ", \n"));
  put(&facts, "attention", said(log, "Using AttentionBackendEnum.", " \n"));
  if (const auto tokens = capacity_in_log(log)) facts["capacity_tokens"] = *tokens;
  // The plugin's own line: "bitdecoding VERSION: mode M, pages P, backend B, ..., N bytes a token
  // and KV head, ...".
  std::string line;
  std::istringstream lines(log);
  for (std::string one; std::getline(lines, one);) {
    if (one.find(" bytes a token and KV head") != std::string::npos) line = one;
  }
  const std::size_t begin = line.find("bitdecoding ");
  if (begin == std::string::npos) return facts;
  line.erase(0, begin);
  facts["engine_line"] = line;
  put(&facts, "mode", first_said(line, "mode ", ","));
  put(&facts, "pages", first_said(line, "pages ", ","));
  put(&facts, "backend", first_said(line, "backend ", ","));
  const std::size_t bytes = line.find(" bytes a token and KV head");
  const std::size_t comma = line.rfind(", ", bytes);
  if (comma != std::string::npos) {
    facts["bytes_per_token_head"] = std::strtod(line.c_str() + comma + 2, nullptr);
  }
  return facts;
}

Json facts_in_metrics(const std::string& metrics) {
  Json facts = Json::object();
  for (const MetricSample& sample : parse_metrics(metrics)) {
    if (sample.name != "vllm:cache_config_info") continue;
    for (const char* label :
         {"cache_dtype", "block_size", "num_gpu_blocks", "enable_prefix_caching"}) {
      const auto at = sample.labels.find(label);
      if (at != sample.labels.end()) facts[label] = at->second;
    }
  }
  return facts;
}

Result<Command> LocalHost::command() {
  std::error_code error;
  std::filesystem::create_directories(options_.log_folder, error);
  if (port_ == 0) {
    const Result<int> port = free_loopback_port();
    if (!port.ok()) return port.status();
    port_ = port.value();
  }
  return serve_command(options_.serve, options_.mode, options_.cache, port_,
                       fmt::format("{}/{}.launch.log", options_.log_folder, options_.mode));
}

Result<Endpoint> LocalHost::up() {
  if (running()) return loopback(port_);
  server_.reset();
  port_ = 0;
  Result<Command> made = command();
  if (!made.ok()) return made.status();
  command_ = made.take();
  ++starts_;
  const std::string log =
      starts_ == 1 ? fmt::format("{}/{}.log", options_.log_folder, options_.mode)
                   : fmt::format("{}/{}.{}.log", options_.log_folder, options_.mode, starts_);
  Result<std::unique_ptr<Server>> server = Server::start(options_.mode, command_, port_, log);
  if (!server.ok()) return server.status();
  server_ = server.take();
  if (Status s = server_->wait_ready(options_.start_timeout, options_.progress); !s.ok()) return s;
  // Asked for is not resolved: another mode's numbers under this one's name would be worse than
  // none.
  const Json found = facts_in_log(content(log));
  const std::string mode = found.value("mode", options_.mode);
  if (mode == options_.mode) return loopback(port_);
  return Status(StatusCode::kInternal,
                fmt::format("The server was asked for mode {}, but says that it runs {}; its log "
                            "is {}.",
                            options_.mode, mode, log));
}

std::string LocalHost::explain_end() {
  return server_ == nullptr ? fmt::format("The {} server is not there.", options_.mode)
                            : server_->explain_end();
}

void LocalHost::down() {
  if (server_ != nullptr) server_->stop();
}

Json LocalHost::facts() {
  if (server_ == nullptr) return Json::object();
  Json facts = facts_in_log(content(server_->log_path()));
  facts.update(ask_facts(loopback(port_)));
  facts["command"] = shell_line(command_);
  facts["log"] = server_->log_path();
  facts["starts"] = starts_;
  facts["seconds_to_ready"] = server_->seconds_to_ready();
  return facts;
}

Result<Endpoint> RemoteHost::up() {
  std::size_t window = 0;
  const ChatClient client(endpoint_, "", std::chrono::seconds(20));
  const Result<std::vector<std::string>> models = client.models(&window);
  if (!models.ok()) return models.status();
  return endpoint_;
}

bool RemoteHost::running() { return ChatClient(endpoint_, "", std::chrono::seconds(20)).healthy(); }

std::string RemoteHost::explain_end() {
  return fmt::format("The server at {} does not answer any more.", endpoint_.base);
}

Json RemoteHost::facts() {
  Json facts = ask_facts(endpoint_);
  facts["endpoint"] = endpoint_.base + endpoint_.prefix;
  return facts;
}

}  // namespace bitdecoding::eval
