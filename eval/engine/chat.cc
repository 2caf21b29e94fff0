// SPDX-License-Identifier: Apache-2.0
#include "engine/chat.h"

#include <fmt/format.h>
#include <httplib.h>

#include "engine/client.h"
#include "engine/request_fields.h"
#include "engine/server_words.h"

namespace bitdecoding::eval {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// One stream as it arrives.
struct Stream {
  std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point last = begin;
  ChatReply reply;
  std::string thinking, text;
  std::string head;  // of whatever came, for the words of a refusal
  bool done = false;
  ChatProblem problem = ChatProblem::kNone;
  std::string sentence;

  bool fail(ChatProblem what, std::string words) {
    problem = what;
    sentence = std::move(words);
    return false;
  }
  void take_usage(const Json& usage) {
    if (!usage.is_object()) return;
    reply.prompt_tokens = usage.value("prompt_tokens", std::size_t{0});
    reply.completion_tokens = usage.value("completion_tokens", std::size_t{0});
    const auto details = usage.find("prompt_tokens_details");
    if (details != usage.end() && details->is_object()) {
      reply.cached_tokens = details->value("cached_tokens", std::size_t{0});
    }
  }
  void take_choice(const Json& choice) {
    const auto part = [](const Json& from, const char* name) {
      return from.contains(name) && from[name].is_string() ? from[name].get<std::string>() : "";
    };
    std::string thought, said;
    if (choice.contains("delta") && choice["delta"].is_object()) {
      thought = part(choice["delta"], "reasoning_content");
      if (thought.empty()) thought = part(choice["delta"], "reasoning");
      said = part(choice["delta"], "content");
    } else {
      said = part(choice, "text");
    }
    if (!thought.empty() || !said.empty()) {
      reply.arrivals.push_back(seconds_since(begin));
      if (reply.arrivals.size() == 1) reply.first_token = reply.arrivals.front();
    }
    thinking += thought;
    text += said;
    const std::string reason = part(choice, "finish_reason");
    if (!reason.empty()) reply.finish_reason = reason;
  }
  bool take(const std::string& data) {
    if (data == "[DONE]") {
      done = true;
      return true;
    }
    const Json event = Json::parse(data, nullptr, false);
    if (event.is_object() && event.contains("error")) {
      return fail(
          ChatProblem::kServerError,
          fmt::format("The server broke off its answer with the words: {}", server_words(data)));
    }
    if (!event.is_object() || !event.contains("choices") || !event["choices"].is_array()) {
      return fail(ChatProblem::kGarbage,
                  fmt::format("The server's stream has an event that is no completion: {}",
                              printable(data)));
    }
    try {
      for (const Json& choice : event["choices"]) take_choice(choice);
      if (event.contains("usage")) take_usage(event["usage"]);
    } catch (const Json::exception&) {
      return fail(
          ChatProblem::kGarbage,
          fmt::format("The server's stream has a field of another type: {}", printable(data)));
    }
    return true;
  }
};

bool says_too_long(const std::string& words) {
  return words.find("maximum context length") != std::string::npos ||
         words.find("max_model_len") != std::string::npos ||
         words.find("maximum model length") != std::string::npos;
}

// What the end of the exchange means, when the stream itself was good.
void judge(const httplib::Result& answer, std::chrono::seconds silence, bool stopped,
           Stream* stream) {
  if (stopped) {
    stream->fail(ChatProblem::kStopped, "The request was stopped.");
  } else if (!answer) {
    const bool silent = seconds_since(stream->last) >= 0.95 * static_cast<double>(silence.count());
    if (answer.error() == httplib::Error::Connection) {
      stream->fail(ChatProblem::kUnreachable,
                   "Nothing answers at the server's address; it may have ended.");
    } else if (silent) {
      stream->fail(ChatProblem::kHung,
                   fmt::format("The server sent nothing for {} s; --row-timeout is how long it may "
                               "be silent.",
                               silence.count()));
    } else {
      stream->fail(ChatProblem::kCut,
                   fmt::format("The connection ended in the middle of an answer ({}).",
                               httplib::to_string(answer.error())));
    }
  } else if (answer->status != 200) {
    const std::string words = server_words(answer->body.empty() ? stream->head : answer->body);
    const bool refused = answer->status >= 400 && answer->status < 500;
    stream->fail(!refused               ? ChatProblem::kServerError
                 : says_too_long(words) ? ChatProblem::kTooLong
                                        : ChatProblem::kRefused,
                 fmt::format("The server answered with status {}: {}", answer->status, words));
  } else if (!stream->done && stream->head.find("data:") == std::string::npos) {
    stream->fail(ChatProblem::kGarbage,
                 fmt::format("The server's answer is no stream of completions: {}",
                             printable(stream->head)));
  } else if (!stream->done) {
    stream->fail(ChatProblem::kCut, "The server's stream stopped before its end.");
  } else if (stream->reply.finish_reason.empty()) {
    stream->fail(ChatProblem::kCut, "The server's stream ended without a reason to finish.");
  }
}

}  // namespace

bool worth_a_retry(ChatProblem problem) {
  return problem == ChatProblem::kServerError || problem == ChatProblem::kUnreachable ||
         problem == ChatProblem::kGarbage || problem == ChatProblem::kCut;
}

