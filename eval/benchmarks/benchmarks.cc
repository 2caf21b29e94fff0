// SPDX-License-Identifier: Apache-2.0
// The list of all benchmarks.
#include <fmt/format.h>

#include <algorithm>

#include "benchmarks/aime/aime.h"
#include "benchmarks/gpqa/gpqa.h"
#include "benchmarks/lcb/lcb.h"
#include "benchmarks/longbench_pro/longbench_pro.h"
#include "benchmarks/mrcr/mrcr.h"
#include "benchmarks/ruler_niah/ruler_niah.h"

namespace bitdecoding::eval {
namespace {

std::vector<std::unique_ptr<Benchmark>> make_all() {
  std::vector<std::unique_ptr<Benchmark>> all;
  all.reserve(7);
  all.push_back(make_longbench_pro());
  all.push_back(make_mrcr());
  all.push_back(make_aime24());
  all.push_back(make_aime25());
  all.push_back(make_lcb());
  all.push_back(make_ruler_niah());
  all.push_back(make_gpqa());
  return all;
}

}  // namespace

const std::vector<std::unique_ptr<Benchmark>>& all_benchmarks() {
  static const std::vector<std::unique_ptr<Benchmark>> all = make_all();
  return all;
}

Result<const Benchmark*> find_benchmark(std::string_view name) {
  std::string names;
  for (const auto& benchmark : all_benchmarks()) {
    if (benchmark->name() == name) return benchmark.get();
    names += fmt::format("{}{}", names.empty() ? "" : ", ", benchmark->name());
  }
  return Status(StatusCode::kNotFound,
                fmt::format("There is no benchmark '{}'; there are {}.", name, names));
}

std::vector<MissingItem> missing_for(const std::vector<const Benchmark*>& benchmarks,
                                     const LoadOptions& options) {
  std::vector<MissingItem> all;
  for (const Benchmark* benchmark : benchmarks) {
    for (MissingItem& item : benchmark->missing(options)) {
      const bool known = std::any_of(all.begin(), all.end(),
                                     [&](const MissingItem& it) { return it.what == item.what; });
      if (!known) all.push_back(std::move(item));
    }
  }
  return all;
}

}  // namespace bitdecoding::eval
