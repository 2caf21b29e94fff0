// SPDX-License-Identifier: Apache-2.0
// What a benchmark is to the runner: rows with prompts, how they are sampled, and a score for a
// reply. One folder a benchmark beside this file; `benchmarks.cc` lists them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

struct ChatMessage {
  std::string role;
  std::string content;
};

// Who the model is, as far as protocols differ by it.
enum class Family { kQwen, kGlm };

struct ModelTraits {
  Family family = Family::kQwen;
  bool thinking = false;   // the reply has a thinking part
  std::size_t window = 0;  // tokens of prompt and reply together
};

struct Sampling {
  double temperature = 0.0;  // 0: greedy
  double top_p = 1.0;
  int top_k = 0;  // 0: not sent
  double min_p = 0.0;
};

// How many tokens a reply may have: `max_new_tokens`, or all that the prompt leaves of the window
// but 256 for the chat template.
struct Budget {
  std::size_t max_new_tokens = 0;
  bool fill_window = false;
};

struct BenchmarkRow {
  std::string id;  // unique within the benchmark, stable from run to run
  std::vector<ChatMessage> messages;
  nlohmann::json reference;  // what `score` needs; the benchmark's own shape
  // What results are grouped by: "task", "language", "variant", "length", "depth", "needles".
  std::map<std::string, std::string> labels;
  // The prompt's length as the data set states it, in its tokens; 0 when it does not.
  std::size_t stated_tokens = 0;
};

// A line of a data file that cannot be used: "FILE line 7: ...".
struct RowProblem {
  std::string where;
  std::string what;
};

struct LoadedRows {
  std::vector<BenchmarkRow> rows;
  std::vector<RowProblem> problems;
  std::vector<std::string> files;  // that were read, for their hashes
};

struct LoadOptions {
  std::string data_folder;  // holds `longbench_pro/`, `mrcr/`, ... as in docs/evaluation.md
  ModelTraits model;
  std::string compat;  // "" or the name of another public scorer ("simple-evals")
  // An OpenAI-style server of an embedding model, "http://HOST:PORT", for what needs one; empty:
  // such scores are missing.
  std::string embedding_endpoint;
  std::string embedding_model;  // empty: the first that the server names
  // The days, YYYY-MM-DD, of the problems that are asked, the last included; empty: no bound.
  std::string date_from;
  std::string date_to;
  // The Python that runs the tools of tools/eval/ (Chinese words, programs in the
  // sandbox), and their folder; empty:
  // `python3`, and the folder beside the source tree that was built.
  std::string python;
  std::string tools_folder;
};

struct Score {
  double value = 0.0;  // 0..1
  // No value can be given, and that is not the model's fault: a scorer's need is missing. Never
  // counted as 0.
  bool missing = false;
  std::string why;        // of `missing`, or of a zero ("no box outside the thinking part")
  std::string extracted;  // the answer as it was understood
  nlohmann::json detail;  // parts of the score
};

// Something that a run needs and does not have, in words.
struct MissingItem {
  std::string what;     // "data file mrcr/_filtered_le98048.jsonl"
  std::string how;      // where it comes from, how to get it
  std::string licence;  // of the data; empty where none applies
  // The benchmark runs without it; some of its scores are then missing.
  bool optional = false;
};

// Stateless but for its settings: all functions may be called from several threads.
class Benchmark {
 public:
  virtual ~Benchmark() = default;
  virtual std::string_view name() const = 0;   // "ruler_niah"
  virtual std::string_view title() const = 0;  // "RULER NIAH"
  // All that is missing before `load` and `score` can work.
  virtual std::vector<MissingItem> missing(const LoadOptions& options) const = 0;
  virtual Result<LoadedRows> load(const LoadOptions& options) const = 0;
  virtual Sampling sampling(const ModelTraits& model) const = 0;
  virtual Budget budget(const ModelTraits& model) const = 0;
  // Of the reply as the server gave it, with its thinking part. An error is a scorer that failed
  // (a sandbox that cannot be set up), never a wrong answer.
  virtual Result<Score> score(const BenchmarkRow& row, const std::string& reply,
                              const LoadOptions& options) const = 0;
  // The labels by which results are shown, the most telling first.
  virtual std::vector<std::string> groups() const = 0;
};

// In the order of the protocol's table.
const std::vector<std::unique_ptr<Benchmark>>& all_benchmarks();
// kNotFound lists the names.
Result<const Benchmark*> find_benchmark(std::string_view name);

// All that is missing for these benchmarks, each thing once.
std::vector<MissingItem> missing_for(const std::vector<const Benchmark*>& benchmarks,
                                     const LoadOptions& options);

// The reply without its thinking part; a thinking part that never ends leaves nothing.
std::string without_thinking(std::string_view reply);
// The same for a model of which it is known whether it thinks: the chat template of one that does
// may put the opening tag into the prompt, so a reply without a closing one is all thinking.
std::string answer_of(std::string_view reply, const ModelTraits& model);
// GLM when `config` (config.json's text; empty: there is none) or, without one, the name mentions
// it; else Qwen.
Family family_of(std::string_view config, std::string_view name);

}  // namespace bitdecoding::eval
