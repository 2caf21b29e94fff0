// SPDX-License-Identifier: Apache-2.0
// A table on the terminal: columns as wide as their contents, numbers to the right.
#pragma once

#include <string>
#include <vector>

namespace bitdecoding::eval {

struct Style {
  bool color = false;
};

// Colour only for a terminal that can show it, and never with NO_COLOR set.
Style style_of(int file_descriptor);

enum class Tone { kPlain, kBold, kDim, kGood, kBad };
std::string toned(const std::string& text, Tone tone, Style style);

struct Table {
  std::vector<std::string> header;
  std::vector<std::vector<std::string>> rows;
};

// Columns of what its terminal shows, counting UTF-8 code points as one each.
std::size_t display_width(const std::string& text);
// The first column to the left, the others to the right.
std::string format_table(const Table& table, Style style);

}  // namespace bitdecoding::eval
