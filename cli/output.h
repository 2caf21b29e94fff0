// SPDX-License-Identifier: Apache-2.0
// What all subcommands share: exit codes, colours, errors.
#pragma once

#include <string>
#include <string_view>

#include "bitdecoding/status.h"

namespace bitdecoding::cli {

// 1 to 8 are the numbers of StatusCode. A usage error has sysexits' EX_USAGE, so that it cannot be
// taken for one of them.
inline constexpr int kExitOk = 0;
inline constexpr int kExitIo = static_cast<int>(StatusCode::kIo);
inline constexpr int kExitNotFound = static_cast<int>(StatusCode::kNotFound);
inline constexpr int kExitUsage = 64;
inline constexpr int kExitInterrupted = 130;  // as a shell says of SIGINT

enum class Style { kPlain, kGood, kWarn, kBad, kStrong };

// Wraps text in a colour when standard output is a terminal that wants one (not with NO_COLOR, and
// not with TERM=dumb).
std::string styled(Style style, std::string_view text);

// "bitdecoding: <sentence>" on standard error; returns the exit code of the status.
int fail(const Status& status);
int fail_usage(std::string_view sentence);

void print(std::string_view text);       // standard output
void print_note(std::string_view text);  // standard error, for people beside a program's output

// Flushes standard output: kExitIo when it could not be written (a full disk, a closed pipe), else
// `exit_code`.
int finish(int exit_code);

}  // namespace bitdecoding::cli
