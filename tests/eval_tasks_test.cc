// SPDX-License-Identifier: Apache-2.0
// Hidden facts, decode speed from arrival times, and what a server says about itself.
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "engine/server_log.h"
#include "tasks/document.h"
#include "tasks/throughput.h"

namespace bitdecoding::eval {
namespace {

TEST(Needles, AreDistinctAndDependOnTheSeedAlone) {
  const std::vector<Needle> a = make_needles(1);
  const std::vector<Needle> b = make_needles(1);
  const std::vector<Needle> other = make_needles(2);
  ASSERT_EQ(a.size(), 8U);
  std::set<std::string> codes;
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].code, b[i].code);
    EXPECT_NE(a[i].code, other[i].code);
    EXPECT_EQ(a[i].code.size(), 5U);
    codes.insert(a[i].code);
  }
  EXPECT_EQ(codes.size(), a.size());
}

TEST(Needles, TheTextIsWholeAndEachSentenceIsInItOnce) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "Paragraph " + std::to_string(i) + " says little.\n\n";
  const std::vector<Needle> needles = make_needles(7);
  std::vector<std::size_t> ends;
  std::string hidden = hide_needles(text, needles, 200, 1200, &ends);
  ASSERT_EQ(ends.size(), needles.size());
  for (std::size_t i = 0; i < needles.size(); ++i) {
    const std::string sentence = needle_sentence(needles[i]);
    const std::size_t at = hidden.find(sentence);
    ASSERT_NE(at, std::string::npos);
    EXPECT_EQ(at + sentence.size(), ends[i]);
    EXPECT_EQ(hidden.find(sentence, at + 1), std::string::npos);
    if (i > 0) {
      EXPECT_GT(ends[i], ends[i - 1]);
    }
  }
  // Within a paragraph of where they were wanted.
  EXPECT_LE(ends.front(), 200 + needle_sentence(needles[0]).size());
  EXPECT_LE(ends.back(), 1200 + needle_sentence(needles.back()).size());
  EXPECT_GT(ends.back(), 1000U);
  for (const Needle& needle : needles) {
    const std::string sentence = needle_sentence(needle) + "\n\n";
    hidden.erase(hidden.find(sentence), sentence.size());
  }
  EXPECT_EQ(hidden, text);
}

TEST(Needles, ATextTooShortStillHoldsAllOfThem) {
  std::vector<std::size_t> ends;
  const std::vector<Needle> needles = make_needles(7);
  const std::string hidden = hide_needles("One line.", needles, 500, 5000, &ends);
  EXPECT_EQ(ends.size(), needles.size());
  for (const Needle& needle : needles) {
    EXPECT_NE(hidden.find(needle_sentence(needle)), std::string::npos);
  }
}

TEST(Needles, FoundMeansTheCodeAsANumberOfItsOwn) {
  const Needle needle{"orchard", "48213", 0};
  EXPECT_TRUE(needle_found(needle, "It is 48213."));
  EXPECT_TRUE(needle_found(needle, "48213"));
  EXPECT_TRUE(needle_found(needle, "148213 no, 48213 yes"));
  EXPECT_FALSE(needle_found(needle, "It is 148213."));
  EXPECT_FALSE(needle_found(needle, "It is 482133."));
  EXPECT_FALSE(needle_found(needle, "It is 4821 3."));
  EXPECT_FALSE(needle_found(needle, ""));
}

TEST(Document, PrefixesAreNestedAndEndWithTheDocument) {
  Document document;
  document.head = {1, 2, 3};
  document.body = {10, 11, 12, 13};
  EXPECT_EQ(document.prefix(5), (Tokens{1, 2, 3, 10, 11}));
  EXPECT_EQ(document.prefix(2), (Tokens{1, 2, 3}));
  EXPECT_EQ(document.prefix(100), (Tokens{1, 2, 3, 10, 11, 12, 13}));
}

std::vector<StreamedToken> stream(double first, double step, int count) {
  std::vector<StreamedToken> out;
  for (int i = 0; i < count; ++i) out.push_back({i, first + step * i});
  return out;
}

TEST(DecodeSpeed, OneUserIsTokensOverTime) {
  const DecodeSpeed speed = decode_speed({stream(5.0, 0.125, 9)});
  EXPECT_EQ(speed.tokens, 8);  // the first token's time is prefill
  EXPECT_EQ(speed.tokens_per_second, 8.0);
  EXPECT_EQ(speed.step_ms_median, 125.0);
}

TEST(DecodeSpeed, OnlyTheTimeWhenAllDecodeCounts) {
  // The first user decodes alone and fast until 10 s; together each takes 0.5 s a token; then the
  // second decodes alone again.
  std::vector<StreamedToken> first = stream(9.0, 0.1, 10);
  for (int i = 0; i < 5; ++i) first.push_back({0, 10.0 + 0.5 * i});
  std::vector<StreamedToken> second = stream(10.0, 0.5, 5);
  for (int i = 1; i <= 10; ++i) second.push_back({0, 12.0 + 0.1 * i});
  const DecodeSpeed speed = decode_speed({first, second});
  EXPECT_EQ(speed.tokens, 8);
  EXPECT_EQ(speed.seconds, 2.0);
  EXPECT_EQ(speed.tokens_per_second, 4.0);
  EXPECT_EQ(speed.step_ms_median, 500.0);
}

TEST(DecodeSpeed, StreamsThatNeverOverlapHaveNone) {
  EXPECT_EQ(decode_speed({stream(0, 0.1, 5), stream(10, 0.1, 5)}).tokens, 0);
  EXPECT_EQ(decode_speed({stream(0, 0.1, 5), {}}).tokens, 0);
  EXPECT_EQ(decode_speed({}).tokens, 0);
  EXPECT_EQ(decode_speed({stream(0, 0.1, 1)}).tokens, 0);
}

TEST(ServerLog, CapacityIsTheLastOneStated) {
  EXPECT_EQ(capacity_in_log("x CPU KV cache size: 165,632 tokens, Maximum concurrency"), 165632);
  EXPECT_EQ(capacity_in_log("KV cache size: 1 tokens\nKV cache size: 46,592 tokens,"), 46592);
  EXPECT_FALSE(capacity_in_log("KV cache size: many tokens").has_value());
  EXPECT_FALSE(capacity_in_log("KV cache size: 12").has_value());
  EXPECT_FALSE(capacity_in_log("KV cache size: 12 GiB").has_value());
  EXPECT_FALSE(capacity_in_log("KV cache size: 99999999999999999999999999 tokens").has_value());
  EXPECT_FALSE(capacity_in_log("").has_value());
}

TEST(Metrics, SamplesLabelsAndTotals) {
  const auto samples = parse_metrics(
      "# HELP a words\n# TYPE a counter\n"
      "a{engine=\"0\",model=\"x \\\"y\\\", {z}\"} 3.0\n"
      "a{engine=\"1\"} 4\n"
      "b 1e3\n"
      "broken{engine=\"0\n"
      "worse{engine=\"0\"}\n"
      "\n"
      "c{} 2 1700000000\n");
  ASSERT_EQ(samples.size(), 4U);
  EXPECT_EQ(samples[0].labels.at("model"), "x \"y\", {z}");
  EXPECT_EQ(metric_total(samples, "a"), 7.0);
  EXPECT_EQ(metric_total(samples, "b"), 1000.0);
  EXPECT_EQ(metric_total(samples, "c"), 2.0);
  EXPECT_FALSE(metric_total(samples, "d").has_value());
}

}  // namespace
}  // namespace bitdecoding::eval
