// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "calibrate/runner.h"

namespace bitdecoding::eval {
namespace {

constexpr int kBarWidth = 24;

std::string duration(double seconds) {
  const auto whole = static_cast<long>(std::lround(seconds));
  return whole >= 60 ? fmt::format("{} min {:02} s", whole / 60, whole % 60)
                     : fmt::format("{} s", whole);
}

}  // namespace

Remaining::Remaining(const std::vector<std::size_t>& phase_tokens) {
  for (const std::size_t tokens : phase_tokens) phases_.push_back({tokens, 0, 0, 0});
}

void Remaining::done(std::size_t phase, std::size_t tokens, double seconds) {
  Phase& p = phases_[phase];
  p.done = std::min(p.tokens, p.done + tokens);
  if (seconds <= 0) return;  // of an earlier process
  p.timed += tokens;
  p.seconds += seconds;
}

std::optional<double> Remaining::seconds_left(std::size_t phase) const {
  double rate = 0;  // a phase that has not begun is taken to be as fast as the one before
  double left = 0;
  for (std::size_t i = 0; i < phases_.size(); ++i) {
    const Phase& p = phases_[i];
    if (p.timed > 0) rate = p.seconds / static_cast<double>(p.timed);
    if (i < phase) continue;
    if (rate == 0 && p.tokens > p.done) return std::nullopt;
    left += rate * static_cast<double>(p.tokens - p.done);
  }
  return left;
}

double Remaining::share() const {
  double all = 0;
  double done = 0;
  for (const Phase& p : phases_) {
    all += static_cast<double>(p.tokens);
    done += static_cast<double>(p.done);
  }
  return all > 0 ? done / all : 1.0;
}

std::string Remaining::words(std::size_t phase, double since) const {
  const int filled = static_cast<int>(share() * kBarWidth);
  std::string text =
      fmt::format("[{}{}] {:3.0f} %", std::string(static_cast<std::size_t>(filled), '#'),
                  std::string(static_cast<std::size_t>(kBarWidth - filled), '.'), 100 * share());
  const std::optional<double> left = seconds_left(phase);
  // The first prompt also warms the engine up: before it there is nothing to judge by.
  return text + (left.has_value()
                     ? fmt::format("  about {} left", duration(std::max(0.0, *left - since)))
                     : "  the first prompt shows how long it takes");
}

}  // namespace bitdecoding::eval
