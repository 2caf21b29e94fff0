// SPDX-License-Identifier: Apache-2.0
// A property that must hold for every input; the fuzzer reports the abort.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace bitdecoding {

inline void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "property violated: %s\n", what);
  std::abort();
}

}  // namespace bitdecoding
