// SPDX-License-Identifier: Apache-2.0
// Runs a solution on its tests.
#pragma once

#include <string>
#include <vector>

#include "benchmarks/lcb/sandbox.h"
#include "benchmarks/lcb/test_cases.h"

namespace bitdecoding::eval {

struct Verdict {
  bool passed = false;
  std::size_t tests_passed = 0;  // before the first that failed
  std::string why;               // of a failure: "test 3: wrong answer"
};

// Stops at the first test that fails. `runner` is the text of tools/eval/lcb_case.py; `function`
// names what is called, for tests that call. An error is the sandbox's.
Result<Verdict> judge(const Sandbox& sandbox, const std::string& runner, const std::string& code,
                      const std::string& function, const std::vector<TestCase>& tests,
                      const SandboxLimits& limits);

}  // namespace bitdecoding::eval
