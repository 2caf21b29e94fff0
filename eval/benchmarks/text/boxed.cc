// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/text/boxed.h"

#include <algorithm>
#include <cctype>

namespace bitdecoding::eval {
namespace {

void remove_all(std::string& text, std::string_view part) {
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at)) {
    text.erase(at, part.size());
  }
}

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

// Behind the brace that closes the one before `begin`; npos when none does. A backslash makes a
// brace a sign.
std::size_t behind_group(std::string_view text, std::size_t begin) {
  int depth = 1;
  for (std::size_t i = begin; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '{') {
      ++depth;
    } else if (text[i] == '}' && --depth == 0) {
      return i + 1;
    }
  }
  return std::string_view::npos;
}

}  // namespace

std::vector<std::string> boxes(std::string_view text) {
  constexpr std::string_view kBox = "\\boxed";
  std::vector<std::string> out;
  for (std::size_t at = text.find(kBox); at != std::string_view::npos; at = text.find(kBox, at)) {
    at += kBox.size();
    const std::size_t brace = text.find_first_not_of(" \t\n", at);
    if (brace == std::string_view::npos || text[brace] != '{') continue;
    const std::size_t end = behind_group(text, brace + 1);
    if (end == std::string_view::npos) continue;
    out.emplace_back(text.substr(brace + 1, end - brace - 2));
    at = end;
  }
  return out;
}

std::optional<std::int64_t> boxed_integer(std::string_view content) {
  std::string text(content);
  for (const char* part : {"\\textbf", "\\text", "\\mathrm", "\\mathbf", "\\displaystyle",
                           "^{\\circ}", "^\\circ", "\\!", "\\,", "\\;", "\\ ", "$", "{", "}"}) {
    remove_all(text, part);
  }
  std::erase_if(text, [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; });
  if (const std::size_t equals = text.rfind('='); equals != std::string::npos) {
    text.erase(0, equals + 1);
  }
  if (!text.empty() && text.back() == '.') text.pop_back();
  if (const std::size_t point = text.find('.'); point != std::string::npos) {
    if (text.find_first_not_of('0', point + 1) != std::string::npos) return std::nullopt;
    text.erase(point);
  }
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.erase(0, 1);
  if (text.empty() || !std::all_of(text.begin(), text.end(), is_digit)) return std::nullopt;
  text.erase(0, std::min(text.find_first_not_of('0'), text.size() - 1));
  if (text.size() > 18) return std::nullopt;
  const std::int64_t value = std::stoll(text);
  return negative ? -value : value;
}

}  // namespace bitdecoding::eval
