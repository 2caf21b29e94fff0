// SPDX-License-Identifier: Apache-2.0
// Attention written a second time, without the library's attention code: a dense softmax in double
// precision over values that the test dequantizes itself.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "world.h"

namespace bitdecoding::test {

// Where the oracle reads a position: the caller states the rule in its own words.
enum class Read { kPage, kRounded, kRaw };

struct Dense {
  std::vector<double> output;  // [head_dim]
  double lse = 0;
};

// Remembers the rows it has dequantized: make a new one after every write.
class DenseOracle {
 public:
  explicit DenseOracle(World& world) : world_(world) {}

  // The query at position q of a sequence against positions [begin, q]; reads[p - begin] says how
  // position p is read. Masks are taken from world.params.
  Dense attend(int sequence, std::int64_t q, int q_head, std::int64_t begin,
               const std::vector<Read>& reads);

  // K (rotated back, shift added; side 0) or V (side 1) of one position of a page.
  const std::vector<double>& page_row(int sequence, std::int64_t position, int kv_head, int side);

 private:
  std::vector<double> dequantize(int sequence, std::int64_t position, int kv_head, int side);
  std::vector<double> input_row(std::uint32_t token, std::int64_t position, int kv_head, int side,
                                bool rounded) const;

  World& world_;
  std::map<std::tuple<int, std::int64_t, int, int>, std::vector<double>> rows_;
};

}  // namespace bitdecoding::test
