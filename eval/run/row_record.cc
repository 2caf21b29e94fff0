// SPDX-License-Identifier: Apache-2.0
#include "run/row_record.h"

#include <fmt/format.h>

#include "report/json_lines.h"

namespace bitdecoding::eval {

using Json = nlohmann::json;

Json to_json(const RowRecord& r) {
  return {{"key", r.key},
          {"mode", r.mode},
          {"benchmark", r.benchmark},
          {"row", r.row},
          {"repeat", r.repeat},
          {"seed", r.seed},
          {"prompt_hash", r.prompt_hash},
          {"labels", r.labels},
          {"prompt_tokens", r.prompt_tokens},
          {"cached_tokens", r.cached_tokens},
          {"completion_tokens", r.completion_tokens},
          {"max_tokens", r.max_tokens},
          {"finish_reason", r.finish_reason},
          {"truncated", r.truncated},
          {"reply", r.reply},
          {"latency", r.latency},
          {"first_token", r.first_token},
          {"time", r.time},
          {"error", r.error},
          {"skipped", r.skipped},
          {"score", r.score},
          {"missing", r.missing},
          {"why", r.why},
          {"extracted", r.extracted},
          {"detail", r.detail}};
}

std::optional<RowRecord> row_record(const Json& line) {
  RowRecord r;
  try {
    line.at("key").get_to(r.key);
    line.at("mode").get_to(r.mode);
    line.at("benchmark").get_to(r.benchmark);
    line.at("row").get_to(r.row);
    line.at("repeat").get_to(r.repeat);
    line.at("seed").get_to(r.seed);
    line.at("prompt_hash").get_to(r.prompt_hash);
    line.at("labels").get_to(r.labels);
    line.at("prompt_tokens").get_to(r.prompt_tokens);
    line.at("cached_tokens").get_to(r.cached_tokens);
    line.at("completion_tokens").get_to(r.completion_tokens);
    line.at("max_tokens").get_to(r.max_tokens);
    line.at("finish_reason").get_to(r.finish_reason);
    line.at("truncated").get_to(r.truncated);
    line.at("reply").get_to(r.reply);
    line.at("latency").get_to(r.latency);
    line.at("first_token").get_to(r.first_token);
    line.at("time").get_to(r.time);
    line.at("error").get_to(r.error);
    line.at("skipped").get_to(r.skipped);
    line.at("score").get_to(r.score);
    line.at("missing").get_to(r.missing);
    line.at("why").get_to(r.why);
    line.at("extracted").get_to(r.extracted);
    r.detail = line.at("detail");
  } catch (const Json::exception&) {
    return std::nullopt;
  }
  return r;
}

Json sampling_json(const Sampling& sampling, std::uint64_t seed, std::size_t max_tokens) {
  Json out = {{"temperature", sampling.temperature},
              {"top_p", sampling.top_p},
              {"seed", seed},
              {"max_tokens", max_tokens}};
  if (sampling.top_k > 0) out["top_k"] = sampling.top_k;
  if (sampling.min_p > 0.0) out["min_p"] = sampling.min_p;
  return out;
}

std::string prompt_hash(const std::vector<ChatMessage>& messages) {
  Json list = Json::array();
  for (const ChatMessage& m : messages) list.push_back({m.role, m.content});
  return stable_hash(list.dump(-1, ' ', false, Json::error_handler_t::replace));
}

std::string row_key(const std::string& prompt_hash, const Json& sampling, const std::string& engine,
                    int repeat) {
  return stable_hash(fmt::format("{}\n{}\n{}\n{}", prompt_hash, sampling.dump(), engine, repeat));
}

std::uint64_t row_seed(std::uint64_t seed, const std::string& benchmark, const std::string& row,
                       int repeat) {
  const std::string hash = stable_hash(fmt::format("{}\n{}\n{}\n{}", seed, benchmark, row, repeat));
  return std::stoull(hash, nullptr, 16) & 0x7fffffffU;
}

}  // namespace bitdecoding::eval
