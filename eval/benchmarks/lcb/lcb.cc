// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/lcb/lcb.h"

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "benchmarks/data_file.h"
#include "benchmarks/lcb/compare.h"
#include "benchmarks/lcb/judge.h"
#include "benchmarks/protocol.h"

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kFile = "lcb_v6/prompts.jsonl";

// The prompt of lcb_runner for chat models: its words are part of the benchmark.
constexpr std::string_view kSystem =
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests.";
constexpr std::string_view kWithStarter =
    "### Format: You will use the following starter code to write the solution to the problem and "
    "enclose your code within delimiters.\n```python\n{}\n```\n\n";
constexpr std::string_view kWithStdin =
    "### Format: Read the inputs from stdin solve the problem and write the answer to stdout (do "
    "not "
    "directly test on the sample inputs). Enclose your code within delimiters as follows. Ensure "
    "that when the python program runs, it reads the inputs, runs the algorithm and writes output "
    "to "
    "STDOUT.\n```python\n# YOUR CODE HERE\n```\n\n";

std::string question(const std::string& content, const std::string& starter) {
  return fmt::format("### Question:\n{}\n\n", content) +
         (starter.empty() ? std::string(kWithStdin) : fmt::format(kWithStarter, starter)) +
         "### Answer: (use the provided format with backticks)\n\n";
}

bool is_date(const std::string& text) {
  if (text.size() < 10) return false;
  for (std::size_t i = 0; i < 10; ++i) {
    const bool dash = i == 4 || i == 7;
    if (dash ? text[i] != '-' : (text[i] < '0' || text[i] > '9')) return false;
  }
  return true;
}

// The function that tests call: "func_name" in `metadata`, JSON as text; empty when there is none.
std::string function_name(Fields& fields) {
  const nlohmann::json* value = fields.find({"metadata"});
  if (value == nullptr) return "";
  nlohmann::json metadata = *value;
  if (value->is_string()) {
    metadata = nlohmann::json::parse(value->get_ref<const std::string&>(), nullptr, false);
  }
  if (!metadata.is_object()) {
    fields.wrong("'metadata' is not a JSON object");
    return "";
  }
  const auto name = metadata.find("func_name");
  if (name == metadata.end() || name->is_null()) return "";
  if (name->is_string()) return name->get<std::string>();
  fields.wrong("'func_name' in 'metadata' is not a string");
  return "";
}

class LiveCodeBench : public ProtocolBenchmark {
 public:
  LiveCodeBench() : ProtocolBenchmark({"lcb", "LiveCodeBench v6", false, 39168, 81920}) {}

  std::vector<MissingItem> missing(const LoadOptions& options) const override {
    std::vector<MissingItem> out =
        missing_data(options, kFile, "", "livecodebench/code_generation_lite (test6.jsonl)",
                     "as its data set card says; the problems are their sites'");
    const Result<Sandbox> sandbox = Sandbox::make(options.python);
    if (!sandbox.ok())
      out.push_back({"a sandbox for programs", sandbox.status().message(), "", false});
    return out;
  }

