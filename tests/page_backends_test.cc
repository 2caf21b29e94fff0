// SPDX-License-Identifier: Apache-2.0
// Pages in CUDA's order are read by the CPU backend after the exchange, and the other way round.
// The pages of a GPU are the reference's, byte for byte (cuda_attend_test), so that the reference
// stands in for it here.
#include <gtest/gtest.h>

#include "backend/reference/reference.h"
#include "exchange.h"

namespace bitdecoding::test {
namespace {

const std::vector<std::int32_t> kPages = {4, 9, 2, 7};

WorldOptions options_of(Format format, int head_dim) {
  WorldOptions o;
  o.format = format;
  o.head_dim = head_dim;
  o.fill = 0;  // pages that nobody has written travel, too
  o.num_pages = 12;
  return o;
}

// A prompt and some tokens, written by the CPU backend or into pages of CUDA's order.
World written(WorldOptions o, bool cpu) {
  o.backend = cpu ? "cpu" : "reference";
  o.order = cpu ? FragmentOrder::kQuad : FragmentOrder::kFp16Mma;
  World w(o);
  w.add_sequence(kPages);
  for (const std::int64_t n : {150, 1, 5, 40}) {
    EXPECT_TRUE(w.step({{0, iota_tokens(static_cast<std::uint32_t>(n), n)}}).status.ok());
  }
  return w;
}

TEST(PageBackends, FilesAreTheSame) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const int head_dim : kHeadDims) {
      World cpu = written(options_of(format, head_dim), true);
      World cuda = written(options_of(format, head_dim), false);
      for (const std::int32_t page : kPages) {
        EXPECT_NE(cpu.page_bytes(page), cuda.page_bytes(page));
        EXPECT_EQ(export_from(cpu, page), export_from(cuda, page)) << "page " << page;
      }
    }
  }
}

// The step's output over pages of one's own, and over pages that came from the other.
TEST(PageBackends, EachReadsTheOthersPages) {
  for (const Format format : {Format::kNvfp4, Format::kMxfp4}) {
    for (const bool to_cpu : {true, false}) {
      World from = written(options_of(format, 128), !to_cpu);
      World to = written(options_of(format, 128), to_cpu);
      const StepResult own = to.step({{0, {7000}}});
      ASSERT_TRUE(own.status.ok()) << own.status.message();
      ASSERT_TRUE(from.step({{0, {7000}}}).status.ok());
      for (const std::int32_t page : kPages) {
        std::fill_n(to.head_bytes(page, 0), to.page_bytes(page).size(), std::uint8_t{0});
      }
      EXPECT_NE(to.attend().output, own.output);
      for (const std::int32_t page : kPages) import_into(to, page, export_from(from, page));
      const StepResult read = to.attend();
      EXPECT_EQ(read.output, own.output);
      EXPECT_EQ(read.lse, own.lse);
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
