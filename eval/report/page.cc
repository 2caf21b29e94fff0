// SPDX-License-Identifier: Apache-2.0
#include "report/page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "report/html.h"
#include "report/page_style.h"

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

std::string section(const std::string& title, const std::string& note, const std::string& body) {
  return fmt::format("<section>\n<h2>{}</h2>\n<p class=\"note\">{}</p>\n{}</section>\n",
                     html_escape(title), note, body);
}

std::string html_table(const Table& table, const char* css_class = "figures") {
  std::string out =
      fmt::format("<div class=\"scroll\"><table class=\"{}\">\n<thead><tr>", css_class);
  for (const std::string& cell : table.header) out += "<th>" + html_escape(cell) + "</th>";
  out += "</tr></thead>\n<tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (const std::string& cell : row) out += "<td>" + html_escape(cell) + "</td>";
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

// The colour of a mode is its own, whichever modes a run compares.
int series_of(const std::string& mode) {
  static const std::vector<std::string> order = {"stock", "bf16",  "bitdecoding-nvfp4",
                                                 "fp8",   "nvfp4", "bitdecoding-mxfp4"};
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] == mode) return static_cast<int>(i);
  }
  return 0;
}

std::string capacity_section(const Summary& summary) {
  std::vector<Bar> bars;
  const ModeResults* bf16 = summary.find("bf16");
  for (const ModeResults& mode : summary.modes) {
    const auto tokens = mode.number("capacity", "/tokens_pool_counted");
    if (!tokens.has_value()) continue;
    const std::string ratio =
        bf16 == nullptr ? "" : times(tokens, bf16->number("capacity", "/tokens_pool_counted"));
    bars.push_back({mode.mode, *tokens, grouped(tokens) + "  " + ratio, series_of(mode.mode)});
  }
  if (bars.empty()) return "";
  return section(
      "Tokens of KV capacity in the same memory",
      fmt::format("Every server got {} bytes for its cache. Tokens are vLLM's own count; "
                  "where a mode keeps a BF16 pool beside the pages, its bytes are counted "
                  "in, which makes the figure smaller. Ratios are to bf16.",
                  grouped(summary.settings.value("cache_bytes", 0.0))),
      bar_chart("KV tokens, BF16 pool counted", bars));
}

std::string kl_section(const Summary& summary) {
  std::vector<Curve> curves;
  Table table{{"mode", "mean", "median", "p99", "max", "top-1 %", "positions", "NLL"}, {}};
  double bin = 64.0;
  for (const ModeResults& mode : summary.modes) {
    const auto nll = mode.number("logits", "/nll");
    if (mode.mode == "bf16" && nll.has_value()) {
      table.rows.push_back({"bf16 (is P)", "-", "-", "-", "-", "-", "-", compact(nll)});
    }
    const auto task = mode.tasks.find("kl");
    if (task == mode.tasks.end()) continue;
    bin = task->second.value("bin", 64.0);
    curves.push_back(
        {mode.mode, task->second.value("curve", std::vector<double>()), series_of(mode.mode)});
    table.rows.push_back(
        {mode.mode, compact(mode.number("kl", "/mean")), compact(mode.number("kl", "/median")),
         compact(mode.number("kl", "/p99")), compact(mode.number("kl", "/max")),
         fmt::format("{:.1f}", 100.0 * mode.number("kl", "/top1_agreement").value_or(0)),
         grouped(mode.number("kl", "/scored_tokens")), compact(nll)});
  }
  if (curves.empty()) return "";
  return section(
      "KL divergence to bf16, behind a cached prefix",
      fmt::format("Exact divergence of the next-token distributions, sum p log(p/q) in nats over "
                  "the whole vocabulary, in double, P being the same model over BF16 pages. The "
                  "prompt is {} tokens, prefilled in chunks of {}, so that all but the newest "
                  "tokens are read from the cache's pages. Figures count from position {} on; the "
                  "curve shows means of {:.0f} positions. Lower is better. The stock row differs "
                  "from bf16 in the attention code{}, so it is the floor: what other code makes of "
                  "the same numbers.",
                  summary.settings.value("kl_tokens", 0), summary.settings.value("chunk_tokens", 0),
                  summary.settings.value("kl_first", 0), bin,
                  summary.settings.value("dtype", "") == "float32"
                      ? " and in the cache's type, float32"
                      : ""),
      log_line_chart("KL divergence by position (logarithmic)", "position in the prompt", curves,
                     bin / 2, bin) +
          html_table(table));
}

