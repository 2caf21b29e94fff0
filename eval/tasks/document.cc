// SPDX-License-Identifier: Apache-2.0
#include "tasks/document.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <random>
#include <sstream>

namespace bitdecoding::eval {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }

std::ptrdiff_t common_length(const Tokens& a, const Tokens& b) {
  const auto [end, unused] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  return end - a.begin();
}

// What two chats have in common before and behind their texts is the chat template.
Status read_template(const Client& client, Document* document) {
  Result<Tokens> one = client.tokenize_chat("A");
  if (!one.ok()) return one.status();
  Result<Tokens> other = client.tokenize_chat("B");
  if (!other.ok()) return other.status();
  Tokens a = one.take();
  Tokens b = other.take();
  document->head.assign(a.begin(), a.begin() + common_length(a, b));
  std::reverse(a.begin(), a.end());
  std::reverse(b.begin(), b.end());
  document->end.assign(a.begin(), a.begin() + common_length(a, b));
  std::reverse(document->end.begin(), document->end.end());
  if (document->head.size() + document->end.size() < a.size()) return {};
  return {
      StatusCode::kUnsupported,
      "The model's chat template gives the same tokens for different texts, so no prompt can be "
      "built with it."};
}

}  // namespace

Tokens Document::prefix(std::size_t tokens) const {
  Tokens out = head;
  const std::size_t from_body =
      std::min(tokens > head.size() ? tokens - head.size() : 0, body.size());
  out.insert(out.end(), body.begin(), body.begin() + static_cast<std::ptrdiff_t>(from_body));
  return out;
}

std::string needle_sentence(const Needle& needle) {
  return fmt::format("The pass key of the {0} is {1}. Remember it. {1} is the pass key of the {0}.",
                     needle.place, needle.code);
}

std::string needle_question(const Needle& needle) {
  return fmt::format("What is the pass key of the {}?", needle.place);
}

bool needle_found(const Needle& needle, const std::string& answer) {
  for (std::size_t at = answer.find(needle.code); at != std::string::npos;
       at = answer.find(needle.code, at + 1)) {
    const std::size_t end = at + needle.code.size();
    const bool digit_before = at > 0 && is_digit(answer[at - 1]);
    const bool digit_after = end < answer.size() && is_digit(answer[end]);
    if (!digit_before && !digit_after) return true;
  }
  return false;
}

std::vector<Needle> make_needles(unsigned seed) {
  // Taken from the generator's bits directly: distributions differ between standard libraries.
  std::mt19937 random(seed);
  std::vector<Needle> out;
  for (const char* place :
       {"lighthouse", "orchard", "harbour", "library", "bakery", "museum", "stable", "tower"}) {
    std::string code;
    do {
      code = std::to_string(10000 + random() % 90000);
    } while (std::any_of(out.begin(), out.end(), [&](const Needle& n) { return n.code == code; }));
    out.push_back({place, code, 0});
  }
  return out;
}

std::string hide_needles(const std::string& text, const std::vector<Needle>& needles,
                         std::size_t first_at, std::size_t last_at,
                         std::vector<std::size_t>* ends) {
  std::string out;
  ends->clear();
  std::size_t hidden = 0;
  const auto target = [&](std::size_t i) {
    const std::size_t steps = std::max<std::size_t>(needles.size() - 1, 1);
    return first_at + (last_at > first_at ? (last_at - first_at) * i / steps : 0);
  };
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t gap = text.find("\n\n", begin);
    const std::size_t end = gap == std::string::npos ? text.size() : gap + 2;
    // Before a paragraph that would take the text past the needle's place.
    while (hidden < needles.size() && out.size() + (end - begin) > target(hidden)) {
      out += needle_sentence(needles[hidden++]);
      ends->push_back(out.size());
      out += "\n\n";
    }
    out.append(text, begin, end - begin);
    begin = end;
  }
  for (; hidden < needles.size(); ++hidden) {
    out += "\n\n" + needle_sentence(needles[hidden]);
    ends->push_back(out.size());
  }
  return out;
}

Result<Tokens> question_tail(const Client& client, const Document& document,
                             const std::string& question) {
  Result<Tokens> tail = client.tokenize("\n\n" + question);
  if (!tail.ok()) return tail.status();
  tail.value().insert(tail.value().end(), document.end.begin(), document.end.end());
  if (tail.value().size() > kTailTokens) {
    return Status(
        StatusCode::kUnsupported,
        fmt::format("A question with the end of the model's chat template takes {} tokens, "
                    "but only {} are kept free for it.",
                    tail.value().size(), kTailTokens));
  }
  return tail;
}

Result<Document> make_document(const Client& client, const std::string& path, unsigned seed,
                               std::size_t first_needle_tokens, std::size_t needle_tokens) {
  std::ifstream file(path);
  std::stringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  if (!file || text.empty()) {
    return Status(StatusCode::kNotFound,
                  fmt::format("Cannot read the text {}; name another text file of at least 40 kB "
                              "with --text.",
                              path));
  }
  Result<Tokens> plain = client.tokenize(text);
  if (!plain.ok()) return plain.status();
  const double characters_per_token =
      static_cast<double>(text.size()) / static_cast<double>(plain.value().size());
  const auto characters = [&](double tokens) {
    return static_cast<std::size_t>(tokens * characters_per_token);
  };
  Document out;
  out.source = path;
  out.needles = make_needles(seed);
  std::vector<std::size_t> ends;
  const std::string hidden =
      hide_needles(text, out.needles, characters(0.55 * static_cast<double>(first_needle_tokens)),
                   characters(0.85 * static_cast<double>(needle_tokens)), &ends);

  if (Status status = read_template(client, &out); !status.ok()) return status;
  Result<Tokens> body = client.tokenize(hidden);
  if (!body.ok()) return body.status();
  out.body = body.take();
  for (std::size_t i = 0; i < ends.size(); ++i) {
    Result<Tokens> before = client.tokenize(hidden.substr(0, ends[i]));
    if (!before.ok()) return before.status();
    out.needles[i].end_token = out.head.size() + before.value().size();
  }
  if (out.needles.front().end_token + kTailTokens > first_needle_tokens ||
      out.needles.back().end_token + kTailTokens > needle_tokens) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("The text {} has paragraphs too long to hide a sentence in its first "
                              "{} tokens; name another with --text.",
                              path, first_needle_tokens));
  }
  return out;
}

}  // namespace bitdecoding::eval
