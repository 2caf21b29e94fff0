// SPDX-License-Identifier: Apache-2.0
// `bitdecoding bench` as a user runs it: what it prints, and that it refuses what it cannot time.
#include <nlohmann/json.hpp>
#include <string>

#include "cli_world.h"

namespace bitdecoding {
namespace {

Outcome bench(const std::string& arguments) { return program("bench " + arguments); }

nlohmann::json row_of(const std::string& arguments) {
  const Outcome run = bench(arguments + " --json");
  EXPECT_EQ(run.code, 0) << run.out;
  nlohmann::json row = nlohmann::json::parse(run.out, nullptr, false);
  EXPECT_TRUE(row.is_object()) << run.out;
  return row.is_object() ? row : nlohmann::json::object();
}

constexpr const char* kSmall = " --q-heads 6 --kv-heads 3 --head-dim 64 --seconds 0 --repeat 3";

void expect_times(const nlohmann::json& row) {
  EXPECT_GT(row.value("us_min", 0.0), 0.0);
  EXPECT_LE(row.value("us_min", 0.0), row.value("us_median", 0.0));
  EXPECT_LE(row.value("us_median", 0.0), row.value("us_max", 0.0));
  EXPECT_EQ(row.value("calls", 0), 3);
  for (const char* key : {"isa", "version", "date", "cpu", "mode", "arithmetic"}) {
    EXPECT_FALSE(row.value(key, "").empty()) << key;
  }
}

// The reference is exact up to the rounding of its float output and of its float inputs.
constexpr double kExact = 1e-6;
// int8 queries and probabilities: about 1 % (docs/benchmarks.md); a wrong kernel is off by 1.
constexpr double kInt8 = 0.05;

TEST(CliBench, DecodeOfTheReferenceIsExactAndCountsItsBytes) {
  const nlohmann::json row =
      row_of("decode --backend reference --context 300" + std::string(kSmall));
  expect_times(row);
  EXPECT_EQ(row.value("backend", ""), "reference");
  EXPECT_TRUE(row.value("relative_error", 1.0) <= kExact) << row.dump();
  // BF16: positions 0 to 15 and 224 to 299, 256 bytes of K and V each. Pages: four tiles of 4608
  // bytes; of the fifth every position is in BF16.
  EXPECT_EQ(row.value("bytes", 0), 3 * (92 * 256 + 4 * 4608));
  EXPECT_GT(row.value("ceiling_gbps", 0.0), 0.0);
  EXPECT_FALSE(row.contains("peer"));
}

TEST(CliBench, DecodeOfTheCpuBackendIsNearDoublePrecision) {
  const nlohmann::json row =
      row_of("decode --context 300 --batch 2 --threads 2" + std::string(kSmall));
  expect_times(row);
  EXPECT_EQ(row.value("threads", 0), 2);
  EXPECT_TRUE(row.value("relative_error", 1.0) <= kInt8) << row.dump();
}

TEST(CliBench, PrefillAttendsToTheChunkAndThePrefix) {
  const nlohmann::json row = row_of("prefill --context 130 --tokens 70" + std::string(kSmall));
  expect_times(row);
  // Float arithmetic over a few hundred positions.
  EXPECT_TRUE(row.value("relative_error", 1.0) <= 1e-4) << row.dump();
}

TEST(CliBench, WriteLosesWhatFourBitsLose) {
  const nlohmann::json row = row_of("write --tokens 64" + std::string(kSmall));
  expect_times(row);
  EXPECT_EQ(row.value("elements", 0.0), 2.0 * 64 * 3 * 64);
  EXPECT_TRUE(row.value("key_shift", false));
  // About 0.095 for amax/6 on N(0, 1), less where keys carry a mean that is subtracted first.
  const double error = row.value("relative_error", 1.0);
  EXPECT_TRUE(error > 0.03 && error < 0.12) << error;
}

TEST(CliBench, CapacityCountsTheBf16Slots) {
  const nlohmann::json row = row_of("capacity");
  EXPECT_EQ(row["bf16"].value("bf16_slots", -1), 0);
  EXPECT_GT(row["bitdecoding-nvfp4"].value("bf16_slots", 0), 0);
  // 512 bytes a token against 144, less 3 % for the slots.
  EXPECT_GE(row["bitdecoding-nvfp4"].value("times_bf16", 0.0), 3.4);
  EXPECT_LT(row["bitdecoding-nvfp4"].value("times_bf16", 9.0), 512.0 / 144.0);
}

TEST(CliBench, RefusalsAreSentences) {
  const struct {
    const char* arguments;
    int code;
    const char* part;
  } cases[] = {
      {"decode --mode nvfp5", 1, "did you mean 'nvfp4'"},
      {"decode --q-heads 5", 1, "no multiple of --kv-heads"},
      {"decode --head-dim 80", 1, "80"},
      {"decode --context 0", 1, "needs a token"},
      {"decode --backend gpu", 1, "unknown backend 'gpu'"},
      {"decode --isa AVX9", 1, "AVX9"},
      {"decode --threads 0", 1, "--threads is 0"},
      {"decode --arithmetic int4", 1, "int4"},
      {"decode --recipe /nowhere.json", 4, "/nowhere.json"},
      {"capacity --gib 0", 1, "--gib"},
      {"decode --peer torch", 64, "--peer"},
  };
  for (const auto& c : cases) {
    const Outcome run = bench(c.arguments);
    EXPECT_EQ(run.code, c.code) << c.arguments << ": " << run.out;
    EXPECT_NE(run.out.find(c.part), std::string::npos) << c.arguments << ": " << run.out;
  }
}

}  // namespace
}  // namespace bitdecoding
