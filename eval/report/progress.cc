// SPDX-License-Identifier: Apache-2.0
#include "report/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>

namespace bitdecoding::eval {
namespace {

std::size_t terminal_columns() {
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 20;
  return known ? size.ws_col : 80;
}

// A log line may hold anything; only printable ASCII goes to the terminal.
std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c >= ' ' && c < 0x7F) out += c;
  }
  return out;
}

}  // namespace

Progress::Progress(int file_descriptor)
    : terminal_(isatty(file_descriptor) == 1), style_(style_of(file_descriptor)) {}

Progress::~Progress() {
  if (terminal_ && !what_.empty()) std::fputs("\r\033[K", stdout);
}

void Progress::rewrite(const std::string& line) {
  std::fputs(("\r\033[K" + line.substr(0, terminal_columns() - 1)).c_str(), stdout);
  std::fflush(stdout);
}

void Progress::begin(const std::string& what) {
  what_ = what;
  started_ = std::chrono::steady_clock::now();
  if (terminal_) {
    rewrite("  " + what_ + " ...");
  } else {
    fmt::print("  {} ...\n", what_);
    std::fflush(stdout);
  }
}

void Progress::update(const std::string& detail) {
  if (!terminal_) return;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  rewrite(fmt::format("  {} ... {:.0f} s  {}", what_, seconds, printable(detail)));
}

void Progress::done(const std::string& result) {
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  if (terminal_) std::fputs("\r\033[K", stdout);
  fmt::print("  {}: {} {}\n", what_, result,
             toned(fmt::format("({:.0f} s)", seconds), Tone::kDim, style_));
  std::fflush(stdout);
  what_.clear();
}

void Progress::say(const std::string& line) {
  if (terminal_ && !what_.empty()) std::fputs("\r\033[K", stdout);
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

}  // namespace bitdecoding::eval