std::string speed_section(const Summary& summary) {
  std::string charts;
  const ModeResults* stock = summary.find("stock");
  for (const int users : summary.settings.value("users", std::vector<int>{})) {
    std::vector<Bar> bars;
    const auto speed = [&](const ModeResults& mode) -> std::optional<double> {
      const auto task = mode.tasks.find("throughput");
      if (task == mode.tasks.end()) return std::nullopt;
      for (const Json& run : task->second.value("decode", Json::array())) {
        if (run.value("users", 0) == users) return run.value("tokens_per_second", std::nan(""));
      }
      return std::nullopt;
    };
    for (const ModeResults& mode : summary.modes) {
      const auto value = speed(mode);
      if (!value.has_value()) continue;
      const std::string ratio =
          stock == nullptr ? "" : "  " + times(value, speed(*stock)) + " of stock";
      bars.push_back({mode.mode, *value, compact(value) + ratio, series_of(mode.mode)});
    }
    if (!bars.empty()) {
      charts +=
          bar_chart(fmt::format("Decode, {} user{}: tokens/s", users, users == 1 ? "" : "s"), bars);
    }
  }
  std::vector<Bar> prefill;
  for (const ModeResults& mode : summary.modes) {
    const auto value = mode.number("throughput", "/prefill/tokens_per_second");
    if (value.has_value())
      prefill.push_back({mode.mode, *value, compact(value), series_of(mode.mode)});
  }
  if (charts.empty() && prefill.empty()) return "";
  charts += bar_chart("Prefill behind the cached prefix: tokens/s", prefill);
  return section("Tokens a second at a long context",
                 fmt::format("A document of about {} tokens and different questions on it; the "
                             "document is prefilled once and shared. Tokens count only while all "
                             "users decode. Weights and activations are {} in every mode, so modes "
                             "differ in the cache and its attention alone.",
                             grouped(summary.settings.value("context", 0.0)),
                             html_escape(summary.settings.value("dtype", "float32"))),
                 charts);
}

std::string needle_section(const Summary& summary) {
  Table table{{"mode", "prompt tokens", "hidden at", "asked for", "answer", "found"}, {}};
  for (const ModeResults& mode : summary.modes) {
    const auto task = mode.tasks.find("needle");
    if (task == mode.tasks.end()) continue;
    for (const Json& row : task->second.value("asked", Json::array())) {
      table.rows.push_back({mode.mode, grouped(row.value("prompt_tokens", 0.0)),
                            grouped(row.value("hidden_at", 0.0)),
                            row.value("place", "") + " = " + row.value("code", ""),
                            row.value("answer", ""), row.value("found", false) ? "yes" : "no"});
    }
  }
  if (table.rows.empty()) return "";
  return section(
      "Needles in a haystack",
      "Five-digit codes hidden in real text, asked for behind the text. Found means that "
      "the answer contains the code. The model is small: compare modes with each other, "
      "not with a large model.",
      html_table(table, "words"));
}

std::string answers_section(const Summary& summary) {
  Table table{{"question", "mode", "answer"}, {}};
  for (const std::string& question :
       summary.settings.value("questions", std::vector<std::string>{})) {
    std::string shown = question;
    for (const ModeResults& mode : summary.modes) {
      const auto task = mode.tasks.find("questions");
      if (task == mode.tasks.end()) continue;
      for (const Json& answer : task->second.value("answers", Json::array())) {
        if (answer.value("question", "") != question) continue;
        table.rows.push_back({shown, mode.mode, answer.value("answer", "")});
        shown.clear();
      }
    }
  }
  if (table.rows.empty()) return "";
  return section("Answers",
                 "Greedy decoding of short questions. Short prompts lie in the BF16 sink "
                 "and tail, so they show that the server works, not its accuracy.",
                 html_table(table, "words"));
}

