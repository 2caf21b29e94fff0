// SPDX-License-Identifier: Apache-2.0
#include "engine/request_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <string_view>
#include <vector>

namespace bitdecoding::eval {
namespace {

using Names = std::vector<std::string_view>;

const Names kSampling = {"model",
                         "frequency_penalty",
                         "logit_bias",
                         "logprobs",
                         "max_tokens",
                         "n",
                         "presence_penalty",
                         "seed",
                         "stop",
                         "stream",
                         "stream_options",
                         "temperature",
                         "top_p",
                         "top_k",
                         "min_p",
                         "repetition_penalty",
                         "stop_token_ids",
                         "ignore_eos",
                         "min_tokens",
                         "skip_special_tokens",
                         "bad_words",
                         "allowed_token_ids",
                         "prompt_logprobs",
                         "logprob_token_ids",
                         "request_id",
                         "priority",
                         "return_token_ids",
                         "return_tokens_as_token_ids",
                         "echo",
                         "cache_salt",
                         "add_special_tokens",
                         "include_stop_str_in_output",
                         "response_format",
                         "truncate_prompt_tokens",
                         "truncation_side"};

Names joined(Names a, const Names& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Empty for an endpoint that is not in the list.
Names known_fields(const std::string& path) {
  if (path == "/v1/completions") return joined(kSampling, {"prompt", "suffix"});
  if (path == "/v1/chat/completions") {
    return joined(kSampling,
                  {"messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt",
                   "continue_final_message", "chat_template", "chat_template_kwargs"});
  }
  if (path == "/tokenize") {
    return {"model",
            "prompt",
            "messages",
            "add_special_tokens",
            "add_generation_prompt",
            "return_token_strs",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs"};
  }
  if (path == "/detokenize") return {"model", "tokens"};
  if (path == "/collective_rpc") return {"method", "args", "kwargs", "timeout"};
  return {};
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substitution = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substitution});
    }
  }
  return row[b.size()];
}

}  // namespace

Status check_request_fields(const std::string& path, const nlohmann::json& body) {
  const Names known = known_fields(path);
  if (known.empty()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("No request goes to {}: its fields are not known here, so their spelling "
                        "cannot be checked.",
                        path)};
  }
  if (!body.is_object()) {
    return {StatusCode::kInvalidArgument,
            fmt::format("The request to {} must be a JSON object.", path)};
  }
  for (const auto& item : body.items()) {
    const std::string& field = item.key();
    if (std::find(known.begin(), known.end(), field) != known.end()) continue;
    const auto nearest = std::min_element(known.begin(), known.end(), [&](auto a, auto b) {
      return edit_distance(a, field) < edit_distance(b, field);
    });
    return {StatusCode::kInvalidArgument,
            fmt::format("The request to {} has the field '{}', which vLLM would ignore without a "
                        "word; the nearest field that it knows is '{}'.",
                        path, field, *nearest)};
  }
  return {};
}

}  // namespace bitdecoding::eval
