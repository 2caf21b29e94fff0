// SPDX-License-Identifier: Apache-2.0
// HTML and SVG by hand: escaping and a few chart shapes.
#pragma once

#include <string>
#include <vector>

namespace bitdecoding::eval {

// Safe as text and inside a quoted attribute; bytes that are no UTF-8 become U+FFFD and control
// characters other than newline and tab vanish.
std::string html_escape(const std::string& text);

struct Bar {
  std::string label;
  double value = 0.0;
  std::string text;  // written at its end
  int series = 0;    // chooses the colour
};
// Horizontal bars from zero.
std::string bar_chart(const std::string& title, const std::vector<Bar>& bars);

struct Curve {
  std::string label;
  std::vector<double> y;
  int series = 0;
};
// Curves over a common x from `x_first` in steps of `x_step`, with a logarithmic y axis. Values of
// zero or below lie at the bottom.
std::string log_line_chart(const std::string& title, const std::string& x_title,
                           const std::vector<Curve>& curves, double x_first, double x_step);

struct HeatMap {
  std::string title, row_title, column_title;
  std::vector<std::string> rows;
  std::vector<std::vector<double>> values;  // of each row; NaN = nothing there
};
// Cells from the page's colour (zero) to the full one (the largest value), each with its number.
std::string heat_map(const HeatMap& map);

}  // namespace bitdecoding::eval
