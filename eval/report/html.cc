// SPDX-License-Identifier: Apache-2.0
#include "report/html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace bitdecoding::eval {
namespace {

constexpr double kWidth = 720.0;
constexpr const char* kReplacement = "\xEF\xBF\xBD";

// Length of the valid UTF-8 sequence at `at`, 0 when there is none.
std::size_t utf8_length(const std::string& text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  const std::size_t length = lead < 0x80   ? 1
                             : lead < 0xC2 ? 0
                             : lead < 0xE0 ? 2
                             : lead < 0xF0 ? 3
                             : lead < 0xF5 ? 4
                                           : 0;
  if (length == 0 || at + length > text.size()) return 0;
  for (std::size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xC0U) != 0x80U) return 0;
  }
  if (length == 3) {
    const unsigned second = byte(at + 1);
    if ((lead == 0xE0 && second < 0xA0) || (lead == 0xED && second >= 0xA0)) return 0;
  }
  if (length == 4) {
    const unsigned second = byte(at + 1);
    if ((lead == 0xF0 && second < 0x90) || (lead == 0xF4 && second >= 0x90)) return 0;
  }
  return length;
}

std::string svg_text(double x, double y, const std::string& text, const char* anchor,
                     const char* css_class) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" class=\"{}\">{}</text>\n",
                     x, y, anchor, css_class, html_escape(text));
}

std::string figure(const std::string& title, double height, const std::string& body) {
  return fmt::format(
      "<figure><figcaption>{0}</figcaption>\n<svg viewBox=\"0 0 {1:.0f} {2:.0f}\" role=\"img\" "
      "aria-label=\"{0}\">\n{3}</svg></figure>\n",
      html_escape(title), kWidth, height, body);
}

std::string power_label(int exponent) {
  return exponent >= -4 && exponent <= 3 ? fmt::format("{:g}", std::pow(10.0, exponent))
                                         : fmt::format("1e{}", exponent);
}

// The frame of a line chart: where values lie on the page.
struct Frame {
  double left = 56.0, right = kWidth - 16.0, top = 12.0, bottom = 250.0;
  double x_first = 0.0, x_last = 1.0;
  int low = 0, high = 1;  // powers of ten

  double x(double value) const {
    return left + (right - left) * (value - x_first) / std::max(x_last - x_first, 1e-300);
  }
  double y(double value) const {
    const double power = value > 0.0 ? std::log10(value) : low;
    return bottom - (bottom - top) * std::clamp((power - low) / (high - low), 0.0, 1.0);
  }
};

Frame frame_for(const std::vector<Curve>& curves, double x_first, double x_step) {
  Frame frame;
  double smallest = 1e300;
  double largest = 0.0;
  std::size_t points = 2;
  for (const Curve& curve : curves) {
    points = std::max(points, curve.y.size());
    for (const double value : curve.y) {
      if (!(value > 0.0) || !std::isfinite(value)) continue;
      smallest = std::min(smallest, value);
      largest = std::max(largest, value);
    }
  }
  frame.x_first = x_first;
  frame.x_last = x_first + x_step * static_cast<double>(points - 1);
  if (largest > 0.0) {
    // A lone tiny value must not flatten everything else.
    frame.high = static_cast<int>(std::ceil(std::log10(largest)));
    frame.low = std::max(static_cast<int>(std::floor(std::log10(smallest))), frame.high - 7);
  }
  frame.high = std::max(frame.high, frame.low + 1);
  return frame;
}

std::string grid_of(const Frame& frame, const std::string& x_title) {
  std::string out;
  for (int power = frame.low; power <= frame.high; ++power) {
    const double y = frame.y(std::pow(10.0, power));
    out += fmt::format("<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" class=\"grid\"/>\n",
                       frame.left, frame.right, y, y);
    out += svg_text(frame.left - 8, y + 4, power_label(power), "end", "tick");
  }
  const double span = frame.x_last - frame.x_first;
  const double step = span > 3000 ? 1024 : span > 1200 ? 512 : 256;
  for (double x = std::ceil(frame.x_first / step) * step; x <= frame.x_last; x += step) {
    out += svg_text(frame.x(x), frame.bottom + 18, fmt::format("{:.0f}", x), "middle", "tick");
  }
  out += svg_text((frame.left + frame.right) / 2, frame.bottom + 38, x_title, "middle", "tick");
  return out;
}

}  // namespace

