// SPDX-License-Identifier: Apache-2.0
// Schedules as an engine makes them, at random: sequences begin, share prefixes, run in chunks and
// with drafts, are preempted, end, and leave their pages to others.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "world.h"

namespace bitdecoding::test {
namespace {

constexpr std::int64_t kLength = 300;
constexpr int kStreams = 6;
constexpr std::uint32_t kDraft = 1000000;  // added to a token that will be rejected

std::uint32_t token_of(int stream, std::int64_t position) {
  return static_cast<std::uint32_t>(1000 * stream + position);
}

struct Running {
  int stream = 0;
  int sequence = 0;  // of the world
  std::int64_t done = 0;
  std::vector<std::int32_t> pages;
};

// Rows of a step and which of them hold tokens that stay.
struct Chunk {
  std::size_t running = 0;
  std::int64_t begin = 0, kept = 0, rejected = 0;
};

class Schedule {
 public:
  Schedule(World* world, std::uint32_t seed) : world_(*world), random_(seed) {
    for (std::int64_t p = world->options.num_pages - 1; p >= 0; --p) {
      uses_.push_back(0);
      free_.push_back(static_cast<std::int32_t>(p));
    }
  }

  // The next step's work; chunks() says what it means. finish() must follow.
  std::vector<Work> next() {
    while (running_.size() < 5 && free_.size() >= 5) admit();
    if (chance(12)) end(pick(running_.size()));  // preempted: its stream begins anew some time
    chunks_.clear();
    std::vector<Work> work;
    for (std::size_t i = 0; i < running_.size(); ++i) {
      if (chance(4)) continue;
      Running& r = running_[i];
      // One token, a chunk, or up to kMaxDecodeQueries tokens of which some were drafts.
      Chunk c{i, r.done, 1, 0};
      if (chance(3)) {
        c.kept = 1 + static_cast<std::int64_t>(pick(120));
      } else if (chance(2)) {
        c.kept = 1 + static_cast<std::int64_t>(pick(kMaxDecodeQueries));
        c.rejected = static_cast<std::int64_t>(
            pick(static_cast<std::size_t>(kMaxDecodeQueries - c.kept + 1)));
      }
      c.kept = std::min(c.kept, kLength - r.done);
      c.rejected = std::min(c.rejected, kLength - r.done - c.kept);
      Work w;
      w.sequence = r.sequence;
      for (std::int64_t p = 0; p < c.kept + c.rejected; ++p) {
        w.tokens.push_back(token_of(r.stream, c.begin + p) + (p < c.kept ? 0 : kDraft));
      }
      work.push_back(w);
      chunks_.push_back(c);
    }
    return work;
  }
  void finish() {
    for (const Chunk& c : chunks_) {
      world_.reject(running_[c.running].sequence, c.rejected);
      running_[c.running].done += c.kept;
    }
    for (std::size_t i = running_.size(); i-- > 0;) {
      if (running_[i].done == kLength) end(i);
    }
  }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  int stream(const Chunk& c) const { return running_[c.running].stream; }

 private:
  bool chance(unsigned one_in) { return random_() % one_in == 0; }
  std::size_t pick(std::size_t n) { return random_() % n; }

