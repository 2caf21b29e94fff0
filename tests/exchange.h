// SPDX-License-Identifier: Apache-2.0
// Pages from one world's cache to another's, as files.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "world.h"

namespace bitdecoding::test {

inline std::vector<std::uint8_t> export_from(World& w, std::int64_t page) {
  std::vector<const std::uint8_t*> heads;
  for (int h = 0; h < w.options.num_kv_heads; ++h) heads.push_back(w.head_bytes(page, h));
  auto bytes = export_page(w.layer.geometry, heads, 0);
  EXPECT_TRUE(bytes.ok()) << bytes.status().message();
  return bytes.ok() ? bytes.take() : std::vector<std::uint8_t>();
}

inline void import_into(World& w, std::int64_t page, const std::vector<std::uint8_t>& bytes) {
  std::vector<std::uint8_t*> heads;
  for (int h = 0; h < w.options.num_kv_heads; ++h) heads.push_back(w.head_bytes(page, h));
  const Status status = import_page(w.layer.geometry, bytes, heads, 0);
  EXPECT_TRUE(status.ok()) << status.message();
}

}  // namespace bitdecoding::test
