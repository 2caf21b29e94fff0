// SPDX-License-Identifier: Apache-2.0
// What `bitdecoding eval` was asked for, and what its subcommands share.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "benchmarks/benchmark.h"
#include "eval_options.h"
#include "run/plan.h"

namespace bitdecoding::cli {

struct EvalOptions {
  EngineOptions engine;
  std::vector<std::string> modes = {"bf16", "bitdecoding-nvfp4"};
  std::vector<std::string> benchmarks = {"ruler_niah"};
  std::string data = "data/eval";
  std::string out = "out/eval";
  std::string endpoint;
  eval::RowChoice rows;
  std::size_t window = 131072;
  int max_num_seqs = 1;
  int row_timeout = 900;
  std::int64_t cache_mib = 4096;
  std::size_t chunk_tokens = 0;  // 0: the protocol's, the larger of 40,960 and the window
  std::string compat, embedding_endpoint;
  bool thinking = false;
  bool rescore = false;
};

// How the values of a mode come about on this machine: "native" or "simulated"; an error for a mode
// that cannot be served here, with the reason.
Result<std::string> mode_support(const std::string& mode);
// "all" is every mode that can be served here; unknown names are errors. bf16 comes first.
Result<std::vector<std::string>> chosen_modes(const std::vector<std::string>& asked);
Result<std::vector<const eval::Benchmark*>> chosen_benchmarks(
    const std::vector<std::string>& asked);
eval::LoadOptions load_options(const EvalOptions& options);
// All that is missing for what was asked; each thing once.
std::vector<eval::MissingItem> missing_items(const EvalOptions& options,
                                             const std::vector<const eval::Benchmark*>& benchmarks);
std::string missing_text(const std::vector<eval::MissingItem>& items);

void add_eval_generate(CLI::App* eval, int* exit_code);

}  // namespace bitdecoding::cli
