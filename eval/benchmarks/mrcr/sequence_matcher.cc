// SPDX-License-Identifier: Apache-2.0
// Blocks are found as difflib finds them: the longest block, of those the one that starts first in
// a, of those the one that starts first in b; then left and right of it. Ties decide the ratio, so
// the order of the search counts, not only its result.
#include "benchmarks/mrcr/sequence_matcher.h"

#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace bitdecoding::eval {
namespace {

struct Block {
  std::size_t a = 0;
  std::size_t b = 0;
  std::size_t size = 0;
};

struct Range {
  std::size_t a_begin, a_end, b_begin, b_end;
};

class Matcher {
 public:
  Matcher(std::u32string_view a, std::u32string_view b, bool autojunk)
      : a_(a), b_(b), lengths_(b.size() + 1), next_lengths_(b.size() + 1) {
    for (std::size_t j = 0; j < b.size(); ++j) {
      positions_[b[j]].push_back(static_cast<std::uint32_t>(j));
    }
    constexpr std::size_t kLong = 200;
    if (autojunk && b.size() >= kLong) {
      const std::size_t popular = b.size() / 100 + 1;
      std::erase_if(positions_, [&](const auto& item) { return item.second.size() > popular; });
    }
    // A lookup in a by position, not by hash: a is walked over and over.
    of_a_.reserve(a.size());
    for (const char32_t c : a) {
      const auto found = positions_.find(c);
      of_a_.push_back(found == positions_.end() ? nullptr : &found->second);
    }
  }

  std::size_t matches() {
    std::size_t total = 0;
    std::vector<Range> open = {{0, a_.size(), 0, b_.size()}};
    while (!open.empty()) {
      const Range range = open.back();
      open.pop_back();
      const Block block = longest(range);
      if (block.size == 0) continue;
      total += block.size;
      if (range.a_begin < block.a && range.b_begin < block.b) {
        open.push_back({range.a_begin, block.a, range.b_begin, block.b});
      }
      if (block.a + block.size < range.a_end && block.b + block.size < range.b_end) {
        open.push_back({block.a + block.size, range.a_end, block.b + block.size, range.b_end});
      }
    }
    return total;
  }

 private:
  Block longest(const Range& range) {
    Block best = seed(range);
    // Both ends grow over code points that cannot start a match.
    while (best.a > range.a_begin && best.b > range.b_begin && a_[best.a - 1] == b_[best.b - 1]) {
      --best.a;
      --best.b;
      ++best.size;
    }
    while (best.a + best.size < range.a_end && best.b + best.size < range.b_end &&
           a_[best.a + best.size] == b_[best.b + best.size]) {
      ++best.size;
    }
    return best;
  }

  // lengths_[j + 1]: of the match that ends at a[i - 1] and b[j]. Only what a row has set is
  // cleared, so a row costs what its code point's positions cost.
  Block seed(const Range& range) {
    Block best{range.a_begin, range.b_begin, 0};
    touched_.clear();
    for (std::size_t i = range.a_begin; i < range.a_end; ++i) {
      next_touched_.clear();
      if (of_a_[i] != nullptr) {
        const auto& where = *of_a_[i];
        for (auto it = std::lower_bound(where.begin(), where.end(), range.b_begin);
             it != where.end() && *it < range.b_end; ++it) {
          const std::size_t j = *it;
          const std::uint32_t length = lengths_[j] + 1;
          next_lengths_[j + 1] = length;
          next_touched_.push_back(static_cast<std::uint32_t>(j + 1));
          if (length > best.size) best = {i + 1 - length, j + 1 - length, length};
        }
      }
      for (const std::uint32_t j : touched_) lengths_[j] = 0;
      lengths_.swap(next_lengths_);
      touched_.swap(next_touched_);
    }
    for (const std::uint32_t j : touched_) lengths_[j] = 0;
    return best;
  }

  std::u32string_view a_;
  std::u32string_view b_;
  std::unordered_map<char32_t, std::vector<std::uint32_t>> positions_;
  std::vector<const std::vector<std::uint32_t>*> of_a_;
  std::vector<std::uint32_t> lengths_;
  std::vector<std::uint32_t> next_lengths_;
  std::vector<std::uint32_t> touched_;
  std::vector<std::uint32_t> next_touched_;
};

}  // namespace

double sequence_ratio(std::u32string_view a, std::u32string_view b, bool autojunk) {
  const std::size_t length = a.size() + b.size();
  if (length == 0) return 1.0;
  const auto matched = static_cast<double>(Matcher(a, b, autojunk).matches());
  return 2.0 * matched / static_cast<double>(length);
}

}  // namespace bitdecoding::eval
