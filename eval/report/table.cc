// SPDX-License-Identifier: Apache-2.0
#include "report/table.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace bitdecoding::eval {
namespace {

constexpr std::size_t kGap = 2;

std::string padded(const std::string& text, std::size_t width, bool left) {
  const std::size_t used = display_width(text);
  const std::string space(width > used ? width - used : 0, ' ');
  return left ? text + space : space + text;
}

std::string format_row(const std::vector<std::string>& cells,
                       const std::vector<std::size_t>& widths) {
  std::string line;
  for (std::size_t i = 0; i < widths.size(); ++i) {
    if (i > 0) line += std::string(kGap, ' ');
    line += padded(i < cells.size() ? cells[i] : "", widths[i], i == 0);
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

Style style_of(int file_descriptor) {
  const char* no_color = std::getenv("NO_COLOR");
  const char* terminal = std::getenv("TERM");
  const bool refused = no_color != nullptr && *no_color != '\0';
  const bool dumb = terminal == nullptr || std::string_view(terminal) == "dumb";
  return {isatty(file_descriptor) == 1 && !refused && !dumb};
}

std::string toned(const std::string& text, Tone tone, Style style) {
  if (!style.color) return text;
  switch (tone) {
    case Tone::kBold:
      return "\033[1m" + text + "\033[0m";
    case Tone::kDim:
      return "\033[2m" + text + "\033[0m";
    case Tone::kGood:
      return "\033[32m" + text + "\033[0m";
    case Tone::kBad:
      return "\033[31m" + text + "\033[0m";
    case Tone::kPlain:
      break;
  }
  return text;
}

std::size_t display_width(const std::string& text) {
  return static_cast<std::size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
  }));
}

std::string format_table(const Table& table, Style style) {
  std::size_t columns = table.header.size();
  for (const auto& row : table.rows) columns = std::max(columns, row.size());
  std::vector<std::size_t> widths(columns, 0);
  const auto widen = [&](const std::vector<std::string>& cells) {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      widths[i] = std::max(widths[i], display_width(cells[i]));
    }
  };
  widen(table.header);
  for (const auto& row : table.rows) widen(row);
  std::size_t total = columns > 0 ? kGap * (columns - 1) : 0;
  for (const std::size_t width : widths) total += width;
  std::string out = toned(format_row(table.header, widths), Tone::kBold, style) + "\n";
  out += toned(std::string(total, '-'), Tone::kDim, style) + "\n";
  for (const auto& row : table.rows) out += format_row(row, widths) + "\n";
  return out;
}

}  // namespace bitdecoding::eval
