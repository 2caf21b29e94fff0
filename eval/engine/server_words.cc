// SPDX-License-Identifier: Apache-2.0
#include "engine/server_words.h"

#include <nlohmann/json.hpp>

namespace bitdecoding::eval {

using Json = nlohmann::json;

std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text.substr(0, 300)) out += c >= ' ' && c < 0x7F ? c : '.';
  return out;
}

std::string server_words(const std::string& body) {
  const Json answer = Json::parse(body, nullptr, false);
  if (answer.is_object()) {
    const Json& error =
        answer.contains("error") && answer["error"].is_object() ? answer["error"] : answer;
    if (error.contains("message") && error["message"].is_string()) {
      return error["message"].get<std::string>().substr(0, 500);
    }
    if (answer.contains("detail")) return printable(answer["detail"].dump());
  }
  return body.empty() ? "(no words)" : printable(body);
}

}  // namespace bitdecoding::eval
