// SPDX-License-Identifier: Apache-2.0
// Tables, HTML, and the results log that survives a crash in the middle of a line.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "../cli/bf16_matrix.h"
#include "report/html.h"
#include "report/page.h"
#include "report/results_log.h"
#include "report/summary.h"
#include "report/table.h"

namespace bitdecoding::eval {
namespace {

namespace fs = std::filesystem;

TEST(TableFormat, AlignsByCharactersNotBytes) {
  const Table table{{"mode", "x"}, {{"caf\xC3\xA9", "1.5"}, {"longer name", "22"}}};
  EXPECT_EQ(format_table(table, Style{}),
            "mode           x\n"
            "----------------\n"
            "caf\xC3\xA9         1.5\n"
            "longer name   22\n");
}

TEST(TableFormat, ShortRowsAndNoRowsAreFine) {
  EXPECT_EQ(format_table(Table{{"a", "b"}, {{"1"}}}, Style{}), "a  b\n----\n1\n");
  EXPECT_EQ(format_table(Table{}, Style{}), "\n\n");
}

TEST(TableFormat, ColoursOnlyWhenAsked) {
  EXPECT_EQ(toned("x", Tone::kBold, Style{false}), "x");
  EXPECT_EQ(toned("x", Tone::kBold, Style{true}), "\033[1mx\033[0m");
}

TEST(Numbers, ReadWell) {
  EXPECT_EQ(grouped(165632.0), "165,632");
  EXPECT_EQ(grouped(999.0), "999");
  EXPECT_EQ(grouped(-1234567.0), "-1,234,567");
  EXPECT_EQ(grouped(std::nullopt), "-");
  EXPECT_EQ(compact(0.00312), "0.00312");
  EXPECT_EQ(compact(5.8712), "5.87");
  EXPECT_EQ(compact(123.4), "123");
  EXPECT_EQ(compact(0.0), "0");
  EXPECT_EQ(compact(std::nan("")), "-");
  EXPECT_EQ(times(6.0, 2.0), "3.00x");
  EXPECT_EQ(times(6.0, 0.0), "-");
}

TEST(HtmlEscape, NothingEscapes) {
  EXPECT_EQ(html_escape("<a href=\"x\">'&'</a>"),
            "&lt;a href=&quot;x&quot;&gt;&#39;&amp;&#39;&lt;/a&gt;");
  EXPECT_EQ(html_escape("caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80"),
            "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80");
}

TEST(HtmlEscape, BrokenBytesBecomeReplacements) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(html_escape("a\xFF"
                        "b"),
            "a" + r + "b");
  EXPECT_EQ(html_escape("\xC3"), r);                  // cut short
  EXPECT_EQ(html_escape("\xC0\xBC"), r + r);          // an overlong '<'
  EXPECT_EQ(html_escape("\xED\xA0\x80"), r + r + r);  // a surrogate
  EXPECT_EQ(html_escape(std::string("a\0\x1B[1m\n", 8)), "a[1m\n");
}

class Log : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() /
              ("bitdecoding_log_" +
               std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    path_ = (folder_ / "deeper" / "results.jsonl").string();
  }
  void TearDown() override { fs::remove_all(folder_); }

  ResultsLog open() {
    Result<ResultsLog> log = ResultsLog::open(path_);
    EXPECT_TRUE(log.ok()) << log.status().message();
    return log.take();
  }
  static Record record(const std::string& key, int value) {
    return {"run-1", "print", key, "2026-01-01T00:00:00Z", {{"value", value}}};
  }
  std::string bytes() const {
    std::ifstream file(path_, std::ios::binary);
    std::stringstream content;
    content << file.rdbuf();
    return content.str();
  }

  fs::path folder_;
  std::string path_;
};

