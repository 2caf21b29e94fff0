// SPDX-License-Identifier: Apache-2.0
// What benchmarks have in common: how replies are sampled and how long they may be.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {

// The model family's own recommendation; every published figure of these models was sampled so.
Sampling sampled(Family family);
Sampling greedy();

// A row of the protocol's table.
struct Protocol {
  std::string_view name;
  std::string_view title;
  // Greedy and `max_new_tokens` unless the model thinks: then sampled, and the window is filled.
  bool greedy_unless_thinking = false;
  std::size_t max_new_tokens = 0;
  // Where the window is above kWideWindow; 0: the same.
  std::size_t max_new_tokens_wide = 0;
};

inline constexpr std::size_t kWideWindow = 40960;

// A benchmark whose sampling and budget are those of a table row, and whose data is one file.
class ProtocolBenchmark : public Benchmark {
 public:
  std::string_view name() const override { return protocol_.name; }
  std::string_view title() const override { return protocol_.title; }
  Sampling sampling(const ModelTraits& model) const override;
  Budget budget(const ModelTraits& model) const override;

 protected:
  explicit ProtocolBenchmark(const Protocol& protocol) : protocol_(protocol) {}

 private:
  Protocol protocol_;
};

}  // namespace bitdecoding::eval
