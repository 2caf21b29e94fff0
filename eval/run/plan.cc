// SPDX-License-Identifier: Apache-2.0
#include "run/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>

#include "report/json_lines.h"
#include "run/row_record.h"

namespace bitdecoding::eval {
namespace {

// Indices of `count` rows, taken from the groups in turn, in the file's order.
std::vector<std::size_t> spread(const std::vector<BenchmarkRow>& rows,
                                const std::vector<std::string>& labels, std::size_t count) {
  std::vector<std::size_t> all(rows.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  if (count == 0 || count >= rows.size()) return all;
  std::vector<std::vector<std::size_t>> groups;
  std::map<std::string, std::size_t> place;
  for (const std::size_t i : all) {
    std::string name;
    for (const std::string& label : labels) {
      const auto at = rows[i].labels.find(label);
      name += at == rows[i].labels.end() ? "|" : at->second + "|";
    }
    const auto [at, added] = place.try_emplace(name, groups.size());
    if (added) groups.emplace_back();
    groups[at->second].push_back(i);
  }
  std::vector<std::size_t> chosen;
  for (std::size_t turn = 0; chosen.size() < count; ++turn) {
    for (const auto& group : groups) {
      if (turn < group.size() && chosen.size() < count) chosen.push_back(group[turn]);
    }
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Prompts in the order of their texts: those that begin alike follow one another, so that a server
// with prefix caching computes a common beginning once.
void order_by_prefix(std::vector<PlannedRow>* rows) {
  const auto before = [](const ChatMessage& a, const ChatMessage& b) {
    return a.content < b.content;
  };
  std::stable_sort(rows->begin(), rows->end(), [&](const PlannedRow& a, const PlannedRow& b) {
    return std::lexicographical_compare(a.row.messages.begin(), a.row.messages.end(),
                                        b.row.messages.begin(), b.row.messages.end(), before);
  });
}

std::string file_hash(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  return stable_hash(content.str());
}

}  // namespace

Result<std::vector<PlannedBenchmark>> plan_rows(const std::vector<const Benchmark*>& benchmarks,
                                                const LoadOptions& load, const RowChoice& choice) {
  std::vector<PlannedBenchmark> out;
  for (const Benchmark* benchmark : benchmarks) {
    Result<LoadedRows> loaded = benchmark->load(load);
    if (!loaded.ok()) return loaded.status();
    PlannedBenchmark planned;
    planned.benchmark = benchmark;
    if (!choice.greedy) planned.sampling = benchmark->sampling(load.model);
    planned.budget = benchmark->budget(load.model);
    planned.problems = std::move(loaded.value().problems);
    if (choice.strict && !planned.problems.empty()) {
      return Status(StatusCode::kCorrupt,
                    fmt::format("{}: {}; without --strict such rows are left out and counted ({} "
                                "of them).",
                                planned.problems.front().where, planned.problems.front().what,
                                planned.problems.size()));
    }
    for (const std::string& path : loaded.value().files) planned.files[path] = file_hash(path);
    const std::vector<BenchmarkRow>& rows = loaded.value().rows;
    if (rows.empty()) {
      return Status(
          StatusCode::kCorrupt,
          fmt::format("{} has no row that can be used ({} could not be read{}).",
                      benchmark->title(), planned.problems.size(),
                      planned.problems.empty() ? ""
                                               : ", the first: " + planned.problems.front().where +
                                                     ": " + planned.problems.front().what));
    }
    const std::string name(benchmark->name());
    for (const std::size_t i : spread(rows, benchmark->groups(), choice.rows)) {
      for (int repeat = 0; repeat < choice.repeats; ++repeat) {
        planned.rows.push_back({benchmark, rows[i], repeat,
                                row_seed(choice.seed, name, rows[i].id, repeat),
                                prompt_hash(rows[i].messages)});
      }
    }
    order_by_prefix(&planned.rows);
    out.push_back(std::move(planned));
  }
  return out;
}

}  // namespace bitdecoding::eval
