// SPDX-License-Identifier: Apache-2.0
// Writes the files of tests/golden. Run it only together with a new FormatTag::kVersion.
#include <cstdio>
#include <fstream>
#include <string>

#include "golden_pages.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: make_golden_pages DIRECTORY\n");
    return 1;
  }
  for (const auto& page : bitdecoding::test::golden_pages()) {
    const std::string path = std::string(argv[1]) + "/" + page.name + ".hex";
    std::ofstream out(path, std::ios::binary);
    out << bitdecoding::test::to_hex(bitdecoding::test::make_golden(page));
    if (!out.flush()) {
      std::fprintf(stderr, "cannot write %s\n", path.c_str());
      return 1;
    }
  }
  return 0;
}
