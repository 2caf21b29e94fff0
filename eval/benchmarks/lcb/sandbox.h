// SPDX-License-Identifier: Apache-2.0
// Runs a Python program that nobody trusts: bubblewrap with namespaces of its own (no network, no
// other processes), the interpreter and the system's libraries read-only and nothing else of the
// file system, a small /tmp in memory, no capabilities, and a seccomp filter under which it cannot
// start processes at all. What it must find out (expected outputs) never enters the sandbox.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct SandboxLimits {
  std::chrono::milliseconds time{6000};  // by the clock
  std::size_t memory = std::size_t{4} << 30;
  std::size_t disk = std::size_t{64} << 20;    // of /tmp
  std::size_t output = std::size_t{16} << 20;  // of stdout; stderr keeps its last 4 KiB
};

enum class SandboxEnd { kExited, kSignalled, kTime, kOutput };

struct SandboxRun {
  SandboxEnd end = SandboxEnd::kExited;
  int code = 0;  // exit status or signal
  std::string output;
  std::string errors;
};

class Sandbox {
 public:
  // `python` empty: python3. An error names what is missing and how to get it; it is found out once
  // per interpreter and program path.
  static Result<Sandbox> make(const std::string& python);

  // `arguments` go to the interpreter; files {name, text} lie read-only in /case.
  struct File {
    std::string name;
    std::string text;
  };
  Result<SandboxRun> run(const std::vector<std::string>& arguments, const std::vector<File>& files,
                         const std::string& input, const SandboxLimits& limits) const;

 private:
  // Keeps a text in a file that the child inherits; gives its number.
  using Keep = std::function<std::string(const std::string&)>;

  Sandbox() = default;
  std::vector<std::string> command_line(const std::vector<std::string>& arguments,
                                        const std::vector<File>& files, const SandboxLimits& limits,
                                        const Keep& keep) const;

  std::string bwrap_;
  std::string interpreter_;             // its real path
  std::vector<std::string> read_only_;  // folders that are bound besides the system's
};

}  // namespace bitdecoding::eval
