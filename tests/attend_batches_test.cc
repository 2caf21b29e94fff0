// SPDX-License-Identifier: Apache-2.0
// Steps of several sequences, on every backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "world.h"

namespace bitdecoding::test {
namespace {

// Four sequences in one step; one ends and its pages go to a fifth, whose prompt is a chunk beside
// the others' decode. Every row is bit for bit what it is alone.
TEST(Batches, RowsAreAsIfAlone) {
  const std::vector<std::int64_t> lengths = {400, 100, 90, 50, 150};
  const std::vector<std::vector<std::int32_t>> pages = {
      {7, 3, 11, 1, 20, 9, 8}, {2, 4, 5}, {6, 10, 12}, {13, 14}, {8, 9, 7}};
  const auto prompt = [&](std::size_t s) {
    return iota_tokens(static_cast<std::uint32_t>(1000 * s), lengths[s]);
  };
  const auto next = [](std::size_t s, std::int64_t i) {
    return std::vector<std::uint32_t>{static_cast<std::uint32_t>(1000 * s + 500 + i)};
  };
  for (const std::string& backend : backend_names()) {
    for (const bool backwards : {false, true}) {
      WorldOptions o;
      o.backend = backend;
      o.arithmetic = Arithmetic::kInt8;
      std::vector<std::vector<float>> alone(5);
      World together(o);
      for (std::size_t s = 0; s < 5; ++s) {
        World w(o);
        ASSERT_EQ(w.add_sequence(pages[s]), 0);
        ASSERT_EQ(together.add_sequence(pages[s]), static_cast<int>(s));
        alone[s] = w.step({{0, prompt(s)}}).output;
        for (std::int64_t i = 0; i < 40 && s > 0; ++i) {
          const std::vector<float> row = w.step({{0, next(s, i)}}).output;
          alone[s].insert(alone[s].end(), row.begin(), row.end());
        }
      }
      std::vector<std::vector<float>> rows(5);
      const auto step = [&](std::vector<Work> work) {
        if (backwards) std::reverse(work.begin(), work.end());
        const StepResult r = together.step(work);
        ASSERT_TRUE(r.status.ok()) << r.status.message();
        std::ptrdiff_t at = 0;
        for (const Work& w : work) {
          const auto n = static_cast<std::ptrdiff_t>(w.tokens.size()) * o.num_q_heads * o.head_dim;
          auto& out = rows[static_cast<std::size_t>(w.sequence)];
          out.insert(out.end(), r.output.begin() + at, r.output.begin() + at + n);
          at += n;
        }
      };
      step({{0, prompt(0)}, {1, prompt(1)}, {2, prompt(2)}, {3, prompt(3)}});
      step({{1, next(1, 0)}, {4, prompt(4)}, {2, next(2, 0)}, {3, next(3, 0)}});
      for (std::int64_t i = 0; i < 40; ++i) {
        std::vector<Work> work = {{4, next(4, i)}};
        for (int s = 1; s < 4 && i < 39; ++s) work.push_back({s, next(std::size_t(s), i + 1)});
        step(work);
      }
      for (std::size_t s = 0; s < 5; ++s) EXPECT_EQ(rows[s], alone[s]) << backend << " " << s;
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
