// SPDX-License-Identifier: Apache-2.0
// The list of all benchmarks.
#include <fmt/format.h>

#include <algorithm>

#include "benchmarks/aime/aime.h"
#include "benchmarks/gpqa/gpqa.h"
#include "benchmarks/longbench_pro/longbench_pro.h"
#include "benchmarks/mrcr/mrcr.h"
#include "benchmarks/protocol.h"
#include "benchmarks/ruler_niah/ruler_niah.h"

namespace bitdecoding::eval {
namespace {

// Stands for a benchmark whose adapter is not in this build.
class Absent : public ProtocolBenchmark {
 public:
  explicit Absent(const Protocol& protocol) : ProtocolBenchmark(protocol) {}
  std::vector<MissingItem> missing(const LoadOptions&) const override {
    return {{"adapter of " + std::string(name()), "It is not in this build.", "", false}};
  }
  Result<LoadedRows> load(const LoadOptions&) const override { return absent(); }
  Result<Score> score(const BenchmarkRow&, const std::string&, const LoadOptions&) const override {
    return absent();
  }
  std::vector<std::string> groups() const override { return {}; }

 private:
  Status absent() const {
    return {StatusCode::kUnsupported, fmt::format("{} is not in this build.", title())};
  }
};

std::vector<std::unique_ptr<Benchmark>> make_all() {
  std::vector<std::unique_ptr<Benchmark>> all;
  const auto absent = [&](const Protocol& protocol) {
    all.push_back(std::make_unique<Absent>(protocol));
  };
  all.push_back(make_longbench_pro());
  all.push_back(make_mrcr());
  all.push_back(make_aime24());
  all.push_back(make_aime25());
  absent({"lcb", "LiveCodeBench v6", false, 39168, 81920});
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
