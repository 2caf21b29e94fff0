// SPDX-License-Identifier: Apache-2.0
// The same steps through the reference and through the CUDA backend.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <vector>

#include "attend_compare.h"
#include "cuda_host_backend.h"

namespace bitdecoding::test {

// Skips its tests where there is no GPU.
class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    const std::string why = why_no_gpu();
    if (!why.empty()) GTEST_SKIP() << why;
  }
};

// How far decoded rows may be from the reference's.
struct Limits {
  double output = 0;  // relative L2 error of a request's rows
  double lse = 0;     // absolute
};

struct CudaCase {
  WorldOptions options;
  std::vector<std::int64_t> chunks = kChunks;
  Masks masks;
  Limits limits;
  std::vector<Planner> planners = {Planner::kHost, Planner::kDevice};
};

// Rows of prefilled requests are not looked at.
void expect_decoded_rows(const World& w, const StepResult& got, const StepResult& want,
                         const Limits& limits);

// Two sequences grow by `chunks`; after each step pages must be equal byte for byte, and outputs
// within the limits; at the end counters must be equal, too.
void compare_steps(const CudaCase& c);

}  // namespace bitdecoding::test
