// SPDX-License-Identifier: Apache-2.0
#include "bench_verbs.h"

#include <fmt/format.h>

#include <cmath>
#include <string>

#include "bench_exact.h"
#include "bench_measure.h"
#include "bench_memory.h"
#include "bench_scene.h"
#include "cuda_build.h"

namespace bitdecoding::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kErrorPairs = 8;  // (request, KV head) pairs that relative_error looks at

// A decode step of every sequence, written and ready to be attended.
Status prepare(Scene* scene, std::int64_t first, std::int64_t count) {
  if (Status s = scene->fill(first); !s.ok()) return s;
  if (Status s = scene->begin_step(first, count); !s.ok()) return s;
  if (Status s = scene->write(); !s.ok()) return s;
  if (scene->plan().counters.missing_tokens == 0) return {};
  return {StatusCode::kInternal,
          fmt::format("{} positions that the recipe keeps in BF16 have no slot, so the bench would "
                      "time another cache than the one it names",
                      scene->plan().counters.missing_tokens)};
}

Json describe(const char* verb, Scene* scene, const BenchOptions& o) {
  Json row;
  row["bench"] = verb;
  row["backend"] = scene->backend().name();
  row["isa"] = scene->backend().isa();
  row["threads"] = scene->backend().num_threads();
  row["mode"] = scene->recipe().mode;
  row["arithmetic"] = arithmetic_name(scene->recipe().arithmetic);
  row["q_heads"] = o.q_heads;
  row["kv_heads"] = o.kv_heads;
  row["head_dim"] = o.head_dim;
  row["context"] = o.context;
  row["batch"] = o.batch;
  row["page_size"] = o.page_size;
  row["dtype"] = o.dtype;
  return row;
}

Status add_ceiling(const BenchOptions& o, const ReadCeiling& before, const Timing& timing,
                   std::int64_t bytes, Json* row) {
  // Measured before and after the bench: the better one, since neighbours take bandwidth away.
  Result<ReadCeiling> after = measure_read_ceiling(o.threads);
  if (!after.ok()) return after.status();
  const double ceiling = std::max(before.gbps, after.value().gbps);
  const double cpu_ceiling = std::max(before.cpu_gbps, after.value().cpu_gbps);
  const double gbps = static_cast<double>(bytes) / timing.us_median / 1e3;
  const double cpu_gbps = static_cast<double>(bytes) * o.threads / timing.us_cpu_median / 1e3;
  (*row)["bytes"] = bytes;
  (*row)["read_gbps"] = round_to(gbps, 3);
  (*row)["ceiling_gbps"] = round_to(ceiling, 3);
  (*row)["share_of_ceiling"] = round_to(gbps / ceiling, 4);
  (*row)["cpu_read_gbps"] = round_to(cpu_gbps, 3);
  (*row)["cpu_ceiling_gbps"] = round_to(cpu_ceiling, 3);
  (*row)["cpu_share_of_ceiling"] = round_to(cpu_gbps / cpu_ceiling, 4);
  return {};
}

// The parts of a decode step beside attend: one plan a step for all layers, one write a layer.
Status add_step_parts(Scene* scene, const BenchOptions& o, Json* row) {
  const double seconds = o.seconds / 8;
  Result<Timing> plan = measure([&] { return scene->plan_again(); }, seconds, o.repeat);
  if (!plan.ok()) return plan.status();
  Result<Timing> write = measure([&] { return scene->write(); }, seconds, o.repeat);
  if (!write.ok()) return write.status();
  (*row)["us_plan_median"] = round_to(plan.value().us_median, 2);
  (*row)["us_write_median"] = round_to(write.value().us_median, 2);
  return {};
}

Status add_error(Scene* scene, Json* row) {
  Result<double> error = relative_error(*scene, kErrorPairs);
  if (!error.ok()) return error.status();
  // !(error <= limit): an output that is not a number must fail too.
  constexpr double kLimit = 0.25;
  if (!(error.value() <= kLimit)) {
    return {StatusCode::kInternal,
            fmt::format("attention is wrong: its relative error against double precision over the "
                        "same pages is {:.3g}, and at most {} was expected",
                        error.value(), kLimit)};
  }
  (*row)["relative_error"] = error.value();
  return {};
}

// Difference between the rows that were written and what their pages say, over all of them.
Result<double> written_error(const Scene& scene, std::int64_t first) {
  Result<std::unique_ptr<Backend>> oracle = make_backend("reference", {});
  if (!oracle.ok()) return oracle.status();
  const int dim = scene.layer().geometry.head_dim;
  double difference = 0;
  double norm = 0;
  for (std::size_t r = 0; r < scene.plan().requests.size(); ++r) {
    const RequestPlan& request = scene.plan().requests[r];
    const auto elements = static_cast<std::size_t>(request.query_len * dim);
    std::vector<float> key(elements);
    std::vector<float> value(elements);
    for (int head = 0; head < scene.layer().num_kv_heads; ++head) {
      if (Status s = oracle.value()->gather(scene.params(), static_cast<int>(r), head, first,
                                            request.seq_len, key.data(), value.data());
          !s.ok()) {
        return s;
      }
      for (std::size_t i = 0; i < elements; ++i) {
        const auto at = [&](const Rows& rows) {
          const auto token = static_cast<std::int64_t>(i) / dim;
          return rows.at(request.query_begin + token, head, static_cast<int>(i) % dim);
        };
        difference +=
            std::pow(key[i] - at(scene.key()), 2) + std::pow(value[i] - at(scene.value()), 2);
        norm += std::pow(at(scene.key()), 2) + std::pow(at(scene.value()), 2);
      }
    }
  }
  return std::sqrt(difference / norm);
}

}  // namespace

