// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/mrcr/mrcr.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "benchmarks/data_file.h"
#include "benchmarks/mrcr/sequence_matcher.h"
#include "benchmarks/protocol.h"
#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kFile = "mrcr/_filtered_le98048.jsonl";

// One message of the list in `prompt`; false when it has not the shape.
bool add_message(const nlohmann::json& message, std::vector<ChatMessage>& out) {
  if (!message.is_object() || !message.contains("role") || !message["role"].is_string() ||
      !message.contains("content") || !message["content"].is_string()) {
    return false;
  }
  const std::string role = message["role"];
  if (role != "user" && role != "assistant" && role != "system") return false;
  out.push_back({role, message["content"]});
  return true;
}

// `prompt` is a JSON list as text; later exports have the list itself.
std::vector<ChatMessage> messages(Fields& fields) {
  const nlohmann::json* value = fields.find({"prompt"});
  if (value == nullptr) {
    fields.wrong("has no field 'prompt'");
    return {};
  }
  nlohmann::json list = *value;
  if (value->is_string()) {
    list = nlohmann::json::parse(value->get_ref<const std::string&>(), nullptr, false);
    if (list.is_discarded()) {
      fields.wrong("'prompt' is not a JSON list of messages");
      return {};
    }
  }
  std::vector<ChatMessage> out;
  if (!list.is_array() || list.empty()) {
    fields.wrong("'prompt' is not a JSON list of messages");
    return {};
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (!add_message(list[i], out)) {
      fields.wrong(
          fmt::format("message {} of 'prompt' is not {{\"role\": user, assistant or "
                      "system, \"content\": text}}",
                      i + 1));
      return {};
    }
  }
  if (out.back().role != "user") fields.wrong("'prompt' does not end with a user's message");
  return out;
}

class Mrcr : public ProtocolBenchmark {
 public:
  Mrcr() : ProtocolBenchmark({"mrcr", "MRCR", true, 4096, 0}) {}

  std::vector<MissingItem> missing(const LoadOptions& options) const override {
    return missing_data(options, kFile, "",
                        "openai/mrcr and keeps the prompts of at most 98,048 tokens, counted by "
                        "the model's tokenizer",
                        "MIT");
  }

  Result<LoadedRows> load(const LoadOptions& options) const override {
    return load_file(options, kFile, missing(options), row);
  }

  Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                      const LoadOptions& options) const override {
    // The template's line ends between thinking part and answer are not the model's answer.
    std::string answer = answer_of(reply, options.model);
    if (answer.size() != reply.size()) answer.erase(0, answer.find_first_not_of("\r\n "));
    const auto& wanted = row.reference["answer"].get_ref<const std::string&>();
    const auto& prefix = row.reference["prefix"].get_ref<const std::string&>();
    Score out;
    out.value = mrcr_grade(answer, wanted, prefix);
    const bool begins = answer.starts_with(prefix);
    if (begins) {
      out.extracted = answer.substr(prefix.size());
    } else {
      out.why = answer.empty() && !reply.empty()
                    ? "nothing outside the thinking part"
                    : "the reply does not begin with the random string";
    }
    out.detail = {{"prefix", begins}};
    return out;
  }

  std::vector<std::string> groups() const override { return {"needles", "length"}; }

 private:
  static BenchmarkRow row(Fields& fields, int number) {
    BenchmarkRow out;
    out.messages = messages(fields);
    const std::string answer = fields.text({"answer"});
    const std::string prefix = fields.text({"random_string_to_prepend"});
    const std::int64_t needles = fields.integer({"n_needles"});
    if (!answer.starts_with(prefix)) {
      fields.wrong("'answer' does not begin with 'random_string_to_prepend'");
    }
    out.reference = {{"answer", answer}, {"prefix", prefix}};
    const std::string id = fields.optional_text({"id"});
    out.id = id.empty() ? fmt::format("{}/{}", number, prefix) : id;
    out.labels["needles"] = std::to_string(needles);
    const std::int64_t tokens =
        fields.optional_integer({"n_tokens", "prompt_tokens", "token_length"}, 0);
    std::size_t characters = 0;
    for (const ChatMessage& message : out.messages) characters += message.content.size();
    out.stated_tokens = static_cast<std::size_t>(std::max<std::int64_t>(tokens, 0));
    // Without a count, four characters a token: right for all but prompts near a bin's end.
    out.labels["length"] = length_bin(tokens > 0 ? out.stated_tokens : characters / 4);
    return out;
  }
};

}  // namespace

double mrcr_grade(std::string_view reply, std::string_view answer, std::string_view prefix) {
  if (!reply.starts_with(prefix)) return 0.0;
  reply.remove_prefix(prefix.size());
  if (answer.starts_with(prefix)) answer.remove_prefix(prefix.size());
  return sequence_ratio(decode_utf8(reply), decode_utf8(answer));
}

double area_under_curve(std::vector<std::pair<double, double>> points) {
  if (points.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(points.begin(), points.end());
  if (points.size() == 1) return points[0].second;
  double area = 0.0;
  for (std::size_t i = 1; i < points.size(); ++i) {
    const double width = std::log2(points[i].first) - std::log2(points[i - 1].first);
    area += width * (points[i].second + points[i - 1].second) / 2;
  }
  return area / (std::log2(points.back().first) - std::log2(points.front().first));
}

std::string length_bin(std::size_t tokens) {
  std::size_t end = 8192;
  while (end < tokens) end *= 2;
  return std::to_string(end);
}

std::unique_ptr<Benchmark> make_mrcr() { return std::make_unique<Mrcr>(); }

}  // namespace bitdecoding::eval
