// SPDX-License-Identifier: Apache-2.0
// What happens now, on the terminal: one line that is rewritten where that works, else one line an
// event.
#pragma once

#include <chrono>
#include <string>

#include "report/table.h"

namespace bitdecoding::eval {

class Progress {
 public:
  explicit Progress(int file_descriptor);
  ~Progress();

  void begin(const std::string& what);
  // More about what goes on; shown only where the line can be rewritten.
  void update(const std::string& detail);
  void done(const std::string& result);
  void say(const std::string& line);
  Style style() const { return style_; }

 private:
  void rewrite(const std::string& line);

  bool terminal_;
  Style style_;
  std::string what_;
  std::chrono::steady_clock::time_point started_;
};

}  // namespace bitdecoding::eval
