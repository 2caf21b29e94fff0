// SPDX-License-Identifier: Apache-2.0
#include "tasks/tasks.h"

namespace bitdecoding::eval {
namespace {

constexpr int kAnswerTokens = 20;

}  // namespace

Result<Json> run_needles(const Client& client, const Document& document, const Plan& plan) {
  Json asked = Json::array();
  Json summary = Json::array();
  for (const std::size_t length : plan.needle_lengths) {
    int found = 0;
    int total = 0;
    for (const Needle& needle : document.needles) {
      if (needle.end_token + kTailTokens > length) continue;
      Result<Tokens> tail = question_tail(client, document, needle_question(needle));
      if (!tail.ok()) return tail.status();
      CompletionRequest request;
      request.prompt = document.prefix(length - kTailTokens);
      request.prompt.insert(request.prompt.end(), tail.value().begin(), tail.value().end());
      request.max_tokens = kAnswerTokens;
      Result<Completion> reply = client.complete(request);
      if (!reply.ok()) return reply.status();
      const bool right = needle_found(needle, reply.value().text);
      found += right ? 1 : 0;
      ++total;
      asked.push_back({{"length", length},
                       {"prompt_tokens", request.prompt.size()},
                       {"hidden_at", needle.end_token},
                       {"place", needle.place},
                       {"code", needle.code},
                       {"answer", reply.value().text},
                       {"found", right}});
    }
    summary.push_back({{"length", length}, {"found", found}, {"asked", total}});
  }
  return Json{{"asked", asked}, {"summary", summary}};
}

}  // namespace bitdecoding::eval
