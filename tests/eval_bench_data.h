// SPDX-License-Identifier: Apache-2.0
// A made-up data folder: a few rows of every benchmark in the shape of its published files, among
// them rows that cannot be used. The problems are ours.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "eval_bench_files.h"

namespace bitdecoding::eval {

// One of each file's lines is broken, so every benchmark has one problem.
inline std::string with_a_broken_line(const std::vector<nlohmann::json>& rows) {
  std::string out;
  for (const nlohmann::json& row : rows) out.append(row.dump()).append("\r\n");
  return out.append("{\"id\": \n");
}

inline nlohmann::json longbench_row(const std::string& id, const std::string& task,
                                    const std::string& subtask,
                                    const std::vector<std::string>& answer,
                                    const std::string& language = "English") {
  return {{"id", id},
          {"context", "Document 1: the mill stood still. Document 2: the river rose."},
          {"language", language},
          {"token_length", "8k"},
          {"primary_task", task},
          {"secondary_task", subtask},
          {"contextual_requirement", "Full"},
          {"question_nonthinking", "Which? Write [Answer] and one a line."},
          {"question_thinking", "Think first. Which?"},
          {"answer", answer},
          {"difficulty", "Easy"}};
}

inline nlohmann::json lcb_row(const std::string& id, const std::string& date) {
  return {{"question_title", "Sum"},
          {"question_content", "Add two numbers."},
          {"platform", "atcoder"},
          {"question_id", id},
          {"contest_id", "c"},
          {"contest_date", date + "T00:00:00"},
          {"starter_code", ""},
          {"difficulty", "easy"},
          {"public_test_cases", R"([{"input":"1 2\n","output":"3\n","testtype":"stdin"}])"},
          {"private_test_cases", R"([{"input":"5 5\n","output":"10\n","testtype":"stdin"}])"},
          {"metadata", "{}"}};
}

// All seven; returns the folder's path.
inline std::string write_made_up_data(const TemporaryFolder& folder) {
  folder.write("longbench_pro/longbench_pro.jsonl",
               with_a_broken_line(
                   {longbench_row("l1", "T1. Retrieval & Ranking", "T1.1 Global Cohesive Retrieval",
                                  {"Document 2", "Document 1"}),
                    longbench_row("l2", "T3. Evidence-Grounded QA", "T3.2 Single-Hop Fact QA",
                                  {"the river"}),
                    longbench_row("l3", "T4. Summarization & Synthesis",
                                  "T4.2 Query-Focused Summary", {"The river rose."})}));
  const std::string chat =
      R"([{"role":"user","content":"Write a poem about mills"},{"role":"assistant","content":"Mill, )"
      R"(turn."},{"role":"user","content":"Prepend Qx7 to the 1st poem about mills."}])";
  folder.write("mrcr/_filtered_le98048.jsonl",
               with_a_broken_line({{{"prompt", chat},
                                    {"answer", "Qx7Mill, turn."},
                                    {"random_string_to_prepend", "Qx7"},
                                    {"n_needles", 2},
                                    {"desired_msg_index", 1},
                                    {"total_messages", 3},
                                    {"n_chars", 80}}}));
  folder.write("aime24/aime24.jsonl",
               with_a_broken_line({{{"id", 60}, {"problem", "1 + 1?"}, {"answer", "002"}}}));
  folder.write("aime25/aime25.jsonl",
               with_a_broken_line({{{"problem", "2 + 2?"}, {"solution", "so \\boxed{4}"}}}));
  folder.write("lcb_v6/prompts.jsonl", with_a_broken_line({lcb_row("abc", "2025-01-04")}));
  folder.write("ruler/niah_4096.jsonl",
               with_a_broken_line({{{"index", 0},
                                    {"variant", "single_1"},
                                    {"input", "A special magic number: 1234567. What is it?"},
                                    {"outputs", {"1234567"}},
                                    {"length", 4096},
                                    {"depth", 50}}}));
  folder.write("gpqa/gpqa_diamond.jsonl", with_a_broken_line({{{"Question", "Which is heavier?"},
                                                               {"Correct Answer", "lead"},
                                                               {"Incorrect Answer 1", "foam"},
                                                               {"Incorrect Answer 2", "cork"},
                                                               {"Incorrect Answer 3", "air"},
                                                               {"Record ID", "rec1"},
                                                               {"High-level domain", "Physics"}}}));
  return folder.path();
}

}  // namespace bitdecoding::eval
