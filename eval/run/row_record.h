// SPDX-License-Identifier: Apache-2.0
// What is kept of one (benchmark, row, repeat) in one mode. docs/evaluation.md has the fields.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

struct RowRecord {
  std::string key;  // of all that decides the reply; see row_key
  std::string mode, benchmark, row;
  int repeat = 0;
  std::uint64_t seed = 0;
  std::string prompt_hash;
  std::map<std::string, std::string> labels;

  // The reply.
  std::size_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  std::size_t max_tokens = 0;
  std::string finish_reason;
  bool truncated = false;  // the budget ended the reply, not the model
  std::string reply;
  double latency = 0.0, first_token = 0.0;  // seconds
  std::string time;                         // UTC

  // Of these at most one says something: the engine failed, or the prompt does not fit.
  std::string error, skipped;

  // The score; of rows with a reply.
  double score = 0.0;
  bool missing = false;  // no score can be given; not the model's fault
  std::string why, extracted;
  nlohmann::json detail;

  bool answered() const { return error.empty() && skipped.empty(); }
  bool scored() const { return answered() && !missing; }
};

nlohmann::json to_json(const RowRecord& record);
// Nothing when a field is absent or of another type.
std::optional<RowRecord> row_record(const nlohmann::json& line);

// Sampling as it is sent, with the seed and the budget.
nlohmann::json sampling_json(const Sampling& sampling, std::uint64_t seed, std::size_t max_tokens);
std::string prompt_hash(const std::vector<ChatMessage>& messages);
// `engine`: what model and mode are, to the last setting that changes a reply.
std::string row_key(const std::string& prompt_hash, const nlohmann::json& sampling,
                    const std::string& engine, int repeat);
// The same in every mode; below 2^31, which every server takes.
std::uint64_t row_seed(std::uint64_t seed, const std::string& benchmark, const std::string& row,
                       int repeat);

}  // namespace bitdecoding::eval
