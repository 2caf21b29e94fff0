// SPDX-License-Identifier: Apache-2.0
#include "tasks/plan.h"

namespace bitdecoding::eval {

Plan full_plan() {
  Plan plan;
  plan.questions = {"What is the capital of France?", "Write one sentence about the sea.",
                    "Explain in one sentence what a compiler does.",
                    "Why is the sky blue? Answer in one sentence."};
  plan.needle_lengths = {1024, 4096};
  plan.users = {1, 4};
  return plan;
}

Plan quick_plan() {
  Plan plan = full_plan();
  plan.questions.resize(2);
  plan.answer_tokens = 24;
  plan.needle_lengths = {1024};
  plan.kl_tokens = 1536;
  plan.context = 2048;
  plan.decode_tokens = 32;
  return plan;
}

}  // namespace bitdecoding::eval
