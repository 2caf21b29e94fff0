// SPDX-License-Identifier: Apache-2.0
// NaN and infinity in a step's own K, V and Q, on every backend: what cannot be stored in a page is
// zero where it is read, too, and a query that is not finite shows.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "world.h"

namespace bitdecoding::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t kPrompt = 150;
constexpr std::int64_t kAt = 70;

struct Case {
  Format format;
  Arithmetic arithmetic;
  bool reproducible;
};

const Case kCases[] = {
    {Format::kNvfp4, Arithmetic::kWide, false},   {Format::kNvfp4, Arithmetic::kInt8, false},
    {Format::kNvfp4, Arithmetic::kInt8, true},    {Format::kNvfp4, Arithmetic::kFp4, false},
    {Format::kMxfp4, Arithmetic::kWide, false},   {Format::kNvfp4Rows, Arithmetic::kWide, false},
    {Format::kFp8E4m3, Arithmetic::kWide, false}, {Format::kBf16, Arithmetic::kWide, true}};

struct Outcome {
  StepResult prompt, decoded;
  WriteCounters counters;
};

// A prompt with one fault, then a decoded token.
Outcome run(const std::string& backend, const Case& c, WorldOptions::Fault fault) {
  WorldOptions o;
  o.backend = backend;
  o.format = c.format;
  o.arithmetic = c.arithmetic;
  o.reproducible = c.reproducible;
  o.fault = fault;
  World w(o);
  const int s = w.add_sequence({4, 9, 2, 7});
  Outcome out;
  out.prompt = w.step({{s, iota_tokens(0, kPrompt)}});
  out.decoded = w.step({{s, iota_tokens(900, 1)}});
  out.counters = w.counters;
  EXPECT_TRUE(out.prompt.status.ok()) << out.prompt.status.message();
  EXPECT_TRUE(out.decoded.status.ok()) << out.decoded.status.message();
  return out;
}

std::size_t first_element(std::int64_t row) {
  const WorldOptions o;
  return static_cast<std::size_t>(row) * static_cast<std::size_t>(o.num_q_heads * o.head_dim);
}

bool is_finite(const std::vector<float>& x) {
  for (const float v : x) {
    if (!std::isfinite(v)) return false;
  }
  return true;
}

class AttendNonFinite : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backend, AttendNonFinite, testing::Values("cpu", "reference"),
                         [](const auto& backend) { return backend.param; });

TEST_P(AttendNonFinite, KeysAndValuesCountAsZero) {
  for (const Case& c : kCases) {
    for (const char tensor : {'k', 'v'}) {
      const Outcome zero = run(GetParam(), c, {tensor, kAt, 5, 0.0F});
      EXPECT_EQ(zero.counters.non_finite, 0U);
      // The largest float is finite, but has no BF16.
      for (const float value : {kNan, kInfinity, -kInfinity, std::numeric_limits<float>::max()}) {
        SCOPED_TRACE(testing::Message() << format_name(c.format) << " " << tensor << " " << value);
        const Outcome faulty = run(GetParam(), c, {tensor, kAt, 5, value});
        EXPECT_EQ(faulty.prompt.output, zero.prompt.output);
        EXPECT_EQ(faulty.prompt.lse, zero.prompt.lse);
        EXPECT_EQ(faulty.decoded.output, zero.decoded.output);
        EXPECT_EQ(faulty.counters.non_finite, 2U);  // one for each KV head
        EXPECT_TRUE(is_finite(zero.prompt.output));
      }
    }
  }
}

TEST_P(AttendNonFinite, QueriesShowInTheirOwnRowAlone) {
  for (const Case& c : kCases) {
    for (const std::int64_t at : {kAt, kPrompt}) {  // in the prompt, and the decoded token
      const Outcome clean = run(GetParam(), c, {});
      for (const float value : {kNan, kInfinity}) {
        SCOPED_TRACE(testing::Message() << format_name(c.format) << " " << at << " " << value);
        const Outcome faulty = run(GetParam(), c, {'q', at, 5, value});
        const StepResult& got = at < kPrompt ? faulty.prompt : faulty.decoded;
        const StepResult& want = at < kPrompt ? clean.prompt : clean.decoded;
        const std::int64_t row = at < kPrompt ? at : 0;
        for (std::size_t i = 0; i < got.output.size(); ++i) {
          if (i >= first_element(row) && i < first_element(row + 1)) {
            ASSERT_TRUE(std::isnan(got.output[i])) << "element " << i << ": " << got.output[i];
          } else {
            ASSERT_EQ(got.output[i], want.output[i]) << "element " << i;
          }
        }
        EXPECT_TRUE(std::isnan(got.lse[static_cast<std::size_t>(4 * row)]));
      }
    }
  }
}

}  // namespace
}  // namespace bitdecoding::test
