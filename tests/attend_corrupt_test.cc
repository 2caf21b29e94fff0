// SPDX-License-Identifier: Apache-2.0
// Scale bytes that no writer produces, on every backend: whoever sees them gets NaN and a count,
// and nobody else notices.
#include <gtest/gtest.h>

#include <cmath>

#include "page/address.h"
#include "world.h"

namespace bitdecoding::test {
namespace {

const std::vector<std::int32_t> kPages = {7, 3, 11, 1, 20, 9, 8, 2};
constexpr std::uint32_t kPrompt = 100;

struct Case {
  Format format;
  Arithmetic arithmetic;
  std::uint8_t bad;
};

const Case kCases[] = {
    {Format::kNvfp4, Arithmetic::kWide, 0x7F},     {Format::kNvfp4, Arithmetic::kInt8, 0xFF},
    {Format::kNvfp4, Arithmetic::kFp4, 0x7F},      {Format::kMxfp4, Arithmetic::kWide, 0xFF},
    {Format::kMxfp4, Arithmetic::kInt8, 0xFF},     {Format::kMxfp4, Arithmetic::kFp4, 0xFF},
    {Format::kNvfp4Rows, Arithmetic::kWide, 0x7F}, {Format::kNvfp4Rows, Arithmetic::kInt8, 0xFF}};

// A prompt whose tokens are all read from pages; query heads 2 and 3 read KV head 1.
struct Scene {
  Scene(const std::string& backend, const Case& c) : world(options(backend, c)) {
    sequence = world.add_sequence(kPages);
    EXPECT_TRUE(world.step({{sequence, iota_tokens(0, kPrompt)}}).status.ok());
  }
  static WorldOptions options(const std::string& backend, const Case& c) {
    WorldOptions o;
    o.backend = backend;
    o.format = c.format;
    o.arithmetic = c.arithmetic;
    o.tail_tokens = 0;
    o.sink_tokens = 0;
    return o;
  }
  std::uint8_t& scale(Side side, int row, int dim) {
    return world.head_bytes(kPages[0], 1)[scale_address(world.layer.geometry, side, row, dim)];
  }
  std::vector<float> read(int rows) {
    const StepResult r = world.step({{sequence, iota_tokens(kPrompt, rows)}});
    EXPECT_TRUE(r.status.ok()) << r.status.message();
    world.reject(sequence, rows);
    return r.output;
  }
  World world;
  int sequence = 0;
};

// NaN exactly in channels [begin, end) of the query heads of KV head 1; else as without the damage.
// The damaged tile may be read in other arithmetic: int8 and fp4 are off by some hundredths.
void expect_spoiled(const std::vector<float>& got, const std::vector<float>& clean, int begin,
                    int end) {
  ASSERT_EQ(got.size(), clean.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t head = i / 64 % 4;
    const auto dim = static_cast<int>(i % 64);
    if (head >= 2 && dim >= begin && dim < end) {
      ASSERT_TRUE(std::isnan(got[i])) << "head " << head << " channel " << dim << ": " << got[i];
    } else {
      ASSERT_TRUE(std::fabs(got[i] - clean[i]) <= 0.1F)
          << "head " << head << " channel " << dim << ": " << got[i] << ", not " << clean[i];
    }
  }
}

class AttendCorrupt : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backend, AttendCorrupt, testing::ValuesIn(backend_names()),
                         [](const auto& backend) { return backend.param; });

TEST_P(AttendCorrupt, ABadKeyScaleSpoilsTheRowsThatSeeIt) {
  for (const Case& c : kCases) {
    for (const int rows : {1, 5, 12}) {  // one token, drafts, a chunk
      SCOPED_TRACE(testing::Message() << format_name(c.format) << " "
                                      << arithmetic_name(c.arithmetic) << " rows " << rows);
      Scene s(GetParam(), c);
      const std::vector<float> clean = s.read(rows);
      EXPECT_EQ(s.world.corrupt_scales, 0U);
      s.scale(Side::kKey, 5, 16) = c.bad;
      expect_spoiled(s.read(rows), clean, 0, 64);
      EXPECT_GT(s.world.corrupt_scales, 0U);
    }
  }
}

TEST_P(AttendCorrupt, ABadValueScaleSpoilsItsChannels) {
  for (const Case& c : kCases) {
    for (const int rows : {1, 5, 12}) {
      SCOPED_TRACE(testing::Message() << format_name(c.format) << " "
                                      << arithmetic_name(c.arithmetic) << " rows " << rows);
      Scene s(GetParam(), c);
      const std::vector<float> clean = s.read(rows);
      s.scale(Side::kValue, 0, 3) = c.bad;
      // V of row formats is blocked along channels, else along tokens.
      const bool tiled = is_tiled(c.format);
      expect_spoiled(s.read(rows), clean, tiled ? 3 : 0, tiled ? 4 : 16);
      EXPECT_GT(s.world.corrupt_scales, 0U);
    }
  }
}

// In the first block of a tile that a window still sees in part.
TEST_P(AttendCorrupt, BadScalesBehindAWindowDoNotShow) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(testing::Message()
                 << format_name(c.format) << " " << arithmetic_name(c.arithmetic));
    Scene s(GetParam(), c);
    s.world.params.window_left = 50;  // from position 50 on
    const std::vector<float> clean = s.read(1);
    s.scale(Side::kKey, 5, 0) = c.bad;
    s.scale(Side::kValue, 0, 3) = c.bad;
    expect_spoiled(s.read(1), clean, 0, 0);
    EXPECT_EQ(s.world.corrupt_scales, 0U);
  }
}

TEST_P(AttendCorrupt, GatherGivesNanAndCounts) {
  for (const Case& c : kCases) {
    Scene s(GetParam(), c);
    s.scale(Side::kValue, 0, 3) = c.bad;
    s.world.corrupt_scales = 0;
    ASSERT_TRUE(s.world.plan_step({{s.sequence, {kPrompt}}}).ok());
    std::vector<float> k(64 * 64);
    std::vector<float> v(64 * 64);
    s.world.params.plan = &s.world.plan;
    ASSERT_TRUE(s.world.backend->gather(s.world.params, 0, 1, 0, 64, k.data(), v.data()).ok());
    EXPECT_TRUE(std::isnan(v[3]));
    EXPECT_TRUE(std::isfinite(v[63]));
    for (const float x : k) ASSERT_TRUE(std::isfinite(x));
    EXPECT_GT(s.world.corrupt_scales, 0U);
  }
}

}  // namespace
}  // namespace bitdecoding::test
