// SPDX-License-Identifier: Apache-2.0
#include "tasks/throughput.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "engine/server_log.h"
#include "score/statistics.h"
#include "tasks/tasks.h"

namespace bitdecoding::eval {
namespace {

constexpr const char* kQuestions[] = {
    "What is this text about?",          "Who wrote this text?",
    "What does this text allow?",        "Which places have a pass key?",
    "What must a user of the text do?",  "What does the text forbid?",
    "Which words does the text define?", "When was it written?"};

Result<std::vector<std::vector<StreamedToken>>> decode_together(const Client& client,
                                                                const Document& document,
                                                                const Plan& plan, int users) {
  std::vector<CompletionRequest> requests;
  for (int i = 0; i < users; ++i) {
    Result<Tokens> tail = question_tail(
        client, document, kQuestions[static_cast<std::size_t>(i) % std::size(kQuestions)]);
    if (!tail.ok()) return tail.status();
    CompletionRequest request;
    request.prompt = document.prefix(plan.context - kTailTokens);
    request.prompt.insert(request.prompt.end(), tail.value().begin(), tail.value().end());
    request.max_tokens = plan.decode_tokens;
    request.ignore_eos = true;
    requests.push_back(std::move(request));
  }
  std::vector<std::vector<StreamedToken>> streams(requests.size());
  std::vector<Status> failures(requests.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    threads.emplace_back([&, i] {
      Result<std::vector<StreamedToken>> stream = client.stream(requests[i]);
      if (stream.ok()) {
        streams[i] = stream.take();
      } else {
        failures[i] = stream.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Status& failure : failures) {
    if (!failure.ok()) return failure;
  }
  return streams;
}

Result<double> metric(const Client& client, std::string_view name) {
  Result<std::string> text = client.metrics();
  if (!text.ok()) return text.status();
  return metric_total(parse_metrics(text.value()), name).value_or(0.0);
}

// Two requests with one token each: the first puts all but `tokens` of the prompt into the cache,
// the second is timed. Tokens found in the cache are taken off by the server's own count.
Result<Json> measure_prefill(const Client& client, const Document& document, const Plan& plan) {
  CompletionRequest request;
  request.max_tokens = 1;
  request.prompt = document.prefix(plan.kl_tokens);
  Result<Completion> warm = client.complete(request);
  if (!warm.ok()) return warm.status();
  request.prompt = document.prefix(plan.context - kTailTokens);
  Result<Completion> timed = client.complete(request);
  if (!timed.ok()) return timed.status();
  const auto fresh =
      static_cast<double>(static_cast<int>(request.prompt.size()) - timed.value().cached_tokens);
  return Json{{"prompt_tokens", request.prompt.size()},
              {"cached_tokens", timed.value().cached_tokens},
              {"seconds", timed.value().seconds},
              {"tokens_per_second", fresh / timed.value().seconds}};
}

}  // namespace

DecodeSpeed decode_speed(const std::vector<std::vector<StreamedToken>>& users) {
  DecodeSpeed out;
  if (users.empty()) return out;
  double begin = 0.0;
  std::optional<double> end;
  for (const auto& user : users) {
    if (user.empty()) return out;
    begin = std::max(begin, user.front().at);
    end = std::min(end.value_or(user.back().at), user.back().at);
  }
  if (*end <= begin) return out;
  std::vector<double> steps;
  for (const auto& user : users) {
    for (std::size_t i = 0; i < user.size(); ++i) {
      if (user[i].at <= begin || user[i].at > *end) continue;
      ++out.tokens;
      if (i > 0 && user[i - 1].at >= begin) steps.push_back(user[i].at - user[i - 1].at);
    }
  }
  out.seconds = *end - begin;
  out.tokens_per_second = out.tokens / out.seconds;
  out.step_ms_median = 1000.0 * quantile(steps, 0.5);
  return out;
}

Result<Json> run_throughput(const Client& client, const Document& document, const Plan& plan) {
  Result<Json> prefill = measure_prefill(client, document, plan);
  if (!prefill.ok()) return prefill.status();
  Json runs = Json::array();
  for (const int users : plan.users) {
    const Result<double> hits = metric(client, "vllm:prefix_cache_hits_total");
    if (!hits.ok()) return hits.status();
    const Result<std::vector<std::vector<StreamedToken>>> streams =
        decode_together(client, document, plan, users);
    if (!streams.ok()) return streams.status();
    const Result<double> hits_after = metric(client, "vllm:prefix_cache_hits_total");
    if (!hits_after.ok()) return hits_after.status();
    const DecodeSpeed speed = decode_speed(streams.value());
    if (speed.tokens == 0) {
      return Status(StatusCode::kInternal,
                    fmt::format("The answers of {} users never overlapped, so their common speed "
                                "cannot be stated.",
                                users));
    }
    runs.push_back({{"users", users},
                    {"tokens", speed.tokens},
                    {"seconds", speed.seconds},
                    {"tokens_per_second", speed.tokens_per_second},
                    {"step_ms_median", speed.step_ms_median},
                    {"cached_tokens", hits_after.value() - hits.value()}});
  }
  return Json{{"context", plan.context}, {"prefill", prefill.value()}, {"decode", runs}};
}

}  // namespace bitdecoding::eval
