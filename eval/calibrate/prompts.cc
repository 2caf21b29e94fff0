// SPDX-License-Identifier: Apache-2.0
#include "calibrate/prompts.h"

#include <fmt/format.h>

#include <algorithm>

namespace bitdecoding::eval {
namespace {

// For a model without a chat template.
std::string plain_conversation(const nlohmann::json& messages) {
  std::string out;
  for (const auto& message : messages) {
    out += fmt::format("{}: {}\n\n", message.value("role", ""), message.value("content", ""));
  }
  return out;
}

struct Tokenized {
  Tokens head;
  Tokens body;
};

Result<Tokenized> tokenize_text(const Client& client, const std::string& text) {
  Result<Tokens> plain = client.tokenize(text, false);
  if (!plain.ok()) return plain.status();
  Result<Tokens> special = client.tokenize(text, true);
  if (!special.ok()) return special.status();
  Tokenized out;
  const std::size_t more =
      special.value().size() - std::min(special.value().size(), plain.value().size());
  out.head.assign(special.value().begin(),
                  special.value().begin() + static_cast<std::ptrdiff_t>(more));
  // What stands behind a text is no part of a beginning.
  if (!std::equal(plain.value().begin(), plain.value().end(),
                  special.value().begin() + static_cast<std::ptrdiff_t>(more),
                  special.value().end())) {
    out.head.clear();
  }
  out.body = plain.take();
  return out;
}

Result<Tokenized> tokenize_one(const Client& client, const CalibrationText& text) {
  if (!text.text.empty()) return tokenize_text(client, text.text);
  Result<Tokens> chat = client.tokenize_messages(text.messages);
  if (chat.ok()) return Tokenized{{}, chat.take()};
  if (text.name.rfind("builtin", 0) == 0) {
    return tokenize_text(client, plain_conversation(text.messages));
  }
  return Status(chat.status().code(),
                fmt::format("{}: the model's chat template does not take these messages; give "
                            "{{\"text\": ...}} instead. {}",
                            text.name, chat.status().message()));
}

}  // namespace

void cut_prompts(const std::string& name, const Tokens& head, const Tokens& body,
                 std::size_t tokens, std::size_t prompt_tokens, std::size_t least,
                 std::vector<CalibrationPrompt>* prompts, std::size_t* total) {
  const std::size_t room = prompt_tokens - std::min(head.size(), prompt_tokens - 1);
  int part = 0;
  for (std::size_t begin = 0; begin < body.size() && *total < tokens; begin += room) {
    const std::size_t size = std::min(
        {room, body.size() - begin, tokens - *total - std::min(tokens - *total, head.size())});
    CalibrationPrompt prompt;
    prompt.name = body.size() > room ? fmt::format("{}, part {}", name, ++part) : name;
    prompt.tokens = head;
    const auto from = body.begin() + static_cast<std::ptrdiff_t>(begin);
    prompt.tokens.insert(prompt.tokens.end(), from, from + static_cast<std::ptrdiff_t>(size));
    if (prompt.tokens.size() <= least) break;
    *total += prompt.tokens.size();
    prompts->push_back(std::move(prompt));
  }
}

Result<std::vector<CalibrationPrompt>> make_prompts(const Client& client,
                                                    const std::vector<CalibrationText>& texts,
                                                    std::size_t tokens, std::size_t prompt_tokens,
                                                    std::size_t least) {
  std::vector<CalibrationPrompt> prompts;
  std::size_t total = 0;
  for (const CalibrationText& text : texts) {
    if (total >= tokens) break;
    const Result<Tokenized> parts = tokenize_one(client, text);
    if (!parts.ok()) return parts.status();
    cut_prompts(text.name, parts.value().head, parts.value().body, tokens, prompt_tokens, least,
                &prompts, &total);
  }
  return prompts;
}

}  // namespace bitdecoding::eval
