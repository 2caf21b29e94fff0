// SPDX-License-Identifier: Apache-2.0
// A client of vLLM's OpenAI-style HTTP interface on the loopback address.
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

using Json = nlohmann::json;
using Tokens = std::vector<int>;

struct CompletionRequest {
  Tokens prompt;
  int max_tokens = 16;
  bool ignore_eos = false;
  int prompt_logprobs = -1;  // -1 = none; >= 0 makes the model compute a logits row for every token
};

struct Completion {
  std::string text;
  std::string finish_reason;
  Tokens tokens;
  int prompt_tokens = 0;
  int cached_tokens = 0;
  std::vector<double> prompt_logprobs;  // of the prompt's own tokens; the first is NaN
  double seconds = 0.0;
};

// One token's arrival, in seconds on a clock that all streams of this process share.
struct StreamedToken {
  int token = 0;
  double at = 0.0;
};

class Client {
 public:
  Client(int port, std::string model) : port_(port), model_(std::move(model)) {}

  // All requests are greedy: temperature 0.
  Result<Completion> complete(const CompletionRequest& request) const;
  Result<std::vector<StreamedToken>> stream(const CompletionRequest& request) const;
  Result<Completion> chat(const std::string& question, int max_tokens) const;
  // `special`: with the tokens that the model puts before every text, if it has such.
  Result<Tokens> tokenize(const std::string& text, bool special = false) const;
  // A whole conversation in the model's chat template: [{"role", "content"}, ...].
  Result<Tokens> tokenize_messages(const Json& messages) const;
  // With the model's chat template around it, up to where the assistant begins to speak.
  Result<Tokens> tokenize_chat(const std::string& text) const;
  Result<Json> collective_rpc(const std::string& method,
                              const std::vector<std::string>& args) const;
  Result<std::string> metrics() const { return get("/metrics"); }
  // The id and longest sequence of the served model.
  Result<Json> served_model() const;

  void set_timeout(std::chrono::seconds timeout) { timeout_ = timeout; }

  // Checked for spelling; any status but 200 is an error with the server's own words.
  Result<Json> post(const std::string& path, const Json& body) const;
  Result<std::string> get(const std::string& path) const;

 private:
  int port_;
  std::string model_;
  std::chrono::seconds timeout_{900};
};

// Splits a server-sent event stream that arrives in arbitrary pieces into its data lines.
class EventSplitter {
 public:
  // `event` gets the text after "data: "; returns false once it returns false.
  bool feed(std::string_view piece, const std::function<bool(const std::string&)>& event);

 private:
  std::string pending_;
};

}  // namespace bitdecoding::eval
