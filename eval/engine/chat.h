// SPDX-License-Identifier: Apache-2.0
// Streamed chat completions of any OpenAI-compatible server, and what can go wrong with one.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bitdecoding/status.h"
#include "engine/endpoint.h"

namespace httplib {
class Client;
}

namespace bitdecoding::eval {

enum class ChatProblem {
  kNone,
  kTooLong,      // prompt and reply do not fit into the model's window
  kRefused,      // another 4xx: it will not change its mind
  kServerError,  // 5xx, or an error in the middle of a stream
  kUnreachable,  // nothing answers
  kGarbage,      // an answer that is no stream of completions
  kCut,          // the stream ended before its end
  kHung,         // nothing came for longer than the time-out
  kStopped,      // by `ChatClient::stop`
};

struct ChatReply {
  std::string text;  // with a thinking part that the server split off before it, in <think>
  std::string finish_reason;
  std::size_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  double first_token = 0.0, latency = 0.0;  // seconds since the request was sent
  std::vector<double> arrivals;             // of every event with text, seconds since then
};

struct ChatOutcome {
  ChatProblem problem = ChatProblem::kNone;
  std::string sentence;  // of the problem
  ChatReply reply;       // as far as it came
};

// Another attempt may go better.
bool worth_a_retry(ChatProblem problem);

// All functions may be called from several threads.
class ChatClient {
 public:
  ChatClient(Endpoint endpoint, std::string model, std::chrono::seconds silence)
      : endpoint_(std::move(endpoint)), model_(std::move(model)), silence_(silence) {}

  // `fields`: "messages" (or "prompt" for a plain completion), "max_tokens", sampling.
  ChatOutcome ask(const nlohmann::json& fields);
  // Tokens of the conversation with the chat template; nothing where the server cannot say.
  std::optional<std::size_t> count_tokens(const nlohmann::json& messages) const;
  Result<std::vector<int>> tokenize(const std::string& text) const;
  Result<std::string> get(const std::string& path) const;
  // The served models' ids, and the longest sequence where the server says it (0: it does not).
  Result<std::vector<std::string>> models(std::size_t* window) const;
  bool healthy() const;
  // Ends all requests that run, and all that come.
  void stop();

  void set_model(std::string model) { model_ = std::move(model); }
  const std::string& model() const { return model_; }
  const Endpoint& endpoint() const { return endpoint_; }

 private:
  std::unique_ptr<httplib::Client> connect() const;
  std::optional<nlohmann::json> post(const std::string& path, const nlohmann::json& body) const;

  Endpoint endpoint_;
  std::string model_;
  std::chrono::seconds silence_;
  std::mutex mutex_;
  std::set<httplib::Client*> running_;
  bool stopped_ = false;
};

}  // namespace bitdecoding::eval
