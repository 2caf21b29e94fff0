// SPDX-License-Identifier: Apache-2.0
#include "engine/client.h"

#include <fmt/format.h>
#include <httplib.h>

#include <cmath>
#include <limits>

#include "engine/request_fields.h"
#include "engine/server_words.h"

namespace bitdecoding::eval {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Status bad_answer(const std::string& path, const std::string& what) {
  return {StatusCode::kCorrupt,
          fmt::format("The server's answer to {} {}; is it the vLLM version that the lock file "
                      "names?",
                      path, what)};
}

Status refused(const std::string& path, int status, const std::string& body) {
  return {StatusCode::kIo, fmt::format("The server refused the request to {} with status {}: {}",
                                       path, status, server_words(body))};
}

Status unreachable(const std::string& path, httplib::Error error, int port) {
  return {StatusCode::kIo,
          fmt::format("The request to {} on port {} failed: {}. The server may have "
                      "ended, or needs longer than the time-out.",
                      path, port, httplib::to_string(error))};
}

// A field of an unexpected type is an exception inside `read`, and an error outside.
template <class Read>
auto guarded(const std::string& path, const Read& read) -> decltype(read()) {
  try {
    return read();
  } catch (const Json::exception& error) {
    return bad_answer(path, fmt::format("has a field of another type ({})", error.what()));
  }
}

Json completion_body(const CompletionRequest& request, const std::string& model) {
  Json body = {
      {"model", model},     {"prompt", request.prompt},         {"max_tokens", request.max_tokens},
      {"temperature", 0.0}, {"ignore_eos", request.ignore_eos}, {"return_token_ids", true}};
  if (request.prompt_logprobs >= 0) body["prompt_logprobs"] = request.prompt_logprobs;
  return body;
}

void read_usage(const Json& answer, Completion* out) {
  const Json usage = answer.value("usage", Json::object());
  if (!usage.is_object()) return;
  out->prompt_tokens = usage.value("prompt_tokens", 0);
  const auto details = usage.find("prompt_tokens_details");
  if (details != usage.end() && details->is_object()) {
    out->cached_tokens = details->value("cached_tokens", 0);
  }
}

// [null, {"token id": {"logprob": x, ...}}, ...]: with k = 0 the map holds the true token only.
Result<std::vector<double>> read_prompt_logprobs(const Json& list, const Tokens& prompt) {
  std::vector<double> out(prompt.size(), std::numeric_limits<double>::quiet_NaN());
  if (!list.is_array() || list.size() != prompt.size()) {
    return bad_answer("/v1/completions", "has no log-probability for every prompt token");
  }
  for (std::size_t i = 1; i < prompt.size(); ++i) {
    const std::string id = std::to_string(prompt[i]);
    if (!list[i].is_object() || !list[i].contains(id)) {
      return bad_answer("/v1/completions",
                        fmt::format("lacks the log-probability of prompt token {}", i));
    }
    out[i] = list[i][id].value("logprob", out[0]);
  }
  return out;
}

Result<Completion> read_completion(const Json& answer, const CompletionRequest& request) {
  const Json choices = answer.value("choices", Json::array());
  if (choices.size() != 1 || !choices[0].contains("text")) {
    return bad_answer("/v1/completions", "has not exactly one choice with a text");
  }
  const Json& choice = choices[0];
  Completion out;
  out.text = choice["text"].get<std::string>();
  if (choice.contains("finish_reason") && choice["finish_reason"].is_string()) {
    out.finish_reason = choice["finish_reason"].get<std::string>();
  }
  if (choice.contains("token_ids") && choice["token_ids"].is_array()) {
    out.tokens = choice["token_ids"].get<Tokens>();
  }
  read_usage(answer, &out);
  if (request.prompt_logprobs >= 0) {
    Result<std::vector<double>> list =
        read_prompt_logprobs(choice.value("prompt_logprobs", Json()), request.prompt);
    if (!list.ok()) return list.status();
    out.prompt_logprobs = list.take();
  }
  return out;
}

Result<Completion> read_chat(const Json& answer) {
  const Json choices = answer.value("choices", Json::array());
  if (choices.size() != 1 || !choices[0].contains("message") ||
      !choices[0]["message"].contains("content")) {
    return bad_answer("/v1/chat/completions", "has no message");
  }
  Completion out;
  out.text = choices[0]["message"]["content"].get<std::string>();
  if (choices[0].contains("finish_reason") && choices[0]["finish_reason"].is_string()) {
    out.finish_reason = choices[0]["finish_reason"].get<std::string>();
  }
  read_usage(answer, &out);
  return out;
}

Result<Tokens> read_tokens(const Result<Json>& answer) {
  if (!answer.ok()) return answer.status();
  return guarded("/tokenize", [&]() -> Result<Tokens> {
    Tokens tokens = answer.value().value("tokens", Tokens());
    if (tokens.empty()) return bad_answer("/tokenize", "has no tokens");
    return tokens;
  });
}

// The tokens of one event of a stream, behind those that came before.
Status read_event(const std::string& data, double at, std::vector<StreamedToken>* tokens) {
  const Json event = Json::parse(data, nullptr, false);
  if (event.is_object() && event.contains("error")) return refused("/v1/completions", 200, data);
  if (!event.is_object() || !event.contains("choices") || !event["choices"].is_array()) {
    return bad_answer("/v1/completions", "has an event that is no completion");
  }
  for (const Json& choice : event["choices"]) {
    if (!choice.contains("token_ids") || !choice["token_ids"].is_array()) continue;
    for (const Json& id : choice["token_ids"]) tokens->push_back({id.get<int>(), at});
  }
  return {};
}

}  // namespace

