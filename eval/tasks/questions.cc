// SPDX-License-Identifier: Apache-2.0
#include "tasks/tasks.h"

namespace bitdecoding::eval {

Result<Json> run_questions(const Client& client, const Plan& plan) {
  Json answers = Json::array();
  for (const std::string& question : plan.questions) {
    Result<Completion> reply = client.chat(question, plan.answer_tokens);
    if (!reply.ok()) return reply.status();
    answers.push_back({{"question", question},
                       {"answer", reply.value().text},
                       {"finish_reason", reply.value().finish_reason}});
  }
  return Json{{"answers", answers}};
}

}  // namespace bitdecoding::eval