Result<Json> bench_decode(const BenchOptions& options) {
  if (options.backend == "cuda") return bench_decode_cuda(options);
  BenchOptions o = options;
  o.tokens = 1;
  if (o.context < 1) {
    return Status(StatusCode::kInvalidArgument, "--context 0: decode needs a token to attend to");
  }
  --o.context;  // the step adds the last token
  Json row;
  {
    Result<std::unique_ptr<Scene>> made = Scene::make(o);
    if (!made.ok()) return made.status();
    Scene& scene = *made.value();
    if (Status s = prepare(&scene, o.context, 1); !s.ok()) return s;
    Result<ReadCeiling> ceiling = measure_read_ceiling(o.threads);
    if (!ceiling.ok()) return ceiling.status();
    Result<Timing> timing = measure([&] { return scene.attend(); }, o.seconds, o.repeat);
    if (!timing.ok()) return timing.status();
    row = describe("decode", &scene, options);
    add_timing(timing.value(), &row);
    const std::int64_t bytes = bytes_read(scene);
    if (Status s = add_ceiling(o, ceiling.value(), timing.value(), bytes, &row); !s.ok()) {
      return s;
    }
    if (Status s = add_error(&scene, &row); !s.ok()) return s;
    if (Status s = add_step_parts(&scene, o, &row); !s.ok()) return s;
  }
  if (Status s = add_peers("decode", options, &row); !s.ok()) return s;
  add_machine(&row);
  return row;
}

Result<Json> bench_prefill(const BenchOptions& o) {
  if (o.backend == "cuda") {
    return Status(StatusCode::kUnsupported,
                  "the CUDA backend has no prefill kernel: it gathers a prefix for another's and "
                  "merges; bench decode or write, or pass --backend cpu");
  }
  Json row;
  {
    Result<std::unique_ptr<Scene>> made = Scene::make(o);
    if (!made.ok()) return made.status();
    Scene& scene = *made.value();
    if (Status s = prepare(&scene, o.context, o.tokens); !s.ok()) return s;
    Result<Timing> timing = measure([&] { return scene.attend(); }, o.seconds, o.repeat);
    if (!timing.ok()) return timing.status();
    row = describe("prefill", &scene, o);
    row["tokens"] = o.tokens;
    add_timing(timing.value(), &row);
    // Two products of head_dim multiply-adds for every visible (query, key) pair.
    const double pairs = static_cast<double>(o.tokens) * static_cast<double>(o.context) +
                         static_cast<double>(o.tokens) * static_cast<double>(o.tokens + 1) / 2;
    const double flop = 4.0 * pairs * o.head_dim * o.q_heads * o.batch;
    row["gflops"] = round_to(flop / timing.value().us_median / 1e3, 2);
    if (Status s = add_error(&scene, &row); !s.ok()) return s;
  }
  if (Status s = add_peers("prefill", o, &row); !s.ok()) return s;
  add_machine(&row);
  return row;
}

Result<Json> bench_write(const BenchOptions& o) {
  if (o.backend == "cuda") return bench_write_cuda(o);
  Json row;
  {
    Result<std::unique_ptr<Scene>> made = Scene::make(o);
    if (!made.ok()) return made.status();
    Scene& scene = *made.value();
    if (Status s = prepare(&scene, o.context, o.tokens); !s.ok()) return s;
    Result<Timing> timing = measure([&] { return scene.write(); }, o.seconds, o.repeat);
    if (!timing.ok()) return timing.status();
    row = describe("write", &scene, o);
    row["tokens"] = o.tokens;
    row["key_rule"] = scale_rule_name(scene.recipe().key_rule);
    row["value_rule"] = scale_rule_name(scene.recipe().value_rule);
    row["hadamard"] = scene.recipe().hadamard;
    row["key_shift"] = scene.layer().key_shift != nullptr;
    add_timing(timing.value(), &row);
    const double elements = 2.0 * static_cast<double>(o.tokens) * o.batch * o.kv_heads * o.head_dim;
    row["elements"] = elements;
    row["melements_per_s"] = round_to(elements / timing.value().us_median, 2);
    row["melements_per_s_best"] = round_to(elements / timing.value().us_min, 2);
    Result<double> error = written_error(scene, o.context);
    if (!error.ok()) return error.status();
    constexpr double kLimit = 0.25;  // FP4 on N(0, 1): about 0.1
    if (!(error.value() <= kLimit)) {
      return Status(
          StatusCode::kInternal,
          fmt::format("the written pages are wrong: their relative error against the rows "
                      "is {:.3g}, and at most {} was expected",
                      error.value(), kLimit));
    }
    row["relative_error"] = error.value();
  }
  if (Status s = add_peers("write", o, &row); !s.ok()) return s;
  add_machine(&row);
  return row;
}

}  // namespace bitdecoding::cli