bool EventSplitter::feed(std::string_view piece,
                         const std::function<bool(const std::string&)>& event) {
  pending_ += piece;
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = pending_.find('\n', begin)) != std::string::npos;
       begin = end + 1) {
    std::string line = pending_.substr(begin, end - begin);
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.rfind("data:", 0) != 0) continue;
    line.erase(0, line.size() > 5 && line[5] == ' ' ? 6 : 5);
    if (!event(line)) return false;
  }
  pending_.erase(0, begin);
  return true;
}

Result<Json> Client::post(const std::string& path, const Json& body) const {
  if (Status status = check_request_fields(path, body); !status.ok()) return status;
  httplib::Client http("127.0.0.1", port_);
  http.set_connection_timeout(10);
  http.set_read_timeout(timeout_.count());
  http.set_write_timeout(60);
  const httplib::Result answer = http.Post(path, body.dump(), "application/json");
  if (!answer) return unreachable(path, answer.error(), port_);
  if (answer->status != 200) return refused(path, answer->status, answer->body);
  Json parsed = Json::parse(answer->body, nullptr, false);
  if (!parsed.is_object()) return bad_answer(path, "is no JSON object");
  return parsed;
}

Result<std::string> Client::get(const std::string& path) const {
  httplib::Client http("127.0.0.1", port_);
  http.set_connection_timeout(10);
  http.set_read_timeout(60);
  const httplib::Result answer = http.Get(path);
  if (!answer) return unreachable(path, answer.error(), port_);
  if (answer->status != 200) return refused(path, answer->status, answer->body);
  return answer->body;
}

Result<Completion> Client::complete(const CompletionRequest& request) const {
  const double begin = now();
  const Result<Json> answer = post("/v1/completions", completion_body(request, model_));
  if (!answer.ok()) return answer.status();
  const double seconds = now() - begin;
  Result<Completion> out =
      guarded("/v1/completions", [&] { return read_completion(answer.value(), request); });
  if (out.ok()) out.value().seconds = seconds;
  return out;
}

Result<std::vector<StreamedToken>> Client::stream(const CompletionRequest& request) const {
  Json body = completion_body(request, model_);
  body["stream"] = true;
  if (Status status = check_request_fields("/v1/completions", body); !status.ok()) return status;
  httplib::Client http("127.0.0.1", port_);
  http.set_connection_timeout(10);
  http.set_read_timeout(timeout_.count());
  std::vector<StreamedToken> tokens;
  std::string text;  // whatever is no event: the words of a refusal
  bool done = false;
  Status failed;
  EventSplitter splitter;
  const auto on_event = [&](const std::string& data) {
    if (data == "[DONE]") return done = true;
    failed = guarded("/v1/completions", [&] { return read_event(data, now(), &tokens); });
    return failed.ok();
  };
  httplib::Request http_request;
  http_request.method = "POST";
  http_request.path = "/v1/completions";
  http_request.set_header("Content-Type", "application/json");
  http_request.body = body.dump();
  http_request.content_receiver = [&](const char* data, std::size_t size, std::uint64_t,
                                      std::uint64_t) {
    if (text.size() < 2000) text.append(data, size);
    return splitter.feed({data, size}, on_event);
  };
  const httplib::Result answer = http.send(http_request);
  if (!failed.ok()) return failed;
  if (!answer) return unreachable("/v1/completions", answer.error(), port_);
  if (answer->status != 200) {
    return refused("/v1/completions", answer->status, answer->body.empty() ? text : answer->body);
  }
  if (!done) return bad_answer("/v1/completions", "stopped before its stream was complete");
  return tokens;
}

Result<Completion> Client::chat(const std::string& question, int max_tokens) const {
  const double begin = now();
  Result<Json> answer =
      post("/v1/chat/completions",
           {{"model", model_},
            {"messages", Json::array({{{"role", "user"}, {"content", question}}})},
            {"max_tokens", max_tokens},
            {"temperature", 0.0}});
  if (!answer.ok()) return answer.status();
  const double seconds = now() - begin;
  Result<Completion> out =
      guarded("/v1/chat/completions", [&] { return read_chat(answer.value()); });
  if (out.ok()) out.value().seconds = seconds;
  return out;
}

Result<Tokens> Client::tokenize(const std::string& text, bool special) const {
  return read_tokens(
      post("/tokenize", {{"model", model_}, {"prompt", text}, {"add_special_tokens", special}}));
}

Result<Tokens> Client::tokenize_messages(const Json& messages) const {
  return read_tokens(post(
      "/tokenize", {{"model", model_}, {"messages", messages}, {"add_generation_prompt", false}}));
}

Result<Tokens> Client::tokenize_chat(const std::string& text) const {
  return read_tokens(
      post("/tokenize", {{"model", model_},
                         {"messages", Json::array({{{"role", "user"}, {"content", text}}})},
                         {"add_generation_prompt", true}}));
}

Result<Json> Client::collective_rpc(const std::string& method,
                                    const std::vector<std::string>& args) const {
  return post("/collective_rpc", {{"method", method}, {"args", args}});
}

Result<Json> Client::served_model() const {
  Result<std::string> body = get("/v1/models");
  if (!body.ok()) return body.status();
  const Json answer = Json::parse(body.value(), nullptr, false);
  if (!answer.is_object() || !answer.contains("data") || !answer["data"].is_array() ||
      answer["data"].empty()) {
    return bad_answer("/v1/models", "names no model");
  }
  return answer["data"][0];
}

}  // namespace bitdecoding::eval
