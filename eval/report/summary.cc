// SPDX-License-Identifier: Apache-2.0
#include "report/summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace bitdecoding::eval {
namespace {

using Json = nlohmann::json;

// The decode figure of `users` users; the plan decides which counts exist.
std::optional<double> decode_speed_of(const ModeResults& mode, int users) {
  const auto task = mode.tasks.find("throughput");
  if (task == mode.tasks.end()) return std::nullopt;
  for (const Json& run : task->second.value("decode", Json::array())) {
    if (run.value("users", 0) == users) return run.value("tokens_per_second", std::nan(""));
  }
  return std::nullopt;
}

std::vector<int> user_counts(const Summary& summary) {
  return summary.settings.value("users", std::vector<int>{1, 4});
}

std::vector<std::size_t> needle_lengths(const Summary& summary) {
  return summary.settings.value("needle_lengths", std::vector<std::size_t>{});
}

std::string needle_score(const ModeResults& mode, std::size_t length) {
  const auto task = mode.tasks.find("needle");
  if (task == mode.tasks.end()) return "-";
  for (const Json& row : task->second.value("summary", Json::array())) {
    if (row.value("length", std::size_t{0}) != length) continue;
    return fmt::format("{}/{}", row.value("found", 0), row.value("asked", 0));
  }
  return "-";
}

std::string one_line(std::string text, std::size_t width) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  if (display_width(text) <= width) return text;
  std::size_t end = 0;
  for (std::size_t columns = 0; end < text.size(); ++end) {
    const bool begins = (static_cast<unsigned char>(text[end]) & 0xC0U) != 0x80U;
    if (begins && columns++ == width - 3) break;
  }
  return text.substr(0, end) + "...";
}

}  // namespace

std::optional<double> ModeResults::number(const std::string& task,
                                          const std::string& pointer) const {
  const auto found = tasks.find(task);
  if (found == tasks.end()) return std::nullopt;
  const Json::json_pointer at(pointer);
  if (!found->second.contains(at) || !found->second[at].is_number()) return std::nullopt;
  return found->second[at].get<double>();
}

const ModeResults* Summary::find(const std::string& mode) const {
  const auto found = std::find_if(modes.begin(), modes.end(),
                                  [&](const ModeResults& results) { return results.mode == mode; });
  return found == modes.end() ? nullptr : &*found;
}

Summary summarize(const ResultsLog& log, const std::string& run,
                  const std::vector<std::string>& modes) {
  Summary out;
  out.run = run;
  if (const auto record = log.find(run, "run")) out.settings = record->data;
  if (const auto record = log.find(run, "calibration")) out.calibration = record->data;
  for (const std::string& mode : modes) {
    ModeResults results;
    results.mode = mode;
    for (const char* task :
         {"server", "questions", "needle", "logits", "kl", "throughput", "capacity"}) {
      if (const auto record = log.find(run, mode + "/" + task)) results.tasks[task] = record->data;
    }
    out.modes.push_back(std::move(results));
  }
  return out;
}

std::string mode_words(const std::string& mode) {
  static const std::map<std::string, std::string> words = {
      {"stock", "vLLM without this library, cache in the model's dtype"},
      {"bf16", "BF16 pages, this library's attention"},
      {"fp8", "FP8 E4M3 pages with unit scales"},
      {"nvfp4", "vLLM's NVFP4 values: blocks along head_dim, no sink, tail, shift or rotation"},
      {"bitdecoding-nvfp4", "NVFP4 tiles with BF16 sink and tail, key shift and Hadamard rotation"},
      {"bitdecoding-mxfp4", "the same with MXFP4 scales"}};
  const auto found = words.find(mode);
  return found == words.end() ? mode : found->second;
}

std::string grouped(std::optional<double> value) {
  if (!value.has_value() || !std::isfinite(*value)) return "-";
  const std::string digits = fmt::format("{:.0f}", std::fabs(*value));
  std::string out = *value <= -0.5 ? "-" : "";
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string compact(std::optional<double> value) {
  if (!value.has_value() || !std::isfinite(*value)) return "-";
  const double size = std::fabs(*value);
  if (size == 0.0) return "0";
  if (size < 1e-5) return fmt::format("{:.1e}", *value);
  const int decimals = std::clamp(2 - static_cast<int>(std::floor(std::log10(size))), 0, 7);
  return fmt::format("{:.{}f}", *value, decimals);
}

std::string times(std::optional<double> value, std::optional<double> base) {
  if (!value.has_value() || !base.has_value() || !(*base > 0.0)) return "-";
  return fmt::format("{:.2f}x", *value / *base);
}

Table figures_table(const Summary& summary) {
  const ModeResults* bf16 = summary.find("bf16");
  const ModeResults* stock = summary.find("stock");
  Table table;
  table.header = {"mode", "KV tokens", "x bf16"};
  for (const std::size_t length : needle_lengths(summary)) {
    table.header.push_back(fmt::format("needle {}K", length / 1024));
  }
  for (const char* name : {"KL to bf16", "top-1 %", "prefill"}) table.header.emplace_back(name);
  for (const int users : user_counts(summary)) {
    table.header.push_back(fmt::format("{} user{}", users, users == 1 ? "" : "s"));
    if (stock != nullptr) table.header.emplace_back("x stock");
  }
  for (const ModeResults& mode : summary.modes) {
    const auto tokens = mode.number("capacity", "/tokens_pool_counted");
    std::vector<std::string> row = {mode.mode, grouped(tokens)};
    row.push_back(
        bf16 == nullptr ? "-" : times(tokens, bf16->number("capacity", "/tokens_pool_counted")));
    for (const std::size_t length : needle_lengths(summary))
      row.push_back(needle_score(mode, length));
    const auto top1 = mode.number("kl", "/top1_agreement");
    row.push_back(mode.mode == "bf16" ? "is P" : compact(mode.number("kl", "/mean")));
    row.push_back(top1.has_value() ? fmt::format("{:.1f}", 100.0 * *top1) : "-");
    row.push_back(compact(mode.number("throughput", "/prefill/tokens_per_second")));
    for (const int users : user_counts(summary)) {
      const auto speed = decode_speed_of(mode, users);
      row.push_back(compact(speed));
      if (stock != nullptr) row.push_back(times(speed, decode_speed_of(*stock, users)));
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

std::string answers_text(const Summary& summary, Style style) {
  constexpr std::size_t kWidth = 110;
  std::map<std::string, std::vector<std::pair<std::string, std::string>>> by_question;
  std::vector<std::string> order;
  std::size_t label = 0;
  for (const ModeResults& mode : summary.modes) {
    const auto task = mode.tasks.find("questions");
    if (task == mode.tasks.end()) continue;
    label = std::max(label, mode.mode.size());
    for (const Json& answer : task->second.value("answers", Json::array())) {
      const std::string question = answer.value("question", "");
      if (by_question[question].empty()) order.push_back(question);
      by_question[question].emplace_back(mode.mode, answer.value("answer", ""));
    }
  }
  std::string out;
  for (const std::string& question : order) {
    out += toned(question, Tone::kBold, style) + "\n";
    for (const auto& [mode, answer] : by_question[question]) {
      out += fmt::format("  {:<{}}  {}\n", mode, label, one_line(answer, kWidth));
    }
  }
  return out;
}

}  // namespace bitdecoding::eval