std::string html_escape(const std::string& text) {
  std::string out;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    if (length == 0) {
      out += kReplacement;
      ++at;
      continue;
    }
    const char c = text[at];
    if (length > 1) {
      out.append(text, at, length);
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '"') {
      out += "&quot;";
    } else if (c == '\'') {
      out += "&#39;";
    } else if (c == '\n' || c == '\t' || (c >= ' ' && c != 0x7F)) {
      out += c;
    }
    at += length;
  }
  return out;
}

std::string bar_chart(const std::string& title, const std::vector<Bar>& bars) {
  constexpr double kLeft = 170.0;
  constexpr double kRow = 30.0;
  constexpr double kRoom = 170.0;  // for the text behind the longest bar
  double largest = 0.0;
  for (const Bar& bar : bars) largest = std::max(largest, std::isfinite(bar.value) ? bar.value : 0);
  std::string body;
  double y = 6.0;
  for (const Bar& bar : bars) {
    const double share = largest > 0.0 && std::isfinite(bar.value) ? bar.value / largest : 0.0;
    const double length = std::max((kWidth - kLeft - kRoom) * std::max(share, 0.0), 1.0);
    body += svg_text(kLeft - 10, y + 15, bar.label, "end", "label");
    body += fmt::format(
        "<rect x=\"{}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"20\" rx=\"3\" class=\"s{}\"/>\n",
        kLeft, y, length, bar.series);
    body += svg_text(kLeft + length + 8, y + 15, bar.text, "start", "value");
    y += kRow;
  }
  return figure(title, y + 2, body);
}

std::string log_line_chart(const std::string& title, const std::string& x_title,
                           const std::vector<Curve>& curves, double x_first, double x_step) {
  const Frame frame = frame_for(curves, x_first, x_step);
  std::string body = grid_of(frame, x_title);
  double legend_x = frame.left;
  double legend_y = frame.bottom + 58;
  for (const Curve& curve : curves) {
    std::string points;
    for (std::size_t i = 0; i < curve.y.size(); ++i) {
      if (!std::isfinite(curve.y[i])) continue;
      points += fmt::format("{:.1f},{:.1f} ", frame.x(x_first + x_step * static_cast<double>(i)),
                            frame.y(curve.y[i]));
    }
    body += fmt::format("<polyline points=\"{}\" class=\"line t{}\"/>\n", points, curve.series);
    const double width = 48 + 8.0 * static_cast<double>(curve.label.size());
    if (legend_x > frame.left && legend_x + width > kWidth) {
      legend_x = frame.left;
      legend_y += 22;
    }
    body += fmt::format(
        "<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" class=\"line t{}\"/>\n",
        legend_x, legend_x + 22, legend_y - 4, legend_y - 4, curve.series);
    body += svg_text(legend_x + 28, legend_y, curve.label, "start", "label");
    legend_x += width;
  }
  return figure(title, legend_y + 10, body);
}

std::string heat_map(const HeatMap& map) {
  constexpr double kLeft = 56.0;
  constexpr double kTop = 34.0;
  constexpr double kRow = 19.0;
  std::size_t columns = 1;
  double most = 0.0;
  for (const std::vector<double>& row : map.values) {
    columns = std::max(columns, row.size());
    for (const double x : row) most = std::isfinite(x) ? std::max(most, x) : most;
  }
  const double width = std::min((kWidth - kLeft) / static_cast<double>(columns), 110.0);
  std::string body = svg_text(0, kTop - 20, map.row_title, "start", "tick") +
                     svg_text(kLeft, kTop - 20, map.column_title, "start", "tick");
  for (std::size_t c = 0; c < columns; ++c) {
    body += svg_text(kLeft + (static_cast<double>(c) + 0.5) * width, kTop - 4, std::to_string(c),
                     "middle", "tick");
  }
  for (std::size_t r = 0; r < map.values.size(); ++r) {
    const double y = kTop + static_cast<double>(r) * kRow;
    body += svg_text(kLeft - 10, y + 14, map.rows[r], "end", "tick");
    for (std::size_t c = 0; c < map.values[r].size(); ++c) {
      const double x = map.values[r][c];
      if (!std::isfinite(x)) continue;
      const double left = kLeft + static_cast<double>(c) * width;
      body += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"2\" "
          "class=\"s2\" fill-opacity=\"{:.3f}\"/>\n",
          left, y, width - 2, kRow - 2, most > 0 ? 0.85 * x / most : 0.0);
      body += svg_text(left + width / 2, y + 13.5, fmt::format("{:.3f}", x), "middle", "cell");
    }
  }
  return figure(map.title, kTop + static_cast<double>(map.values.size()) * kRow + 6, body);
}

}  // namespace bitdecoding::eval
