// SPDX-License-Identifier: Apache-2.0
// KL divergence from logits: closed forms, invariances, and captures that do not belong together.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <vector>

#include "score/kl.h"
#include "score/logits_file.h"
#include "score/statistics.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

std::vector<float> random_row(std::mt19937& random, std::size_t size, float spread) {
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> row(size);
  for (float& x : row) x = normal(random);
  return row;
}

TEST(RowDivergence, MatchesTheClosedFormOfTwoOutcomes) {
  // Logits (log a, log 1-a) are the distribution (a, 1-a).
  for (const double a : {0.5, 0.9, 0.999}) {
    for (const double b : {0.5, 0.1, 0.75}) {
      const float p[2] = {static_cast<float>(std::log(a)), static_cast<float>(std::log(1 - a))};
      const float q[2] = {static_cast<float>(std::log(b)), static_cast<float>(std::log(1 - b))};
      const double exact = a * std::log(a / b) + (1 - a) * std::log((1 - a) / (1 - b));
      // The logits are rounded to float: a relative 2^-24 of at most 7, met by weights that sum
      // to 1.
      EXPECT_TRUE(std::fabs(row_divergence(p, q, 2).kl - exact) <= 4 * 7 * 0x1p-24)
          << a << " " << b;
    }
  }
}

TEST(RowDivergence, IsZeroForEqualRowsAndIgnoresACommonOffset) {
  std::mt19937 random(3);
  const std::vector<float> row = random_row(random, 1000, 4.0F);
  std::vector<float> shifted = row;
  for (float& x : shifted) x += 8.0F;
  EXPECT_EQ(row_divergence(row.data(), row.data(), row.size()).kl, 0.0);
  // x + 8 rounds by at most 2^-20 each (|x + 8| < 32): p log(p/q) sums to at most twice that.
  EXPECT_TRUE(row_divergence(row.data(), shifted.data(), row.size()).kl <= 0x1p-19);
}

TEST(RowDivergence, SurvivesLogitsThatOverflowWithoutTheMaximum) {
  const float p[3] = {1000.0F, 999.0F, -1000.0F};
  const float q[3] = {1000.0F, 1000.0F, 1000.0F};
  const double a = 1 / (1 + std::exp(-1.0));
  const double exact = a * std::log(3 * a) + (1 - a) * std::log(3 * (1 - a));
  EXPECT_TRUE(std::fabs(row_divergence(p, q, 3).kl - exact) <= 1e-12);
}

TEST(RowDivergence, IsAsymmetricAndSeesTheOrderOfItsArguments) {
  const float p[2] = {static_cast<float>(std::log(0.9)), static_cast<float>(std::log(0.1))};
  const float q[2] = {static_cast<float>(std::log(0.5)), static_cast<float>(std::log(0.5))};
  const double forward = row_divergence(p, q, 2).kl;
  const double backward = row_divergence(q, p, 2).kl;
  EXPECT_TRUE(std::fabs(forward - 0.368064) <= 1e-5);
  EXPECT_TRUE(std::fabs(backward - 0.510826) <= 1e-5);
}

TEST(RowDivergence, SaysNanForBadRows) {
  const float good[2] = {0.0F, 1.0F};
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad : {std::nanf(""), inf}) {
    const float row[2] = {0.0F, bad};
    EXPECT_TRUE(std::isnan(row_divergence(good, row, 2).kl));
    EXPECT_TRUE(std::isnan(row_divergence(row, good, 2).kl));
  }
  const float masked[2] = {-inf, -inf};
  EXPECT_TRUE(std::isnan(row_divergence(masked, good, 2).kl));
}

TEST(RowDivergence, TakesAMaskedTokenOfPAsZero) {
  const float inf = std::numeric_limits<float>::infinity();
  const float p[3] = {0.0F, 0.0F, -inf};
  const float q[3] = {0.0F, 0.0F, 0.0F};
  EXPECT_TRUE(std::fabs(row_divergence(p, q, 3).kl - std::log(1.5)) <= 1e-12);
}

TEST(Statistics, QuantilesAreLinearBetweenNeighbours) {
  EXPECT_EQ(quantile({4.0, 1.0, 3.0, 2.0}, 0.5), 2.5);
  EXPECT_EQ(quantile({4.0, 1.0, 3.0, 2.0}, 1.0), 4.0);
  EXPECT_EQ(quantile({4.0, 1.0, 3.0, 2.0}, 0.0), 1.0);
  EXPECT_TRUE(std::isnan(quantile({}, 0.5)));
  EXPECT_TRUE(std::isnan(mean({})));
  EXPECT_EQ(binned_means({1, 3, 5, 7, 9}, 2), (std::vector<double>{2, 6, 9}));
}

