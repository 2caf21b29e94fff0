// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/longbench_pro/longbench_pro.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "benchmarks/data_file.h"
#include "benchmarks/longbench_pro/embedding.h"
#include "benchmarks/longbench_pro/metrics.h"
#include "benchmarks/longbench_pro/rouge.h"
#include "benchmarks/longbench_pro/segmenter.h"
#include "benchmarks/protocol.h"
#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

using Lines = std::vector<std::string>;

constexpr std::string_view kFolder = "longbench_pro";
constexpr std::string_view kLongest = "256k";
constexpr std::size_t kLongestTokens = 262144;
constexpr std::string_view kChinese = "Chinese";
// Python's limit of 1,000 less the frames that are open before a walk begins.
constexpr std::size_t kPeerWalk = 970;

// All data files in the folder, by name.
std::vector<std::string> data_files(const LoadOptions& options) {
  std::vector<std::string> out;
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::path(options.data_folder) / kFolder;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::string extension = it->path().extension().string();
    if (extension == ".jsonl" || extension == ".json") out.push_back(it->path().string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

class LongBenchPro : public ProtocolBenchmark {
 public:
  LongBenchPro() : ProtocolBenchmark({"longbench_pro", "LongBench-Pro", true, 4096, 0}) {}

  std::vector<MissingItem> missing(const LoadOptions& options) const override {
    std::vector<MissingItem> out;
    if (data_files(options).empty()) {
      out.push_back({"data folder longbench_pro/ with a .json or .jsonl file",
                     "tools/eval/stage.py fetches it from the data set caskcsg/LongBench-Pro.",
                     "as its data set card says"});
    }
    if (options.embedding_endpoint.empty()) {
      out.push_back({"an embedding model",
                     "Give --embedding-endpoint the address of an OpenAI-style server of one "
                     "(the benchmark's own is Qwen3-Embedding-8B). Without it the scores of "
                     "summaries (T4) are missing, and not counted.",
                     "", true});
    }
    const Result<Lines> words = Segmenter::cut(options.python, options.tools_folder, {});
    if (!words.ok()) {
      out.push_back(
          {"the Python package jieba",
           words.status().message() +
               " Without it the scores of Chinese summaries are missing, and not counted.",
           "MIT", true});
    }
    return out;
  }

  Result<LoadedRows> load(const LoadOptions& options) const override {
    const std::vector<std::string> files = data_files(options);
    if (files.empty()) return no_data(options, {missing(options).front()});
    LoadedRows loaded;
    for (const std::string& path : files) {
      const Status status =
          read_rows(path, loaded, [](const DataLine&, Fields& fields) { return row(fields); });
      if (!status.ok()) return status;
    }
    if (options.model.window != 0 && options.model.window <= kLongestTokens) {
      std::erase_if(loaded.rows,
                    [](const BenchmarkRow& it) { return it.labels.at("length") == kLongest; });
    }
    return loaded;
  }

  Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                      const LoadOptions& options) const override {
    const Metric* metric = metric_of(row.labels.at("subtask"));
    if (metric == nullptr) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("LongBench-Pro has no task '{}'.", row.labels.at("subtask")));
    }
    const std::string prediction = answer_of(reply, options.model);
    Score out;
    out.detail = {{"metric", metric_name(*metric)}};
    if (strip(prediction).empty()) {
      out.why = reply.empty() ? "the reply is empty" : "nothing outside the thinking part";
      return out;
    }
    Lines answers;
    for (const auto& answer : row.reference) {
      answers.push_back(normalized(answer.get_ref<const std::string&>()));
    }
    if (*metric == Metric::kSummary) {
      const bool chinese = row.labels.at("language") == kChinese;
      return summary(std::move(out), answers, normalized(prediction), chinese, options);
    }
    const Lines lines = answer_lines(prediction);
    for (const std::string& line : lines)
      out.extracted += (out.extracted.empty() ? "" : "\n") + line;
    out.value = by_lines(*metric, answers, lines);
    if (out.value > 1.0) {
      out.why = "the metric came out above 1, which the benchmark's runner counts as 0";
      out.value = 0.0;
    }
    return out;
  }

  std::vector<std::string> groups() const override {
    return {"task", "length", "language", "subtask", "requirement", "difficulty"};
  }

 private:
  static BenchmarkRow row(Fields& fields) {
    BenchmarkRow out;
    out.id = fields.scalar({"id"});
    const std::string context = fields.text({"context"});
    const std::string question = fields.text({"question_nonthinking"});
    out.messages = {{"user", strip(context + "\n\n\n\n" + question)}};
    out.labels = {{"task", fields.text({"primary_task"})},
                  {"subtask", fields.text({"secondary_task"})},
                  {"language", fields.text({"language"})},
                  {"length", fields.scalar({"token_length"})}};
    for (const auto& [label, field] : {std::pair("requirement", "contextual_requirement"),
                                       std::pair("difficulty", "difficulty")}) {
      const std::string value = fields.optional_text({field});
      if (!value.empty()) out.labels[label] = value;
    }
    if (fields.ok() && metric_of(out.labels["subtask"]) == nullptr) {
      fields.wrong(
          fmt::format("its secondary_task '{}' is none of the benchmark's", out.labels["subtask"]));
    }
    const std::string& language = out.labels["language"];
    if (fields.ok() && language != kChinese && language != "English") {
      fields.wrong(fmt::format("its language '{}' is neither English nor Chinese", language));
    }
    const nlohmann::json* answer = fields.find({"answer"});
    if (answer == nullptr || !answer->is_array() || answer->empty() ||
        !std::all_of(answer->begin(), answer->end(),
                     [](const auto& it) { return it.is_string(); })) {
      fields.wrong("'answer' is not a list of strings");
    } else {
      out.reference = *answer;
    }
    return out;
  }

  static double by_lines(Metric metric, const Lines& answers, const Lines& lines) {
    switch (metric) {
      case Metric::kNdcg:
        return ndcg(answers, lines);
      case Metric::kPairwise:
        return pairwise_accuracy(answers, lines);
      case Metric::kAccuracy:
        return accuracy(answers, lines);
      case Metric::kF1:
        return f1_score(answers, lines);
      case Metric::kSubEm:
        return sub_em(answers, lines);
      case Metric::kSummary:
        break;
    }
    return 0.0;
  }

  static Score without(Score out, const std::string& why) {
    out.missing = true;
    out.why = why;
    return out;
  }

  // Half the best similarity, half the best ROUGE-L, over the answers.
  static Result<Score> summary(Score out, const Lines& answers, const std::string& text,
                               bool chinese, const LoadOptions& options) {
    out.extracted = text;
    Lines all = answers;
    all.push_back(text);
    if (chinese) {
      Result<Lines> cut = Segmenter::cut(options.python, options.tools_folder, all);
      if (!cut.ok()) return without(std::move(out), cut.status().message());
      all = cut.take();
    }
    const std::u32string given = decode_utf8(all.back());
    RougeL best;
    for (std::size_t i = 0; i + 1 < all.size(); ++i) {
      const RougeL one = rouge_l(given, decode_utf8(all[i]));
      best.f = std::max(best.f, one.f);
      best.longest_walk = std::max(best.longest_walk, one.longest_walk);
    }
    out.detail["rouge_l"] = best.f;
    if (best.longest_walk > kPeerWalk) out.detail["peer_recursion_error"] = true;
    if (options.embedding_endpoint.empty()) {
      return without(std::move(out), "no embedding model: give --embedding-endpoint");
    }
    const Result<double> similarity =
        best_similarity(options.embedding_endpoint, options.embedding_model, answers, text);
    if (!similarity.ok()) return similarity.status();
    out.detail["similarity"] = similarity.value();
    out.value = 0.5 * similarity.value() + 0.5 * best.f;
    if (out.value < 0.0 || out.value > 1.0) {
      out.why = "the metric left 0..1, which the benchmark's runner counts as 0";
      out.value = 0.0;
    }
    return out;
  }
};

}  // namespace

std::unique_ptr<Benchmark> make_longbench_pro() { return std::make_unique<LongBenchPro>(); }

}  // namespace bitdecoding::eval
