// SPDX-License-Identifier: Apache-2.0
#include "calibrate/corpus.h"

#include <fmt/format.h>

#include <filesystem>
#include <sstream>

#include "io/calibration_identity.h"
#include "io/file.h"

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 30;

bool is_message(const Json& value) {
  return value.is_object() && value.contains("role") && value["role"].is_string() &&
         value.contains("content") && value["content"].is_string();
}

bool is_conversation(const Json& value) {
  if (!value.is_array() || value.empty()) return false;
  for (const Json& message : value) {
    if (!is_message(message)) return false;
  }
  return true;
}

Result<CalibrationText> read_line(const std::string& line, const std::string& name) {
  const Json json = Json::parse(line, nullptr, false);
  CalibrationText out;
  out.name = name;
  if (json.is_object() && json.contains("text") && json["text"].is_string()) {
    out.text = json["text"].get<std::string>();
    if (!out.text.empty()) return out;
  }
  if (json.is_object() && json.contains("messages") && is_conversation(json["messages"])) {
    for (const Json& message : json["messages"]) {
      out.messages.push_back({{"role", message["role"]}, {"content", message["content"]}});
    }
    return out;
  }
  return Status(StatusCode::kInvalidArgument,
                fmt::format("{}: expected {{\"text\": \"...\"}} or {{\"messages\": [{{\"role\": "
                            "\"user\", \"content\": \"...\"}}, ...]}}{}",
                            name, json.is_discarded() ? ", and this is no JSON" : ""));
}

}  // namespace

Result<std::vector<CalibrationText>> read_corpus(const std::string& path) {
  const Result<std::string> content = read_file(path, kMaxBytes);
  if (!content.ok()) return content.status();
  std::vector<CalibrationText> texts;
  std::istringstream lines(content.value());
  const std::string file = std::filesystem::path(path).filename().string();
  int number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    Result<CalibrationText> text = read_line(line, fmt::format("{} line {}", file, number));
    if (!text.ok()) return text.status();
    texts.push_back(text.take());
  }
  if (!texts.empty()) return texts;
  return Status(StatusCode::kInvalidArgument,
                fmt::format("'{}' holds no text; expected one JSON object a line, {{\"text\": "
                            "\"...\"}} or {{\"messages\": [...]}}",
                            path));
}

std::string corpus_hash(const std::vector<CalibrationText>& texts) {
  std::string all;
  for (const CalibrationText& text : texts) {
    all += text.text.empty() ? text.messages.dump(-1, ' ', false, Json::error_handler_t::replace)
                             : text.text;
    all += '\0';
  }
  return content_hash(all);
}

}  // namespace bitdecoding::eval