TEST_F(Log, WhatWasAppendedIsFoundAfterOpeningAgain) {
  ResultsLog log = open();
  ASSERT_TRUE(log.append(record("bf16/kl", 1)).ok());
  ASSERT_TRUE(log.append(record("bf16/kl", 2)).ok());
  const ResultsLog again = open();
  EXPECT_EQ(again.records().size(), 2U);
  ASSERT_TRUE(again.find("run-1", "bf16/kl").has_value());
  EXPECT_EQ(again.find("run-1", "bf16/kl")->data["value"], 2);
  EXPECT_FALSE(again.find("run-2", "bf16/kl").has_value());
  EXPECT_FALSE(again.find("run-1", "bf16").has_value());
}

TEST_F(Log, ACutAtAnyByteLosesOnlyTheCutLine) {
  {
    ResultsLog log = open();
    ASSERT_TRUE(log.append(record("a", 1)).ok());
    ASSERT_TRUE(log.append(record("b", 2)).ok());
  }
  const std::string whole = bytes();
  const std::size_t first_line = whole.find('\n') + 1;
  for (std::size_t cut = first_line; cut < whole.size(); ++cut) {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << whole.substr(0, cut);
    ResultsLog log = open();
    ASSERT_EQ(log.records().size(), 1U) << cut;
    EXPECT_FALSE(log.find("run-1", "b").has_value());
    // What is appended next stands on a line of its own.
    ASSERT_TRUE(log.append(record("c", 3)).ok());
    const ResultsLog again = open();
    ASSERT_EQ(again.records().size(), 2U) << cut;
    EXPECT_EQ(again.dropped_lines(), 0) << cut;
  }
}

TEST_F(Log, AChangedByteIsNotBelieved) {
  {
    ResultsLog log = open();
    ASSERT_TRUE(log.append(record("a", 1234)).ok());
    ASSERT_TRUE(log.append(record("b", 2)).ok());
  }
  std::string text = bytes();
  text.replace(text.find("1234"), 4, "9234");
  std::ofstream(path_, std::ios::binary | std::ios::trunc) << text;
  const ResultsLog log = open();
  EXPECT_EQ(log.dropped_lines(), 1);
  EXPECT_FALSE(log.find("run-1", "a").has_value());
  EXPECT_TRUE(log.find("run-1", "b").has_value());
}

TEST_F(Log, AnUnfinishedRunIsTheNewestOneOfTheSameSettings) {
  ResultsLog log = open();
  EXPECT_FALSE(log.unfinished_run("print").has_value());
  ASSERT_TRUE(log.append(record("run", 0)).ok());
  EXPECT_EQ(log.unfinished_run("print"), "run-1");
  EXPECT_FALSE(log.unfinished_run("other").has_value());
  ASSERT_TRUE(log.append(record(kRunEnd, 0)).ok());
  EXPECT_FALSE(log.unfinished_run("print").has_value());
}

TEST_F(Log, AFolderThatCannotBeWrittenIsAnError) {
  fs::create_directories(path_);  // a folder where the file should be
  EXPECT_FALSE(ResultsLog::open(path_).ok());
}

Summary example() {
  Summary summary;
  summary.run = "2026-01-01T00:00:00Z";
  summary.settings = {
      {"questions", {"<b>?"}}, {"needle_lengths", {1024}},  {"users", {1}},
      {"context", 6144},       {"cache_bytes", 1073741824}, {"model_name", "m & n"}};
  ModeResults bf16{"bf16", {}};
  bf16.tasks["capacity"] = {{"tokens_pool_counted", 46592}, {"tokens", 46592}};
  bf16.tasks["throughput"] = {{"prefill", {{"tokens_per_second", 80.0}}},
                              {"decode", {{{"users", 1}, {"tokens_per_second", 6.0}}}}};
  ModeResults ours{"bitdecoding-nvfp4", {}};
  ours.tasks["capacity"] = {{"tokens_pool_counted", 160000}, {"tokens", 165632}};
  ours.tasks["kl"] = {{"mean", 0.003},
                      {"top1_agreement", 0.969},
                      {"curve", {0.001, 0.004}},
                      {"bin", 64},
                      {"scored_tokens", 3840}};
  ours.tasks["needle"] = {{"summary", {{{"length", 1024}, {"found", 1}, {"asked", 1}}}},
                          {"asked", {{{"answer", "<script>alert(1)</script>"}, {"code", "1"}}}}};
  ours.tasks["questions"] = {{"answers", {{{"question", "<b>?"}, {"answer", "\xFF<i>"}}}}};
  summary.modes = {bf16, ours};
  return summary;
}

