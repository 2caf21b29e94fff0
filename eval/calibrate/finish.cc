// SPDX-License-Identifier: Apache-2.0
// The end of a calibration: the ranks' sums become one sidecar, and figures for people.
#include "calibrate/finish.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "calibrate/runner.h"
#include "report/table.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

std::string percent(double share) { return fmt::format("{:.2g} %", 100 * share); }

}  // namespace

// The state of the only process, or of all ranks: state.safetensors.headsA-B.
Result<CalibrationState> CalibrateRunner::read_state() const {
  std::vector<std::string> paths;
  std::error_code error;
  const std::string name = fs::path(state_path()).filename().string();
  for (const auto& entry : fs::directory_iterator(folder(), error)) {
    const std::string file = entry.path().filename().string();
    const bool part = file.rfind(name + ".heads", 0) == 0 && entry.path().extension() != ".tmp";
    if (file == name || part) paths.push_back(entry.path().string());
  }
  if (paths.empty()) {
    return Status(StatusCode::kNotFound,
                  fmt::format("'{}' holds no state of a calibration", folder()));
  }
  std::sort(paths.begin(), paths.end());
  std::vector<CalibrationState> parts;
  for (const std::string& path : paths) {
    Result<CalibrationState> part = load_calibration_state(path);
    if (!part.ok()) return part.status();
    parts.push_back(part.take());
  }
  return join_calibration_states(parts);
}

Status CalibrateRunner::finish() {
  const Result<CalibrationState> state = read_state();
  if (!state.ok()) return state.status();
  Result<KeyShift> finished = finish_calibration(state.value());
  if (!finished.ok()) return finished.status();
  KeyShift sidecar = finished.take();
  sidecar.metadata.merge(identity());
  sidecar.metadata["model"] = fs::path(options_.model).filename().string();
  sidecar.metadata["corpus_name"] =
      options_.data == "builtin" ? "builtin" : fs::path(options_.data).filename().string();
  sidecar.metadata["prompts"] = std::to_string(prompts_.size());
  // One rename makes it a calibration; until then there is none.
  if (Status s = save_key_shift(sidecar, sidecar_path()); !s.ok()) return s;
  show(sidecar);
  std::error_code error;
  fs::remove_all(folder(), error);
  return {};
}

void CalibrateRunner::show(const KeyShift& sidecar) const {
  Table curve;
  curve.header = {"means of", "off the last by, rms", "largest"};
  for (const auto& [tokens, state] : snapshots_) {
    if (&state == &snapshots_.back().second) continue;
    curve.rows.push_back({fmt::format("{} tokens", tokens),
                          percent(key_mean_distance(state, snapshots_.back().second)),
                          percent(largest_key_mean_distance(state, snapshots_.back().second))});
  }
  if (!curve.rows.empty()) {
    progress_->say(
        fmt::format("\nKey means against those of all {} tokens, in units of each channel's "
                    "spread:\n{}",
                    snapshots_.back().first, format_table(curve, progress_->style())));
  }
  const auto detail = sidecar.metadata.find("probability_detail");
  if (detail != sidecar.metadata.end()) {
    const Json json = Json::parse(detail->second);
    const Json taus = Json::parse(sidecar.metadata.at("probability_taus"));
    Table table;
    table.header = {"c", "tau", "error / amax6's", "with a tau a layer", "lost mass", "amax6's"};
    for (const float c : kCalibratedFactors) {
      const std::string name = fmt::format("{}", c);
      const Json& row = json.at(name);
      const double amax6 = row.at("error_amax6").get<double>();
      table.rows.push_back({name, fmt::format("{:.6g}", taus.at(name).get<double>()),
                            fmt::format("{:.4f}", row.at("error").get<double>() / amax6),
                            fmt::format("{:.4f}", row.at("error_layer_taus").get<double>() / amax6),
                            percent(row.at("lost").get<double>()),
                            percent(row.at("lost_amax6").get<double>())});
    }
    progress_->say(fmt::format("Probabilities ({} blocks of 16):\n{}",
                               sidecar.metadata.at("probability_blocks"),
                               format_table(table, progress_->style())));
  }
  const auto off = timed_.find("off");
  for (const auto& [phase, timed] : timed_) {
    if (off == timed_.end() || phase == "off") continue;
    const double rate = timed.second / static_cast<double>(timed.first);
    const double plain = off->second.second / static_cast<double>(off->second.first);
    progress_->say(
        fmt::format("Prefill while observing {}: {:.1f} tokens/s, without {:.1f}: "
                    "{:+.1f} %",
                    phase, 1 / rate, 1 / plain, 100 * (rate / plain - 1)));
  }
  progress_->say(fmt::format(
      "{} tokens a head, {} channels far outside their spread, {} rows not finite.\nSaved to {}; "
      "`bitdecoding serve {}` finds it there.",
      sidecar.metadata.at("tokens"), sidecar.metadata.at("outlier_channels"),
      sidecar.metadata.at("skipped_rows"), sidecar_path(), options_.model));
}

}  // namespace bitdecoding::eval
