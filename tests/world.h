// SPDX-License-Identifier: Apache-2.0
// A small engine for tests: sequences of tokens, a page pool, a shadow pool and one layer. K, V and
// Q of a token depend on (token, position, head, channel) alone, so that two runs that feed the
// same tokens in other steps can be compared byte by byte.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bitdecoding/backend.h"
#include "bitdecoding/page.h"

namespace bitdecoding::test {

struct WorldOptions {
  Format format = Format::kNvfp4;
  FragmentOrder order = FragmentOrder::kQuad;
  int head_dim = 64;
  int page_size = 64;
  int num_kv_heads = 2;
  int num_q_heads = 4;
  int sink_tokens = 16;
  int tail_tokens = 64;
  bool reproducible = false;
  std::int64_t num_pages = 32;
  std::int32_t num_slots = 64;
  int max_requests = 8;
  ScaleRule key_rule = ScaleRule::kFourSix;
  ScaleRule value_rule = ScaleRule::kAmax6;
  bool hadamard = true;
  bool shift = true;        // keys have means, and pages leave them out
  bool value_shift = true;  // the same for values; tiled formats only
  int outer_exponent = 0;
  std::string backend = "reference";
  DType dtype = DType::kF32;  // of q, k, v and the output
  bool bf16_numbers = false;  // q, k and v are BF16 numbers, whatever their dtype
  std::uint8_t fill = 0x7F;   // what the pools hold before the first write
  Arithmetic arithmetic = Arithmetic::kWide;
  int query_terms = 2;  // fp4 arithmetic
  float probability_c = 8.0F;
  float probability_tau = 0.0F;
  std::int64_t page_padding = 0;  // bytes between pages
  // One element of every head that is not what key_of, value_of or query_of says.
  struct Fault {
    char tensor = 0;  // 'k', 'v', 'q'; 0 = none
    std::int64_t position = 0;
    int dim = 0;
    float value = 0.0F;
  } fault;

  // What the CUDA backend serves.
  static WorldOptions for_cuda() {
    WorldOptions o;
    o.value_shift = false;
    return o;
  }
};

struct Work {
  int sequence = 0;
  std::vector<std::uint32_t> tokens;  // appended by this step
  std::int64_t skip = 0;              // the first rows of it have slot -1
};

struct StepResult {
  Status status;
  std::vector<float> output;  // [tokens][q heads][head_dim]
  std::vector<float> lse;     // [tokens][q heads]
};

class World {
 public:
  explicit World(const WorldOptions& options);

  // A new sequence whose pages are taken from `pages` in turn.
  int add_sequence(std::vector<std::int32_t> pages);
  // Forgets the last n tokens (rejected drafts).
  void reject(int sequence, std::int64_t n);

  // Plans, writes and attends one step.
  StepResult step(const std::vector<Work>& work);
  // The same in parts: fills the step's tensors and plan; then write and attend as often as wanted.
  Status plan_step(const std::vector<Work>& work);
  Status write();
  // The same with other rows, [tokens][kv heads][head_dim].
  Status write_rows(const std::vector<float>& key, const std::vector<float>& value);
  StepResult attend();

  // Rows as the engine hands them over, rounded to the dtype.
  float key_of(std::uint32_t token, std::int64_t position, int head, int dim) const;
  float value_of(std::uint32_t token, std::int64_t position, int head, int dim) const;
  float query_of(std::uint32_t token, std::int64_t position, int head, int dim) const;
  float shift_of(int head, int dim) const;
  float value_shift_of(int head, int dim) const;

  std::uint8_t* head_bytes(std::int64_t page, int head);
  std::vector<std::uint8_t> page_bytes(std::int64_t page);  // all heads

  WorldOptions options;
  LayerConfig layer;
  CacheView cache;
  ShadowPool shadow;
  WriteCounters counters;
  std::uint64_t corrupt_scales = 0;
  StepInput input;  // of the newest step
  StepPlan plan;
  AttendParams params;  // masks and arithmetic may be set before attend()
  std::unique_ptr<ShadowDirectory> directory;
  std::unique_ptr<Backend> backend;
  struct Sequence {
    std::vector<std::int32_t> pages;
    std::vector<std::uint32_t> tokens;
  };
  std::vector<Sequence> sequences;

 private:
  void fill_tensors(const std::vector<Work>& work);
  float rounded(float x) const;
  float faulty(char tensor, std::int64_t position, int dim, float x) const;
  TensorView view(const std::vector<std::uint8_t>& data, int heads) const;
  Status write_tensors(const TensorView& key, const TensorView& value);

  std::vector<float> key_shift_, value_shift_;
  std::vector<std::int8_t> outer_;
  std::vector<std::uint8_t> pages_;
  std::vector<std::uint16_t> rows_;
  std::vector<std::uint8_t> query_, key_, value_, output_;
  std::vector<std::int32_t> table_, starts_, lengths_;
  std::vector<std::int64_t> slots_;
  std::int64_t num_tokens_ = 0;
};

// Deterministic N(0, 1) from a counter.
float normal_of(std::uint64_t seed);

std::vector<std::uint32_t> iota_tokens(std::uint32_t first, std::int64_t n);

}  // namespace bitdecoding::test
