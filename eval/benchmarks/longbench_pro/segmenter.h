// SPDX-License-Identifier: Apache-2.0
// Chinese words, by the Python package jieba in a process of its own (tools/eval/segment.py).
// There is no C++ library for it in Debian, and another cut would be another score.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

class Segmenter {
 public:
  // One process for a pair of interpreter and folder, started when first asked and kept. Safe to
  // call from several threads. An error says what to install.
  static Result<std::vector<std::string>> cut(const std::string& python,
                                              const std::string& tools_folder,
                                              const std::vector<std::string>& texts);
};

}  // namespace bitdecoding::eval
