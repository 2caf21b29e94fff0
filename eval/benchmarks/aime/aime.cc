// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/aime/aime.h"

#include <fmt/format.h>

#include "benchmarks/data_file.h"
#include "benchmarks/protocol.h"
#include "benchmarks/text/boxed.h"

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kInstruction =
    "Please reason step by step, and put your final answer within \\boxed{}.";

// One year's problems.
struct Edition {
  Protocol protocol;
  std::string_view stem;  // of the data file: "aime24/aime24"
  std::string_view source;
  std::string_view licence;
};

std::string joined(std::string_view a, std::string_view b) { return std::string(a).append(b); }

// The last whole number in a box.
std::optional<std::int64_t> last_boxed(std::string_view text, std::string& as_written) {
  const std::vector<std::string> all = boxes(text);
  if (all.empty()) return std::nullopt;
  as_written = all.back();
  return boxed_integer(all.back());
}

class Aime : public ProtocolBenchmark {
 public:
  explicit Aime(const Edition& edition)
      : ProtocolBenchmark(edition.protocol),
        file_(joined(edition.stem, ".jsonl")),
        parquet_(joined(edition.stem, ".parquet")),
        source_(edition.source),
        licence_(edition.licence) {}

  std::vector<MissingItem> missing(const LoadOptions& options) const override {
    return missing_data(options, file_, parquet_, source_, licence_);
  }

  Result<LoadedRows> load(const LoadOptions& options) const override {
    return load_file(options, file_, missing(options), row);
  }

  Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                      const LoadOptions& options) const override {
    const std::string answer = answer_of(reply, options.model);
    Score out;
    std::string written;
    const auto value = last_boxed(answer, written);
    if (value) {
      out.extracted = std::to_string(*value);
      out.value = *value == row.reference.get<std::int64_t>() ? 1.0 : 0.0;
    } else if (!written.empty()) {
      out.why = fmt::format("the last box holds no whole number: {}", written);
    } else {
      out.why = "no box outside the thinking part";
    }
    return out;
  }

  std::vector<std::string> groups() const override { return {}; }

 private:
  static BenchmarkRow row(Fields& fields, int number) {
    BenchmarkRow out;
    const std::string problem = fields.text({"problem", "Problem", "question", "Question"});
    out.messages = {{"user", problem + "\n\n" + std::string(kInstruction)}};
    out.reference = answer(fields);
    const bool named = fields.find({"id", "ID", "problem_idx", "unique_id"}) != nullptr;
    out.id =
        named ? fields.scalar({"id", "ID", "problem_idx", "unique_id"}) : std::to_string(number);
    return out;
  }

  static std::int64_t answer(Fields& fields) {
    std::string written;
    std::optional<std::int64_t> value;
    if (fields.find({"answer", "Answer"}) != nullptr) {
      written = fields.scalar({"answer", "Answer"});
      const std::vector<std::string> boxed = boxes(written);
      value = boxed_integer(boxed.empty() ? written : boxed.back());
    } else if (fields.find({"solution", "Solution"}) != nullptr) {
      value = last_boxed(fields.text({"solution", "Solution"}), written);
    } else {
      fields.wrong("has no field 'answer' or 'solution'");
      return 0;
    }
    if (!value || *value < 0 || *value > 999) {
      fields.wrong(fmt::format("its answer '{}' is no whole number from 0 to 999", written));
    }
    return value.value_or(0);
  }

  std::string file_;
  std::string parquet_;
  std::string source_;
  std::string licence_;
};

}  // namespace

std::unique_ptr<Benchmark> make_aime24() {
  return std::make_unique<Aime>(Edition{{"aime", "AIME 2024", false, 38912, 81920},
                                        "aime24/aime24",
                                        "HuggingFaceH4/aime_2024",
                                        "the problems are MAA's; the data set names no licence"});
}

std::unique_ptr<Benchmark> make_aime25() {
  return std::make_unique<Aime>(Edition{{"aime25", "AIME 2025", false, 38912, 81920},
                                        "aime25/aime25",
                                        "math-ai/aime25",
                                        "the problems are MAA's; the data set is Apache-2.0"});
}

}  // namespace bitdecoding::eval
