// Attention written a second time, without the library's attention code: a dense softmax in double
// precision over values that the test dequantizes itself.
#pragma once

#include <cstdint>
#include <vector>

#include "world.h"

namespace bitdecoding::test {

// Where the oracle reads a position: the caller states the rule in its own words.
enum class Read { kPage, kRounded, kRaw };

struct Dense {
  std::vector<double> output;  // [head_dim]
  double lse = 0;
};

// Query `token` at position q of a sequence against positions [begin, q]; reads[p - begin] says how
// position p is read. Masks are taken from world.params.
Dense dense_attention(World& world, int sequence, std::int64_t q, int q_head, std::int64_t begin,
                      const std::vector<Read>& reads);

// K (rotated back, shift added) or V of one position of a page, in double precision.
std::vector<double> dequantized_row(World& world, int sequence, std::int64_t position, int kv_head,
                                    int side);

}  // namespace bitdecoding::test
