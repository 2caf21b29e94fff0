// SPDX-License-Identifier: Apache-2.0
// The sensitivity report as a page that needs nothing else.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "probe/layers.h"
#include "report/html.h"
#include "report/page_style.h"

namespace bitdecoding::eval {
namespace {

constexpr std::size_t kListed = 12;  // layers in the list of those to keep

std::string heat(const SensitivityReport& report, const char* title,
                 std::vector<double> LayerReport::*values) {
  HeatMap map;
  map.title = title;
  map.row_title = "layer";
  map.column_title = "head";
  for (const LayerReport& layer : report.layers) {
    map.rows.push_back(std::to_string(layer.layer));
    map.values.push_back(layer.*values);
  }
  return heat_map(map);
}

std::string keep_table(const SensitivityReport& report) {
  std::string out =
      "<div class=\"scroll\"><table><tr><th>kept in BF16</th><th>KL of the last one alone</th>"
      "<th>smaller than BF16 by</th><th>memory lost</th></tr>\n";
  const std::vector<int> order = report.order();
  std::vector<int> kept;
  for (std::size_t i = 0; i < std::min(order.size(), kListed); ++i) {
    kept.push_back(order[i]);
    const auto layer = std::find_if(report.layers.begin(), report.layers.end(),
                                    [&](const LayerReport& l) { return l.layer == order[i]; });
    out += fmt::format("<tr><td>{}{}</td><td>{:.6f}</td><td>{:.2f}x</td><td>{:.1f} %</td></tr>\n",
                       i > 0 ? "… and " : "layer ", order[i], layer->kl, report.compression(i + 1),
                       100 * (report.compression(0) / report.compression(i + 1) - 1));
  }
  return out + "</table></div>\n";
}

std::string flag_line(const SensitivityReport& report, std::size_t count) {
  std::vector<int> kept = report.order();
  kept.resize(std::min(kept.size(), count));
  std::sort(kept.begin(), kept.end());
  return fmt::format("bitdecoding serve {} -- --kv-cache-dtype-skip-layers {}", report.model,
                     fmt::join(kept, " "));
}

}  // namespace

std::string sensitivity_page(const SensitivityReport& report) {
  std::vector<Bar> bars;
  for (const LayerReport& layer : report.layers) {
    bars.push_back({fmt::format("layer {}{}", layer.layer, layer.window > 0 ? " (window)" : ""),
                    layer.kl, fmt::format("{:.6f}", layer.kl), layer.window > 0 ? 1 : 2});
  }
  std::string body = fmt::format(
      "<h1>What FP4 costs, layer by layer</h1>\n<p class=\"lead\">{}, {} tokens of {}, {}. With "
      "all "
      "layers in FP4 the next token's distribution diverges from BF16's by {:.5f} nats.</p>\n",
      html_escape(report.model), report.tokens, html_escape(report.text), html_escape(report.date),
      report.kl_all);
  body += "<section><h2>Divergence with one layer alone in FP4</h2>\n" +
          fmt::format(
              "<p class=\"note\">Mean KL to BF16 in nats, from position {} on, prefilled in "
              "chunks so that earlier tokens are read from pages.</p>\n",
              report.first_scored) +
          bar_chart("KL, nats", bars) + "</section>\n";
  body +=
      "<section><h2>Layers to keep in BF16</h2>\n<p class=\"note\">Sorted by that divergence. "
      "Each line keeps the layers above it, too.</p>\n" +
      keep_table(report) +
      fmt::format("<pre>{}</pre></section>\n", html_escape(flag_line(report, 2)));
  body +=
      "<section><h2>Errors by layer and head</h2>\n<p class=\"note\">Relative (L2), on exact "
      "inputs: keys as the pages give them back; scores along a row, without their mean; "
      "attention output of all rows. The fuller the colour, the worse; each map has its own "
      "scale.</p>\n";
  body += heat(report, "Keys, by KV head", &LayerReport::key);
  body += heat(report, "Scores, by query head", &LayerReport::score);
  body += heat(report, "Attention output, by query head", &LayerReport::output);
  body += fmt::format("</section>\n<section><h2>Recipe</h2><pre>{}</pre></section>\n",
                      html_escape(report.recipe));
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\">\n<meta "
      "name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n<title>What FP4 costs: {}</title>\n"
      "<style>{}</style></head>\n<body><main>\n{}</main></body></html>\n",
      html_escape(report.model), kPageStyle, body);
}

}  // namespace bitdecoding::eval
