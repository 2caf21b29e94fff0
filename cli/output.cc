// SPDX-License-Identifier: Apache-2.0
#include "output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace bitdecoding::cli {
namespace {

bool wants_colour() {
  static const bool wants = [] {
    const char* no_color = std::getenv("NO_COLOR");
    const char* term = std::getenv("TERM");
    if (no_color != nullptr && *no_color != '\0') return false;
    if (term != nullptr && std::string_view(term) == "dumb") return false;
    return ::isatty(STDOUT_FILENO) == 1;
  }();
  return wants;
}

const char* code_of(Style style) {
  switch (style) {
    case Style::kPlain:
      return "";
    case Style::kGood:
      return "\x1b[32m";
    case Style::kWarn:
      return "\x1b[33m";
    case Style::kBad:
      return "\x1b[31m";
    case Style::kStrong:
      return "\x1b[1m";
  }
  return "";
}

}  // namespace

std::string styled(Style style, std::string_view text) {
  if (style == Style::kPlain || !wants_colour()) return std::string(text);
  return fmt::format("{}{}\x1b[0m", code_of(style), text);
}

int fail(const Status& status) {
  fmt::print(stderr, "bitdecoding: {}\n", status.message());
  return static_cast<int>(status.code());
}

int fail_usage(std::string_view sentence) {
  fmt::print(stderr, "bitdecoding: {}\n", sentence);
  return kExitUsage;
}

void print(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void print_note(std::string_view text) { fmt::print(stderr, "{}\n", text); }

int finish(int exit_code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return exit_code;
  fmt::print(stderr, "bitdecoding: standard output could not be written\n");
  return exit_code == kExitOk ? kExitIo : exit_code;
}

}  // namespace bitdecoding::cli