TEST(Report, TheTableShowsWhatWasMeasuredAndADashElsewhere) {
  const Table table = figures_table(example());
  ASSERT_EQ(table.rows.size(), 2U);
  ASSERT_EQ(table.rows[0].size(), table.header.size());
  ASSERT_EQ(table.rows[1].size(), table.header.size());
  const auto cell = [&](std::size_t row, const std::string& column) {
    for (std::size_t i = 0; i < table.header.size(); ++i) {
      if (table.header[i] == column) return table.rows[row][i];
    }
    return std::string("no such column");
  };
  EXPECT_EQ(cell(1, "KV tokens"), "160,000");
  EXPECT_EQ(cell(1, "x bf16"), "3.43x");
  EXPECT_EQ(cell(1, "KL to bf16"), "0.00300");
  EXPECT_EQ(cell(1, "top-1 %"), "96.9");
  EXPECT_EQ(cell(0, "needle 1K"), "-");
  EXPECT_EQ(cell(1, "needle 1K"), "1/1");
  EXPECT_EQ(cell(1, "prefill"), "-");
  EXPECT_EQ(cell(0, "prefill"), "80.0");
}

TEST(Report, ThePageIsSelfContainedAndEscapesAnswers) {
  const std::string page = report_page(example());
  EXPECT_EQ(page.find("<script"), std::string::npos);
  EXPECT_NE(page.find("&lt;script&gt;"), std::string::npos);
  EXPECT_EQ(page.find('\xFF'), std::string::npos);
  EXPECT_NE(page.find("m &amp; n"), std::string::npos);
  EXPECT_EQ(page.find("http://"), std::string::npos);
  EXPECT_EQ(page.find("https://"), std::string::npos);
  EXPECT_NE(page.find("<svg"), std::string::npos);
  EXPECT_EQ(page.find("nan"), std::string::npos);
}

TEST(Report, AnEmptyRunStillMakesAPage) {
  Summary summary;
  summary.settings = nlohmann::json::object();
  summary.modes = {{"bf16", {}}};
  EXPECT_NE(report_page(summary).find("</html>"), std::string::npos);
}

TEST(Charts, ValuesThatAreNoNumbersDrawNothingWrong) {
  const double nan = std::nan("");
  for (const std::string& chart :
       {log_line_chart("t", "x", {{"a", {0.0, nan, 1e-3, 10.0}, 0}}, 0, 64),
        log_line_chart("t", "x", {{"a", {}, 0}}, 0, 64), log_line_chart("t", "x", {}, 0, 64),
        bar_chart("t", {{"a", nan, "-", 0}, {"b", 0.0, "0", 1}, {"c", -1.0, "-1", 2}}),
        bar_chart("t", {})}) {
    EXPECT_EQ(chart.find("nan"), std::string::npos) << chart;
    EXPECT_EQ(chart.find("inf"), std::string::npos) << chart;
  }
}

}  // namespace
TEST(Machine, Bf16MatrixInstructionsAreOneWordOfTheFlags) {
  EXPECT_TRUE(cli::has_bf16_matrix("model name : x\nflags\t\t: fpu avx2 amx_bf16 amx_tile\n"));
  EXPECT_TRUE(cli::has_bf16_matrix("flags : avx512_bf16\n"));
  EXPECT_TRUE(cli::has_bf16_matrix("Features : fp asimd bf16\n"));
  EXPECT_FALSE(cli::has_bf16_matrix("flags : fpu avx2 avx512f\nmodel name : amx_bf16\n"));
  EXPECT_FALSE(cli::has_bf16_matrix(""));
}

}  // namespace bitdecoding::eval
