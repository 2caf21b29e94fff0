// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/lcb/judge.h"

#include <fmt/format.h>

#include "benchmarks/lcb/compare.h"
#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

// The last line of a traceback.
std::string last_line(std::string text) {
  text.erase(text.find_last_not_of(" \n") + 1);
  const std::size_t line = text.rfind('\n');
  std::string out = line == std::string::npos ? text : text.substr(line + 1);
  constexpr std::size_t kMost = 200;
  if (out.size() > kMost) out = out.substr(0, kMost) + "...";
  return valid_utf8(out);
}

std::string how_it_failed(const SandboxRun& run, const SandboxLimits& limits) {
  switch (run.end) {
    case SandboxEnd::kTime:
      return fmt::format("more than {} ms", limits.time.count());
    case SandboxEnd::kOutput:
      return fmt::format("more than {} bytes of output", limits.output);
    case SandboxEnd::kSignalled:
      return fmt::format("killed by signal {}", run.code);
    case SandboxEnd::kExited:
      break;
  }
  if (run.code == 0) return "";
  const std::string said = last_line(run.errors);
  return said.empty() ? fmt::format("exit status {}", run.code) : "failed: " + said;
}

Result<std::string> try_test(const Sandbox& sandbox, const std::vector<Sandbox::File>& files,
                             const TestCase& test, const SandboxLimits& limits) {
  const Result<SandboxRun> run = sandbox.run({"/case/run.py"}, files, test.input, limits);
  if (!run.ok()) return run.status();
  std::string failed = how_it_failed(run.value(), limits);
  if (!failed.empty()) return failed;
  const std::string& output = run.value().output;
  if (!test.call) return std::string(same_output(output, test.output) ? "" : "wrong answer");
  const nlohmann::json value = nlohmann::json::parse(output, nullptr, false);
  if (value.is_discarded()) return std::string("nothing was returned");
  const Result<bool> same = same_value(value, test.output);
  if (!same.ok()) return same.status();
  return std::string(same.value() ? "" : "wrong answer");
}

}  // namespace

Result<Verdict> judge(const Sandbox& sandbox, const std::string& runner, const std::string& code,
                      const std::string& function, const std::vector<TestCase>& tests,
                      const SandboxLimits& limits) {
  Verdict out;
  for (const TestCase& test : tests) {
    std::vector<Sandbox::File> files = {{"run.py", runner}, {"code.py", code}};
    if (test.call) files.push_back({"name", function});
    const Result<std::string> failed = try_test(sandbox, files, test, limits);
    if (!failed.ok()) return failed.status();
    if (!failed.value().empty()) {
      out.why =
          fmt::format("test {} of {}: {}", out.tests_passed + 1, tests.size(), failed.value());
      return out;
    }
    ++out.tests_passed;
  }
  out.passed = true;
  return out;
}

}  // namespace bitdecoding::eval
