// SPDX-License-Identifier: Apache-2.0
// Joining the ranks' key means: against the whole they were cut from, in any order, with bad input.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "io/key_shift.h"

namespace bitdecoding {
namespace {

constexpr int kLayers = 3;
constexpr int kHeads = 6;
constexpr int kDim = 64;

KeyShift whole() {
  KeyShift all;
  all.path = "whole";
  all.num_layers = kLayers;
  all.num_kv_heads = kHeads;
  all.head_dim = kDim;
  for (int i = 0; i < kLayers * kHeads * kDim; ++i) all.values.push_back(static_cast<float>(i));
  for (const float mean : all.values) all.value_means.push_back(0.5F - mean);
  return all;
}

KeyShift part(int first, int last, const std::string& tokens = "1000") {
  const KeyShift all = whole();
  KeyShift out = all;
  out.path = "means.heads" + std::to_string(first) + "-" + std::to_string(last);
  out.num_kv_heads = last - first + 1;
  out.values.clear();
  out.value_means.clear();
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::span<const float> rows = all.slice(layer, first, out.num_kv_heads);
    out.values.insert(out.values.end(), rows.begin(), rows.end());
    const std::span<const float> values = all.value_slice(layer, first, out.num_kv_heads);
    out.value_means.insert(out.value_means.end(), values.begin(), values.end());
  }
  out.metadata = {{"kv_heads", std::to_string(first) + "-" + std::to_string(last)},
                  {"total_kv_heads", std::to_string(kHeads)},
                  {"model", "tiny"},
                  {"tokens", tokens},
                  {"skipped_rows", "1"}};
  return out;
}

void expect_refused(const std::vector<KeyShift>& parts, StatusCode code, const char* words) {
  const Result<KeyShift> joined = join_key_shift(parts);
  EXPECT_EQ(joined.status().code(), code) << words;
  EXPECT_NE(joined.status().message().find(words), std::string::npos) << joined.status().message();
}

TEST(JoinKeyShift, GivesTheWholeInAnyOrder) {
  std::vector<KeyShift> parts = {part(0, 1, "900"), part(2, 2, "5000000000"), part(3, 5, "901")};
  const auto by_path = [](const KeyShift& a, const KeyShift& b) { return a.path < b.path; };
  do {
    const Result<KeyShift> joined = join_key_shift(parts);
    ASSERT_TRUE(joined.ok()) << joined.status().message();
    EXPECT_EQ(joined.value().values, whole().values);
    EXPECT_EQ(joined.value().value_means, whole().value_means);
    EXPECT_EQ(joined.value().metadata.at("model"), "tiny");
    EXPECT_EQ(joined.value().metadata.at("tokens"), "900");
    EXPECT_EQ(joined.value().metadata.count("kv_heads"), 0U);
    EXPECT_EQ(joined.value().metadata.count("skipped_rows"), 0U);
    EXPECT_TRUE(check_key_shift(joined.value(), kLayers, kHeads, kDim).ok());
  } while (std::next_permutation(parts.begin(), parts.end(), by_path));
}

TEST(JoinKeyShift, RanksThatShareAHeadMustAgree) {
  std::vector<KeyShift> parts = {part(0, 2), part(2, 3), part(4, 5), part(4, 5)};
  ASSERT_TRUE(join_key_shift(parts).ok());
  EXPECT_EQ(join_key_shift(parts).value().values, whole().values);
  parts[1].values[0] += 1.0F;
  expect_refused(parts, StatusCode::kInvalidArgument, "both hold KV head 2");
  parts[1].values[0] -= 1.0F;
  parts[1].value_means[0] += 1.0F;
  expect_refused(parts, StatusCode::kInvalidArgument, "both hold KV head 2");
  for (KeyShift& p : parts) p.value_means.clear();
  ASSERT_TRUE(join_key_shift(parts).ok());
  EXPECT_TRUE(join_key_shift(parts).value().value_means.empty());
  parts[2].value_means = parts[2].values;
  expect_refused(parts, StatusCode::kInvalidArgument, "one holds value means");
}

TEST(JoinKeyShift, RefusesWhatIsNoWhole) {
  expect_refused({}, StatusCode::kInvalidArgument, "no sidecars");
  expect_refused({part(0, 2), part(4, 5)}, StatusCode::kNotFound, "5 of the model's 6 KV heads");
  expect_refused({part(0, 3), part(2, 4)}, StatusCode::kNotFound, "5 of the model's 6 KV heads");
  expect_refused({whole()}, StatusCode::kInvalidArgument, "does not say which heads");
}

TEST(JoinKeyShift, RefusesPartsOfDifferentModels) {
  const auto refused = [](auto change) {
    std::vector<KeyShift> parts = {part(0, 2), part(3, 5)};
    change(parts[1]);
    expect_refused(parts, StatusCode::kInvalidArgument, "are not parts of one sidecar");
  };
  refused([](KeyShift& p) { p.metadata["model"] = "another"; });
  refused([](KeyShift& p) { p.metadata["total_kv_heads"] = "8"; });
  refused([](KeyShift& p) { p.num_layers = 2; });
  refused([](KeyShift& p) { p.head_dim = 128; });
  std::vector<KeyShift> parts = {part(0, 2), part(3, 5)};
  parts[0].metadata["probability_taus"] = "0.02";
  expect_refused(parts, StatusCode::kInvalidArgument, "probability_taus");
  parts[1].metadata["probability_taus"] = "0.02";
  EXPECT_EQ(join_key_shift(parts).value().metadata.at("probability_taus"), "0.02");
}

TEST(JoinKeyShift, RefusesHeadsThatContradictTheTensor) {
  for (const char* heads : {"", "-", "0", "a-b", "2-0", "0-3", "-1-1", "0-1x", "4-6",
                            "0-99999999999", "-2147483648-2147483647", "2147483647-0"}) {
    KeyShift bad = part(0, 2);
    bad.metadata["kv_heads"] = heads;
    EXPECT_EQ(join_key_shift({bad, part(3, 5)}).status().code(), StatusCode::kCorrupt) << heads;
  }
  // A total that no file could back is found before memory is asked for.
  KeyShift vast = part(0, 2);
  vast.metadata["total_kv_heads"] = "2147483647";
  expect_refused({vast}, StatusCode::kNotFound, "3 of the model's 2147483647 KV heads");
}

}  // namespace
}  // namespace bitdecoding
