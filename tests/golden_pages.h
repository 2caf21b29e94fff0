// SPDX-License-Identifier: Apache-2.0
// Golden pages: fixed inputs, and the bytes that every version with the same FormatTag::kVersion
// must write for them. `make_golden_pages DIRECTORY` writes the files of tests/golden.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bitdecoding/page.h"

namespace bitdecoding::test {

struct GoldenPage {
  std::string name;
  Format format;
  FragmentOrder order;  // kFp4Mma: the exported page with its tag; others: the page's own bytes
  int head_dim;
};

const std::vector<GoldenPage>& golden_pages();

// The page's bytes as this library writes them with the reference backend.
std::vector<std::uint8_t> make_golden(const GoldenPage& page);

// Integers / 32, the same on every machine: element (side, token, dim) of the golden input. Each
// block has its own power of two, one block is zero.
float golden_input(int side, int token, int dim);

std::string to_hex(const std::vector<std::uint8_t>& bytes);  // 32 bytes a line
std::vector<std::uint8_t> from_hex(const std::string& text);

}  // namespace bitdecoding::test