  Result<LoadedRows> load(const LoadOptions& options) const override {
    const std::string path = find_data(options, {kFile});
    if (path.empty()) return no_data(options, {missing(options).front()});
    for (const std::string& date : {options.date_from, options.date_to}) {
      if (!date.empty() && (date.size() != 10 || !is_date(date))) {
        return Status(StatusCode::kInvalidArgument,
                      fmt::format("'{}' is no date; write YYYY-MM-DD.", date));
      }
    }
    if (!options.date_to.empty() && options.date_from > options.date_to) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("The dates from {} to {} are none: the first is after the last.",
                                options.date_from, options.date_to));
    }
    LoadedRows loaded;
    const Status status = read_rows(path, loaded, [&](const DataLine& line, Fields& fields) {
      return row(path, line, fields);
    });
    if (!status.ok()) return status;
    std::erase_if(loaded.rows, [&](const BenchmarkRow& it) {
      const std::string& date = it.labels.at("date");
      return date < options.date_from || (!options.date_to.empty() && date > options.date_to);
    });
    if (loaded.rows.empty()) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("'{}' has no problem from {} to {}.", path, options.date_from,
                                options.date_to));
    }
    return loaded;
  }

  Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                      const LoadOptions& options) const override {
    Score out;
    out.extracted = extract_code(answer_of(reply, options.model));
    if (out.extracted.empty()) {
      out.why = "no code between two fences outside the thinking part";
      return out;
    }
    const Result<Sandbox> sandbox = Sandbox::make(options.python);
    if (!sandbox.ok()) return sandbox.status();
    const Result<std::string> runner = runner_text(options);
    if (!runner.ok()) return runner.status();
    const auto& at = row.reference;
    const Result<nlohmann::json> line = read_line_at(at["file"], at["offset"].get<std::uint64_t>(),
                                                     at["bytes"].get<std::uint64_t>());
    if (!line.ok()) return line.status();
    const Result<std::vector<TestCase>> tests = test_cases(line.value());
    if (!tests.ok()) {
      return Status(tests.status().code(),
                    fmt::format("Problem {}: {}", row.id, tests.status().message()));
    }
    const Result<Verdict> verdict = judge(sandbox.value(), runner.value(), out.extracted,
                                          at["function"], tests.value(), SandboxLimits());
    if (!verdict.ok()) return verdict.status();
    out.value = verdict.value().passed ? 1.0 : 0.0;
    out.why = verdict.value().why;
    out.detail = {{"tests_passed", verdict.value().tests_passed}, {"tests", tests.value().size()}};
    return out;
  }

  std::vector<std::string> groups() const override { return {"difficulty", "platform", "month"}; }

 private:
  static BenchmarkRow row(const std::string& path, const DataLine& line, Fields& fields) {
    BenchmarkRow out;
    out.id = fields.scalar({"question_id", "id"});
    const std::string starter = fields.optional_text({"starter_code"});
    const std::string given = fields.optional_text({"prompt"});
    if (given.empty()) {
      out.messages = {{"system", std::string(kSystem)},
                      {"user", question(fields.text({"question_content", "question"}), starter)}};
    } else {
      out.messages = {{"user", given}};
    }
    const std::string date = fields.text({"contest_date", "date"});
    if (fields.ok() && !is_date(date)) {
      fields.wrong(fmt::format("its contest_date '{}' does not begin with YYYY-MM-DD", date));
    }
    if (fields.find({"public_test_cases"}) == nullptr &&
        fields.find({"private_test_cases"}) == nullptr) {
      fields.wrong("has no field 'public_test_cases' or 'private_test_cases'");
    }
    out.labels = {{"date", date.substr(0, 10)}, {"month", date.substr(0, 7)}};
    for (const char* name : {"difficulty", "platform"}) {
      const std::string value = fields.optional_text({name});
      if (!value.empty()) out.labels[name] = value;
    }
    const std::string function = function_name(fields);
    if (!starter.empty() && function.empty()) {
      fields.wrong("has starter code, and 'metadata' names no function to call");
    }
    // Tests are megabytes a row: they are read when they are needed.
    out.reference = {
        {"file", path}, {"offset", line.offset}, {"bytes", line.bytes}, {"function", function}};
    return out;
  }

  static Result<std::string> runner_text(const LoadOptions& options) {
    const std::string folder =
        options.tools_folder.empty() ? BITDECODING_EVAL_TOOLS : options.tools_folder;
    const std::string path = (std::filesystem::path(folder) / "lcb_case.py").string();
    std::ifstream file(path, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    if (!file || text.str().empty()) {
      return Status(StatusCode::kNotFound, fmt::format("'{}' cannot be read.", path));
    }
    return text.str();
  }
};

}  // namespace

std::unique_ptr<Benchmark> make_lcb() { return std::make_unique<LiveCodeBench>(); }

}  // namespace bitdecoding::eval
