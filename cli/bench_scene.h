// SPDX-License-Identifier: Apache-2.0
// One layer of a served model on made-up data: pages in a shuffled order, BF16 slots, plans, and
// N(0, 1) queries, keys and values. The backend under test writes its own pages.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench_memory.h"
#include "bench_options.h"
#include "bitdecoding/backend.h"
#include "bitdecoding/recipe.h"

namespace bitdecoding::cli {

// Rows of one step, [tokens][heads][head_dim] in the scene's dtype.
struct Rows {
  std::vector<float> f32;
  std::vector<std::uint16_t> bf16;
  TensorView view;

  float at(std::int64_t token, int head, int dim) const;
};

class Scene {
 public:
  static Result<std::unique_ptr<Scene>> make(const BenchOptions& options);

  // Writes positions [0, tokens) of all sequences.
  Status fill(std::int64_t tokens);
  // Plans a step in which every sequence adds `count` tokens from position `first` on, and makes
  // their rows. Planning the same step again is what an engine does next.
  Status begin_step(std::int64_t first, std::int64_t count);
  Status plan_again();
  Status write();
  Status attend();

  Backend& backend() { return *backend_; }
  const Recipe& recipe() const { return recipe_; }
  const LayerConfig& layer() const { return layer_; }
  const StepPlan& plan() const { return plan_; }
  const AttendParams& params() const { return attend_; }
  const ShadowPool& shadow() const { return write_.shadow; }
  const Rows& query() const { return query_; }
  const Rows& key() const { return key_; }
  const Rows& value() const { return value_; }
  const std::vector<float>& output() const { return output_; }
  const WriteCounters& counters() const { return counters_; }

 private:
  explicit Scene(const BenchOptions& options) : options_(options) {}

  Status open_backend();
  Status allocate();
  void make_inputs();
  void make_rows(std::uint64_t tensor, int heads, const float* shift, Rows* rows) const;
  Status run_step(std::int64_t first, std::int64_t count);
  void bind();

  BenchOptions options_;
  Recipe recipe_;
  LayerConfig layer_;
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<ShadowDirectory> directory_;
  StepPlan plan_;
  std::int64_t capacity_ = 0;  // tokens of a sequence that the pages hold
  std::vector<float> normal_;  // values of N(0, 1) that rows are cut from
  std::vector<float> key_shift_;
  HugeArray<std::uint8_t> pages_;
  std::vector<std::uint16_t> slots_;
  std::vector<std::int32_t> block_table_;
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  std::vector<std::int32_t> query_start_;
  std::vector<std::int32_t> seq_lens_;
  std::vector<std::int64_t> slot_mapping_;
  Rows query_, key_, value_;
  std::vector<float> output_;
  WriteParams write_;
  AttendParams attend_;
  WriteCounters counters_;
};

// Bytes of keys and values that one attend of the current plan reads: whole tiles of pages and
// BF16 rows.
std::int64_t bytes_read(const Scene& scene);

}  // namespace bitdecoding::cli
