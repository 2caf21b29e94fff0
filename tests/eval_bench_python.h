// SPDX-License-Identifier: Apache-2.0
// Asks Python, which the scorers to equal are written in. A test that gets no answer skips itself.
#pragma once

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "eval_bench_files.h"

namespace bitdecoding::eval {

// The lines that a Python program prints; empty when it fails. BITDECODING_PYTHON names the
// interpreter.
inline std::vector<std::string> python_lines(const std::string& program,
                                             const std::string& argument = "") {
  const TemporaryFolder folder;
  const std::string script = folder.write("ask.py", program);
  const char* python = std::getenv("BITDECODING_PYTHON");
  const std::string command = std::string(python == nullptr ? "python3" : python) + " '" + script +
                              "' '" + argument + "' 2>/dev/null";
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  std::string text;
  std::array<char, 65536> buffer;
  for (std::size_t n = 0; (n = std::fread(buffer.data(), 1, buffer.size(), pipe)) > 0;) {
    text.append(buffer.data(), n);
  }
  if (pclose(pipe) != 0) return {};
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace bitdecoding::eval