std::unique_ptr<httplib::Client> ChatClient::connect() const {
  auto http = std::make_unique<httplib::Client>(endpoint_.base);
  http->set_connection_timeout(10);
  http->set_read_timeout(silence_.count());
  http->set_write_timeout(60);
  return http;
}

ChatOutcome ChatClient::ask(const Json& fields) {
  const bool plain = fields.contains("prompt");
  const std::string path = plain ? "/v1/completions" : "/v1/chat/completions";
  Json body = fields;
  body["model"] = model_;
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  if (const Status s = check_request_fields(path, body); !s.ok()) {
    return {ChatProblem::kRefused, s.message(), {}};
  }
  const std::unique_ptr<httplib::Client> http = connect();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopped_) return {ChatProblem::kStopped, "The request was stopped.", {}};
    running_.insert(http.get());
  }
  Stream stream;
  EventSplitter splitter;
  httplib::Request request;
  request.method = "POST";
  request.path = endpoint_.prefix + path;
  request.set_header("Content-Type", "application/json");
  request.body = body.dump(-1, ' ', false, Json::error_handler_t::replace);
  request.content_receiver = [&](const char* data, std::size_t size, std::uint64_t, std::uint64_t) {
    stream.last = std::chrono::steady_clock::now();
    if (stream.head.size() < 2000) stream.head.append(data, size);
    return splitter.feed({data, size},
                         [&](const std::string& event) { return stream.take(event); });
  };
  const httplib::Result answer = http->send(request);
  bool stopped = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    running_.erase(http.get());
    stopped = stopped_;
  }
  if (stream.problem == ChatProblem::kNone) judge(answer, silence_, stopped, &stream);
  stream.reply.latency = seconds_since(stream.begin);
  stream.reply.text = stream.thinking.empty()
                          ? stream.text
                          : "<think>" + stream.thinking + "</think>" + stream.text;
  if (stream.reply.completion_tokens == 0) {
    stream.reply.completion_tokens = stream.reply.arrivals.size();
  }
  return {stream.problem, std::move(stream.sentence), std::move(stream.reply)};
}

std::optional<Json> ChatClient::post(const std::string& path, const Json& body) const {
  const httplib::Result answer = connect()->Post(
      endpoint_.prefix + path, body.dump(-1, ' ', false, Json::error_handler_t::replace),
      "application/json");
  if (!answer || answer->status != 200) return std::nullopt;
  Json parsed = Json::parse(answer->body, nullptr, false);
  if (!parsed.is_object()) return std::nullopt;
  return parsed;
}

std::optional<std::size_t> ChatClient::count_tokens(const Json& messages) const {
  const std::optional<Json> answer = post(
      "/tokenize", {{"model", model_}, {"messages", messages}, {"add_generation_prompt", true}});
  if (!answer || !answer->contains("count") || !(*answer)["count"].is_number_unsigned()) {
    return std::nullopt;
  }
  return (*answer)["count"].get<std::size_t>();
}

Result<std::vector<int>> ChatClient::tokenize(const std::string& text) const {
  const std::optional<Json> answer =
      post("/tokenize", {{"model", model_}, {"prompt", text}, {"add_special_tokens", false}});
  try {
    if (answer && answer->contains("tokens")) return (*answer)["tokens"].get<std::vector<int>>();
  } catch (const Json::exception&) {
  }
  return Status(StatusCode::kUnsupported,
                fmt::format("The server at {} does not count tokens (/tokenize, as vLLM has it).",
                            endpoint_.base));
}

Result<std::string> ChatClient::get(const std::string& path) const {
  const httplib::Result answer = connect()->Get(endpoint_.prefix + path);
  if (!answer) {
    return Status(StatusCode::kIo,
                  fmt::format("Nothing answers at {}{} ({}).", endpoint_.base, endpoint_.prefix,
                              httplib::to_string(answer.error())));
  }
  if (answer->status == 200) return answer->body;
  return Status(StatusCode::kIo,
                fmt::format("{}{}{} answers with status {}: {}", endpoint_.base, endpoint_.prefix,
                            path, answer->status, server_words(answer->body)));
}

Result<std::vector<std::string>> ChatClient::models(std::size_t* window) const {
  const Result<std::string> body = get("/v1/models");
  if (!body.ok()) return body.status();
  const Json answer = Json::parse(body.value(), nullptr, false);
  std::vector<std::string> ids;
  *window = 0;
  try {
    for (const Json& model : answer.at("data")) {
      ids.push_back(model.at("id").get<std::string>());
      if (model.contains("max_model_len") && model["max_model_len"].is_number_unsigned()) {
        *window = model["max_model_len"].get<std::size_t>();
      }
    }
  } catch (const Json::exception&) {
    ids.clear();
  }
  if (!ids.empty()) return ids;
  return Status(StatusCode::kCorrupt,
                fmt::format("{}/v1/models names no model; is it an OpenAI-compatible server?",
                            endpoint_.base + endpoint_.prefix));
}

bool ChatClient::healthy() const {
  httplib::Client http(endpoint_.base);
  http.set_connection_timeout(5);
  http.set_read_timeout(20);
  const httplib::Result answer = http.Get(endpoint_.prefix + "/v1/models");
  return answer && answer->status == 200;
}

void ChatClient::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopped_ = true;
  for (httplib::Client* http : running_) http->stop();
}

}  // namespace bitdecoding::eval