// Captures as the plugin writes them.
class LogitsFiles : public ::testing::Test {
 protected:
  static constexpr std::size_t kVocab = 7;

  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("bitdecoding_logits_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string write(const std::string& name, const std::vector<std::vector<float>>& rows,
                    int first_token = 100, int first_position = 0) {
    const std::string path = (folder_ / name).string();
    // 16 bytes of fields, 28 of logits, padded to a multiple of 16.
    constexpr std::size_t kRecord = 48;
    std::ofstream file(path, std::ios::binary);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      char record[kRecord] = {};
      const std::int32_t fields[4] = {0, first_position + static_cast<int>(i),
                                      first_token + static_cast<int>(i), 0};
      std::memcpy(record, fields, sizeof(fields));
      std::memcpy(record + 16, rows[i].data(), kVocab * sizeof(float));
      file.write(record, kRecord);
    }
    std::ofstream(path + ".json")
        << R"({"format": "bitdecoding-logits", "version": 1, "vocab_size": 7, "dtype": "float32",
               "header_bytes": 16, "record_bytes": 48, "first_position": 0, "model": "m"})";
    return path;
  }

  static std::vector<std::vector<float>> rows(unsigned seed, std::size_t count) {
    std::mt19937 random(seed);
    std::vector<std::vector<float>> out;
    for (std::size_t i = 0; i < count; ++i) out.push_back(random_row(random, kVocab, 2.0F));
    return out;
  }

  Result<Divergence> compare(const std::string& a, const std::string& b, std::size_t first = 0) {
    const Result<LogitsFile> x = LogitsFile::open(a);
    const Result<LogitsFile> y = LogitsFile::open(b);
    if (!x.ok()) return x.status();
    if (!y.ok()) return y.status();
    return compare_logits(x.value(), y.value(), first, 3);
  }

  fs::path folder_;
};

TEST_F(LogitsFiles, RowsComeBackAsWritten) {
  const auto written = rows(5, 4);
  const Result<LogitsFile> file = LogitsFile::open(write("a", written));
  ASSERT_TRUE(file.ok()) << file.status().message();
  ASSERT_EQ(file.value().rows(), 4U);
  for (std::size_t i = 0; i < 4; ++i) {
    const LogitsRow row = file.value().row(i);
    EXPECT_EQ(row.position, static_cast<int>(i));
    EXPECT_EQ(row.token, 100 + static_cast<int>(i));
    EXPECT_EQ(std::vector<float>(row.logits, row.logits + kVocab), written[i]);
  }
}

TEST_F(LogitsFiles, FiguresCountFromTheFirstScoredPosition) {
  const auto reference = rows(6, 40);
  auto other = reference;
  other[3][0] += 5.0F;   // before the first scored position: must not count
  other[20][2] += 3.0F;  // counts
  const std::string a = write("a", reference);
  const std::string b = write("b", other);
  const Result<Divergence> result = compare(a, b, 10);
  ASSERT_TRUE(result.ok()) << result.status().message();
  const double only = row_divergence(reference[20].data(), other[20].data(), kVocab).kl;
  EXPECT_GT(only, 0.0);
  EXPECT_EQ(result.value().scored_tokens, 30U);
  EXPECT_EQ(result.value().max, only);
  EXPECT_TRUE(std::fabs(result.value().mean - only / 30) <= 1e-15);
  EXPECT_EQ(result.value().median, 0.0);
  EXPECT_GT(result.value().kl[3], 0.0);
  EXPECT_GE(result.value().top1_agreement, 29.0 / 30);
}

TEST_F(LogitsFiles, OtherPromptsAndLengthsAreRefused) {
  const std::string a = write("a", rows(7, 8));
  for (const std::string& b : {write("token", rows(7, 8), 101), write("short", rows(7, 6)),
                               write("late", rows(7, 8), 100, 1)}) {
    const Result<Divergence> result = compare(a, b);
    ASSERT_FALSE(result.ok()) << b;
    EXPECT_NE(result.status().message().find("do not belong together"), std::string::npos);
  }
  EXPECT_FALSE(compare(a, a, 8).ok());
}

TEST_F(LogitsFiles, ANanIsNamedByItsPosition) {
  auto bad = rows(8, 12);
  bad[9][1] = std::nanf("");
  const Result<Divergence> result = compare(write("a", rows(8, 12)), write("b", bad), 4);
  ASSERT_FALSE(result.ok());
  EXPECT_NE(result.status().message().find("position 9"), std::string::npos);
}

TEST_F(LogitsFiles, DamagedFilesAreRefused) {
  const std::string path = write("a", rows(9, 3));
  EXPECT_FALSE(LogitsFile::open((folder_ / "none").string()).ok());
  fs::resize_file(path, 3 * 48 - 5);
  EXPECT_FALSE(LogitsFile::open(path).ok());
  fs::resize_file(path, 0);
  EXPECT_FALSE(LogitsFile::open(path).ok());
  for (const char* header :
       {"", "[]", "{", R"({"format": "other"})",
        R"({"format": "bitdecoding-logits", "version": 1, "vocab_size": 7, "dtype": "float16",
            "header_bytes": 16, "record_bytes": 48})",
        R"({"format": "bitdecoding-logits", "version": 1, "vocab_size": 9, "dtype": "float32",
            "header_bytes": 16, "record_bytes": 48})",
        R"({"format": "bitdecoding-logits", "version": 1, "vocab_size": 4611686018427387904,
            "dtype": "float32", "header_bytes": 16, "record_bytes": 48})",
        R"({"format": "bitdecoding-logits", "version": 1, "vocab_size": -7, "dtype": "float32",
            "header_bytes": 16, "record_bytes": 48})"}) {
    const std::string again = write("a", rows(9, 3));
    std::ofstream(again + ".json") << header;
    EXPECT_FALSE(LogitsFile::open(again).ok()) << header;
  }
}

}  // namespace
}  // namespace bitdecoding::eval
