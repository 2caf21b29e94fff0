// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/ruler_niah/ruler_niah.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "benchmarks/data_file.h"
#include "benchmarks/protocol.h"
#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kFolder = "ruler";
constexpr std::string_view kFile = "ruler/niah_122880.jsonl";

// "niah_single_1" of NVIDIA's files is "single_1" of ours.
std::string variant_name(const std::string& name) {
  constexpr std::string_view kPrefix = "niah_";
  return name.starts_with(kPrefix) ? name.substr(kPrefix.size()) : name;
}

// The number in "niah_NUMBER.jsonl", 0 when it is another name.
std::size_t file_length(const std::string& name) {
  constexpr std::string_view kPrefix = "niah_";
  constexpr std::string_view kSuffix = ".jsonl";
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return 0;
  const std::string digits =
      name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size());
  if (digits.empty() || digits.size() > 9 ||
      digits.find_first_not_of("0123456789") != std::string::npos) {
    return 0;
  }
  return std::stoul(digits);
}

// All of `ruler/niah_NUMBER.jsonl`, the shortest prompts first.
std::vector<std::pair<std::size_t, std::string>> data_files(const LoadOptions& options) {
  std::vector<std::pair<std::size_t, std::string>> out;
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::path(options.data_folder) / kFolder;
  for (std::filesystem::directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    const std::size_t length = file_length(it->path().filename().string());
    if (length > 0) out.emplace_back(length, it->path().string());
  }
  std::sort(out.begin(), out.end());
  return out;
}

std::vector<std::string> references(Fields& fields) {
  const nlohmann::json* value = fields.find({"outputs", "answer", "answers", "references"});
  if (value == nullptr) {
    fields.wrong("has no field 'outputs'");
    return {};
  }
  std::vector<std::string> out;
  const nlohmann::json list = value->is_array() ? *value : nlohmann::json::array({*value});
  for (const nlohmann::json& item : list) {
    if (item.is_number_integer()) {
      out.push_back(item.dump());
    } else if (item.is_string() && !item.get_ref<const std::string&>().empty()) {
      out.push_back(item.get<std::string>());
    } else {
      fields.wrong("'outputs' has " + json_kind(item) +
                   " where a string that is not empty belongs");
    }
  }
  if (out.empty()) fields.wrong("'outputs' is empty");
  return out;
}

class RulerNiah : public ProtocolBenchmark {
 public:
  RulerNiah() : ProtocolBenchmark({"ruler_niah", "RULER NIAH", false, 8192, 0}) {}

  std::vector<MissingItem> missing(const LoadOptions& options) const override {
    if (!data_files(options).empty()) return {};
    return {{fmt::format("data file {}", kFile),
             "Nothing needs to be downloaded: the generator writes it, for the model's own tokens "
             "(docs/evaluation.md).",
             "Apache-2.0 (made by this program)"}};
  }

  Result<LoadedRows> load(const LoadOptions& options) const override {
    LoadedRows loaded;
    const auto files = data_files(options);
    if (files.empty()) {
      return Status(StatusCode::kNotFound,
                    fmt::format("There is no '{}/{}'. {}", options.data_folder, kFile,
                                missing(options).front().how));
    }
    for (const auto& [length, path] : files) {
      const Status status =
          read_rows(path, loaded, [&, stated = length](const DataLine&, Fields& fields) {
            return row(fields, options.model, stated);
          });
      if (!status.ok()) return status;
    }
    return loaded;
  }

  Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                      const LoadOptions& options) const override {
    const std::string answer = answer_of(reply, options.model);
    Score out;
    const auto wanted = row.reference.get<std::vector<std::string>>();
    out.value = string_match_all(answer, wanted);
    const std::string folded = lower(answer);
    nlohmann::json found = nlohmann::json::array();
    for (const std::string& reference : wanted) {
      if (folded.find(lower(reference)) == std::string::npos) continue;
      found.push_back(reference);
      out.extracted += (out.extracted.empty() ? "" : ", ") + reference;
    }
    out.detail = {{"found", found.size()}, {"of", wanted.size()}};
    if (answer.empty() && !reply.empty()) out.why = "nothing outside the thinking part";
    return out;
  }

  std::vector<std::string> groups() const override { return {"length", "variant", "depth"}; }

 private:
  static BenchmarkRow row(Fields& fields, const ModelTraits& model, std::size_t file_tokens) {
    BenchmarkRow out;
    std::string text = fields.text({"input", "prompt"});
    // A model that thinks does not go on from half a sentence.
    const std::string prefix = fields.optional_text({"answer_prefix", "gen_prefix"});
    if (!model.thinking && !prefix.empty()) text += (prefix[0] == ' ' ? "" : " ") + prefix;
    out.messages = {{"user", std::move(text)}};
    out.reference = references(fields);
    const std::string variant =
        variant_name(fields.text({"variant", "task", "category", "subset", "dataset"}));
    const std::int64_t length =
        fields.optional_integer({"length", "max_length"}, static_cast<std::int64_t>(file_tokens));
    const std::int64_t index = fields.integer({"index", "id"});
    out.id = fmt::format("{}/{}/{}", length, variant, index);
    out.labels = {{"variant", variant}, {"length", std::to_string(length)}};
    const std::int64_t depth = fields.optional_integer({"depth"}, -1);
    if (depth >= 0) out.labels["depth"] = std::to_string(depth);
    out.stated_tokens = static_cast<std::size_t>(
        std::max<std::int64_t>(0, fields.optional_integer({"prompt_tokens"}, length)));
    return out;
  }
};

}  // namespace

double string_match_all(std::string_view reply, const std::vector<std::string>& references) {
  std::u32string text(strip(decode_utf8(reply)));
  std::replace_if(
      text.begin(), text.end(), [](char32_t c) { return c < 0x20; }, U'\n');
  const std::u32string folded = lower(strip(text));
  double found = 0.0;
  for (const std::string& reference : references) {
    if (folded.find(lower(decode_utf8(reference))) != std::u32string::npos) found += 1.0;
  }
  return references.empty() ? 0.0 : found / static_cast<double>(references.size());
}

double ruler_points(const std::vector<double>& scores) {
  double sum = 0.0;
  for (const double score : scores) sum += score;
  const double points = sum / static_cast<double>(scores.size()) * 100;
  // printf is exact and takes the tie to even, as Python's round does.
  return std::strtod(fmt::format("{:.2f}", points).c_str(), nullptr);
}

std::unique_ptr<Benchmark> make_ruler_niah() { return std::make_unique<RulerNiah>(); }

}  // namespace bitdecoding::eval