// As the servers said it; all come from one environment.
std::string version_of(const Summary& summary) {
  for (const ModeResults& mode : summary.modes) {
    const auto task = mode.tasks.find("server");
    if (task == mode.tasks.end()) continue;
    const Json version = task->second.value("version", Json::object());
    if (version.is_object()) return version.value("version", "");
  }
  return "not started";
}

std::string measured_section(const Summary& summary) {
  std::string commands;
  for (const ModeResults& mode : summary.modes) {
    const auto task = mode.tasks.find("server");
    if (task == mode.tasks.end()) continue;
    commands += fmt::format("<h3>{}</h3><p class=\"note\">{}; ready after {} s</p><pre>{}</pre>\n",
                            html_escape(mode.mode), html_escape(mode_words(mode.mode)),
                            compact(task->second.value("seconds_to_ready", std::nan(""))),
                            html_escape(task->second.value("command", "")));
  }
  const Json machine = summary.settings.value("machine", Json::object());
  std::string facts;
  const auto fact = [&](const char* name, const std::string& value) {
    facts += fmt::format("<dt>{}</dt><dd>{}</dd>\n", name, html_escape(value));
  };
  fact("Date", summary.settings.value("date", ""));
  fact("Processor", fmt::format("{}, {} cores used", machine.value("cpu", "unknown"),
                                machine.value("cores", 0)));
  fact("Memory", fmt::format("{:g} GiB", machine.value("memory_gib", 0.0)));
  fact("System", machine.value("system", "") + ", kernel " + machine.value("kernel", ""));
  fact("Model", summary.settings.value("model", ""));
  fact("vLLM", version_of(summary));
  fact("Text", summary.settings.value("text", ""));
  fact("Key means",
       summary.calibration.empty()
           ? "none"
           : fmt::format(
                 "{} tokens of each of {}", summary.calibration.value("tokens_a_text", 0),
                 fmt::join(summary.calibration.value("texts", std::vector<std::string>()), ", ")));
  fact("Run", summary.run + ", " + summary.settings.value("command", ""));
  return section("What was measured, on what, how", "One run, one machine, one model.",
                 "<dl>" + facts + "</dl>\n" + commands);
}

}  // namespace

std::string report_page(const Summary& summary) {
  std::string out = fmt::format(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>bitdecoding: KV cache modes side by side</title>\n<style>\n{}</style>\n</head>\n"
      "<body>\n<main>\n<h1>KV cache modes side by side</h1>\n",
      kPageStyle);
  out += fmt::format(
      "<p class=\"lead\">{} served by vLLM on {}, once for each mode. {}</p>\n",
      html_escape(summary.settings.value("model_name", "A model")),
      html_escape(summary.settings.value("machine", Json::object()).value("cpu", "a CPU")),
      html_escape(summary.settings.value("date", "")));
  out += html_table(figures_table(summary));
  out += capacity_section(summary);
  out += kl_section(summary);
  out += speed_section(summary);
  out += needle_section(summary);
  out += answers_section(summary);
  out += measured_section(summary);
  return out + "</main>\n</body>\n</html>\n";
}

Status write_report(const std::string& path, const Summary& summary) {
  const std::string beside = path + ".new";
  std::ofstream file(beside, std::ios::binary | std::ios::trunc);
  file << report_page(summary);
  file.close();
  if (!file || std::rename(beside.c_str(), path.c_str()) != 0) {
    return {StatusCode::kIo,
            fmt::format("Cannot write the report {}: {}.", path, std::strerror(errno))};
  }
  return {};
}

}  // namespace bitdecoding::eval
