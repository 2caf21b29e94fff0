// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/gpqa/gpqa.h"

#include <fmt/format.h>

#include <algorithm>

#include "benchmarks/data_file.h"
#include "benchmarks/protocol.h"
#include "benchmarks/text/boxed.h"
#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kFile = "gpqa/gpqa_diamond.jsonl";
constexpr std::string_view kParquet = "gpqa/gpqa_diamond.parquet";
constexpr std::string_view kLetters = "ABCD";
constexpr std::string_view kInstruction =
    "Answer this multiple-choice question. Think step by step, then end with a line of the form "
    "'Answer: X', where X is one of A, B, C, D.";
constexpr std::string_view kSimpleEvals = "simple-evals";

using Choices = std::array<std::string, 4>;

class Gpqa : public ProtocolBenchmark {
 public:
  Gpqa() : ProtocolBenchmark({"gpqa", "GPQA Diamond", false, 81920, 0}) {}

  std::vector<MissingItem> missing(const LoadOptions& options) const override {
    return missing_data(options, kFile, kParquet,
                        "Idavidrein/gpqa, a gated set: accept its conditions on its page and log "
                        "in with `hf auth login` first",
                        "CC-BY-4.0; its authors ask not to publish the questions as plain text");
  }

  Result<LoadedRows> load(const LoadOptions& options) const override {
    return load_file(options, kFile, missing(options), row);
  }

  Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                      const LoadOptions& options) const override {
    if (!options.compat.empty() && options.compat != kSimpleEvals) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("GPQA cannot be scored as '{}'; there is '{}'.", options.compat,
                                kSimpleEvals));
    }
    const std::string answer = answer_of(reply, options.model);
    const char letter =
        options.compat == kSimpleEvals ? simple_evals_letter(answer) : choice_letter(answer);
    Score out;
    if (letter == 0) {
      out.why = answer.empty() && !reply.empty() ? "nothing outside the thinking part"
                                                 : "no box and no 'Answer: X' with a letter A to D";
      return out;
    }
    out.extracted = std::string(1, letter);
    out.value = row.reference.get_ref<const std::string&>() == out.extracted ? 1.0 : 0.0;
    return out;
  }

  std::vector<std::string> groups() const override { return {"domain"}; }

 private:
  static BenchmarkRow row(Fields& fields, int number) {
    BenchmarkRow out;
    const std::string question = fields.text({"Question", "question", "problem"});
    std::string text;
    if (fields.find({"Correct Answer", "correct_answer"}) != nullptr) {
      text = permuted(fields, question, out);
    } else if (fields.find({"choices", "options"}) != nullptr) {
      text = listed(fields, question, out);
    } else {
      text = question;  // with its choices in it
      out.reference = std::string(1, letter_of(fields));
    }
    out.messages = {{"user", std::string(kInstruction) + "\n\n" + text}};
    const std::string id = fields.optional_text({"Record ID", "record_id", "id"});
    out.id = id.empty() ? std::to_string(number) : id;
    const std::string domain =
        fields.optional_text({"High-level domain", "high_level_domain", "domain"});
    if (!domain.empty()) out.labels["domain"] = domain;
    return out;
  }

  static std::string lettered(const std::string& question, const Choices& choices) {
    std::string out = strip(question) + "\n";
    for (std::size_t i = 0; i < 4; ++i) {
      out += fmt::format("\n{}) {}", kLetters[i], strip(choices[i]));
    }
    return out;
  }

  static std::string permuted(Fields& fields, const std::string& question, BenchmarkRow& out) {
    const Choices choices = {fields.scalar({"Correct Answer", "correct_answer"}),
                             fields.scalar({"Incorrect Answer 1", "incorrect_answer_1"}),
                             fields.scalar({"Incorrect Answer 2", "incorrect_answer_2"}),
                             fields.scalar({"Incorrect Answer 3", "incorrect_answer_3"})};
    const std::array<int, 4> order = choice_order(question);
    Choices placed;
    for (std::size_t i = 0; i < 4; ++i) placed[i] = choices[static_cast<std::size_t>(order[i])];
    const auto right = std::find(order.begin(), order.end(), 0) - order.begin();
    out.reference = std::string(1, kLetters[static_cast<std::size_t>(right)]);
    return lettered(question, placed);
  }

  // A list of four in an order of its own, and the letter or number of the right one.
  static std::string listed(Fields& fields, const std::string& question, BenchmarkRow& out) {
    const nlohmann::json& list = *fields.find({"choices", "options"});
    Choices choices;
    if (!list.is_array() || list.size() != 4 ||
        !std::all_of(list.begin(), list.end(), [](const auto& it) { return it.is_string(); })) {
      fields.wrong("'choices' is not a list of four strings");
      return "";
    }
    for (std::size_t i = 0; i < 4; ++i) choices[i] = list[i].get<std::string>();
    out.reference = std::string(1, letter_of(fields));
    return lettered(question, choices);
  }

  static char letter_of(Fields& fields) {
    const nlohmann::json* value = fields.find({"answer", "Answer", "solution", "answer_index"});
    if (value == nullptr) {
      fields.wrong("has no field 'Correct Answer', nor 'answer'");
      return 'A';
    }
    if (value->is_number_integer() && value->get<std::int64_t>() >= 0 &&
        value->get<std::int64_t>() < 4) {
      return kLetters[static_cast<std::size_t>(value->get<std::int64_t>())];
    }
    if (value->is_string()) {
      const std::string written = strip(value->get_ref<const std::string&>());
      const char boxed = choice_letter(written);
      if (boxed != 0) return boxed;
      if (written.size() == 1 && kLetters.find(written[0]) != std::string_view::npos) {
        return written[0];
      }
    }
    fields.wrong("its answer is no letter A to D and no number 0 to 3");
    return 'A';
  }
};

}  // namespace

std::unique_ptr<Benchmark> make_gpqa() { return std::make_unique<Gpqa>(); }

}  // namespace bitdecoding::eval
