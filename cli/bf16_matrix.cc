// SPDX-License-Identifier: Apache-2.0
#include "bf16_matrix.h"

#include <fstream>
#include <sstream>

namespace bitdecoding::cli {

bool has_bf16_matrix(const std::string& cpuinfo) {
  std::istringstream lines(cpuinfo);
  for (std::string line; std::getline(lines, line);) {
    if (line.compare(0, 5, "flags") != 0 && line.compare(0, 8, "Features") != 0) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (word == "avx512_bf16" || word == "amx_bf16" || word == "bf16" || word == "svebf16") {
        return true;
      }
    }
  }
  return false;
}

bool has_bf16_matrix() {
  std::ifstream file("/proc/cpuinfo");
  std::stringstream text;
  text << file.rdbuf();
  return has_bf16_matrix(text.str());
}

}  // namespace bitdecoding::cli