  void admit() {
    Running r;
    r.stream = static_cast<int>(pick(kStreams));
    // A prefix of whole pages that another sequence of the stream holds.
    for (const Running& other : running_) {
      if (other.stream != r.stream || other.done < 64) continue;
      const std::int64_t hit =
          1 + static_cast<std::int64_t>(
                  pick(static_cast<std::size_t>(std::min(other.done, kLength - 1) / 64)));
      r.pages.assign(other.pages.begin(), other.pages.begin() + hit);
      r.done = 64 * hit;
      break;
    }
    while (r.pages.size() < 5) {
      r.pages.push_back(free_.back());
      free_.pop_back();
    }
    for (const std::int32_t page : r.pages) ++uses_[static_cast<std::size_t>(page)];
    r.sequence = world_.add_sequence(r.pages);
    for (std::int64_t p = 0; p < r.done; ++p) {
      world_.sequences[static_cast<std::size_t>(r.sequence)].tokens.push_back(
          token_of(r.stream, p));
    }
    running_.push_back(r);
  }
  void end(std::size_t i) {
    for (const std::int32_t page : running_[i].pages) {
      if (--uses_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
    }
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    std::shuffle(free_.begin(), free_.end(), random_);
  }

  World& world_;
  std::mt19937 random_;
  std::vector<int> uses_;
  std::vector<std::int32_t> free_;
  std::vector<Running> running_;
  std::vector<Chunk> chunks_;
};

class RandomSchedule : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Backend, RandomSchedule, testing::ValuesIn(backend_names()),
                         [](const auto& backend) { return backend.param; });

// In reproducible mode every row is what its tokens say, bit for bit.
TEST_P(RandomSchedule, RowsAreAFunctionOfTheirTokens) {
  for (const Format f : {Format::kNvfp4, Format::kMxfp4}) {
    WorldOptions o;
    o.backend = GetParam();
    o.format = f;
    o.arithmetic = Arithmetic::kInt8;
    o.reproducible = true;
    o.num_kv_heads = 1;
    o.num_q_heads = 2;
    o.num_slots = 128;
    const std::size_t row = 2 * 64;
    std::vector<std::vector<float>> alone;
    for (int stream = 0; stream < kStreams; ++stream) {
      World w(o);
      const int s = w.add_sequence({4, 9, 2, 7, 1});
      alone.push_back(w.step({{s, iota_tokens(token_of(stream, 0), kLength)}}).output);
    }
    for (std::uint32_t seed = 0; seed < 3; ++seed) {
      World w(o);
      Schedule schedule(&w, seed);
      for (int step = 0; step < 60; ++step) {
        SCOPED_TRACE(testing::Message() << format_name(f) << " seed " << seed << " step " << step);
        const StepResult r = w.step(schedule.next());
        ASSERT_TRUE(r.status.ok()) << r.status.message();
        std::size_t at = 0;
        for (const Chunk& c : schedule.chunks()) {
          const std::vector<float>& want = alone[static_cast<std::size_t>(schedule.stream(c))];
          const std::size_t kept = static_cast<std::size_t>(c.kept) * row;
          const std::size_t first = static_cast<std::size_t>(c.begin) * row;
          ASSERT_TRUE(std::equal(r.output.begin() + static_cast<std::ptrdiff_t>(at),
                                 r.output.begin() + static_cast<std::ptrdiff_t>(at + kept),
                                 want.begin() + static_cast<std::ptrdiff_t>(first)))
              << "stream " << schedule.stream(c) << " from " << c.begin << ", " << c.kept;
          at += kept + static_cast<std::size_t>(c.rejected) * row;
        }
        schedule.finish();
      }
      EXPECT_EQ(w.directory->totals().missing_tokens, 0U);
      EXPECT_EQ(w.corrupt_scales, 0U);
    }
  }
}

// Short of slots, what is lost is read from pages: finite, counted, the same bytes on every
// backend.
TEST(RandomScheduleShortOfSlots, BackendsAgree) {
  for (const std::int32_t slots : {0, 7, 20}) {
    WorldOptions o;
    o.num_kv_heads = 1;
    o.num_q_heads = 2;
    o.num_slots = slots;
    World want(o);
    o.backend = "cpu";
    World got(o);
    Schedule schedule(&want, 7);
    Schedule same(&got, 7);
    for (int step = 0; step < 60; ++step) {
      const StepResult a = want.step(schedule.next());
      const StepResult b = got.step(same.next());
      ASSERT_TRUE(a.status.ok()) << a.status.message();
      ASSERT_TRUE(b.status.ok()) << b.status.message();
      for (std::int64_t page = 0; page < o.num_pages; ++page) {
        ASSERT_EQ(want.page_bytes(page), got.page_bytes(page)) << "page " << page;
      }
      ASSERT_EQ(a.output.size(), b.output.size());
      for (std::size_t i = 0; i < a.output.size(); ++i) {
        ASSERT_TRUE(std::fabs(a.output[i] - b.output[i]) <= 2e-3F) << a.output[i] << b.output[i];
      }
      schedule.finish();
      same.finish();
    }
    EXPECT_GT(want.directory->totals().missing_tokens, 0U);
  }
}

}  // namespace
}  // namespace bitdecoding::test
