// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "backend/cuda/device.h"
#include "bench_measure.h"
#include "cuda_build.h"
#include "cuda_ceiling.h"
#include "cuda_scene.h"

namespace bitdecoding::cli {
namespace {

using Json = nlohmann::ordered_json;

Json describe(const char* verb, const CudaScene& scene, const BenchOptions& o) {
  Json row;
  row["bench"] = verb;
  row["backend"] = "cuda";
  row["isa"] = scene.device().kernels;
  row["gpu"] = scene.device().name;
  row["mode"] = scene.recipe().mode;
  row["arithmetic"] = arithmetic_name(scene.recipe().arithmetic);
  row["q_heads"] = o.q_heads;
  row["kv_heads"] = o.kv_heads;
  row["head_dim"] = o.head_dim;
  row["context"] = o.context;
  row["batch"] = o.batch;
  row["page_size"] = o.page_size;
  row["dtype"] = o.dtype;
  row["layers"] = scene.layers();
  return row;
}

void add_device_timing(const Timing& timing, Json* row) {
  (*row)["us_median"] = round_to(timing.us_median, 2);
  (*row)["us_min"] = round_to(timing.us_min, 2);
  (*row)["us_max"] = round_to(timing.us_max, 2);
  (*row)["calls"] = timing.calls;
}

Status add_error(const char* what, const Result<double>& error, Json* row) {
  if (!error.ok()) return error.status();
  // !(error <= limit): a result that is not a number must fail too.
  constexpr double kLimit = 0.25;
  if (!(error.value() <= kLimit)) {
    return {StatusCode::kInternal,
            fmt::format("{} is {:.3g}, and at most {} was expected", what, error.value(), kLimit)};
  }
  (*row)["relative_error"] = error.value();
  return {};
}

Status add_ceiling(std::int64_t bytes, double us, Json* row) {
  double ms = 0;
  std::int64_t read = 0;
  const auto error = static_cast<cudaError_t>(time_reads(&ms, &read));
  if (error != cudaSuccess) {
    return {StatusCode::kInternal,
            fmt::format("measuring the memory failed: {}", cudaGetErrorString(error))};
  }
  const double ceiling = static_cast<double>(read) / ms / 1e6;
  const double gbps = static_cast<double>(bytes) / us / 1e3;
  (*row)["bytes"] = bytes;
  (*row)["read_gbps"] = round_to(gbps, 1);
  (*row)["ceiling_gbps"] = round_to(ceiling, 1);
  (*row)["share_of_ceiling"] = round_to(gbps / ceiling, 4);
  return {};
}

}  // namespace

GpuUse gpu_use(const std::string& name, int major, int minor) {
  CudaDevice device;
  device.name = name;
  device.major = major;
  device.minor = minor;
  const std::string kernels = cuda::kernels_of(major, minor);
  if (kernels.empty()) return {false, cuda::no_decode_kernels(device).message()};
  return {true, fmt::format("this build's {} kernels decode on it; `bench --backend cuda`, the "
                            "library bitdecoding_cuda",
                            kernels)};
}

Result<Json> bench_decode_cuda(const BenchOptions& options) {
  BenchOptions o = options;
  o.tokens = 1;
  if (o.context < 1) {
    return Status(StatusCode::kInvalidArgument, "--context 0: decode needs a token to attend to");
  }
  --o.context;  // the step adds the last token
  Result<std::unique_ptr<CudaScene>> made = CudaScene::make(o);
  if (!made.ok()) return made.status();
  CudaScene& scene = *made.value();
  Status status = scene.fill(o.context);
  if (status.ok()) status = scene.begin_step(o.context, 1);
  if (!status.ok()) return status;
  const Result<Timing> write = scene.time_write(o.repeat);  // the step's rows, before they are read
  if (!write.ok()) return write.status();
  const Result<Timing> attend = scene.time_attend(o.repeat);
  if (!attend.ok()) return attend.status();
  Json row = describe("decode", scene, options);
  add_device_timing(attend.value(), &row);
  status = add_ceiling(scene.bytes_read(), attend.value().us_median, &row);
  if (status.ok()) {
    status = add_error("attention is wrong: its error against double precision over the same pages",
                       scene.attend_error(), &row);
  }
  if (!status.ok()) return status;
  const Result<Timing> plan = scene.time_plan(o.repeat);
  if (!plan.ok()) return plan.status();
  row["us_plan_median"] = round_to(plan.value().us_median, 2);
  row["us_write_median"] = round_to(write.value().us_median, 2);
  add_machine(&row);
  return row;
}

Result<Json> bench_write_cuda(const BenchOptions& o) {
  Result<std::unique_ptr<CudaScene>> made = CudaScene::make(o);
  if (!made.ok()) return made.status();
  CudaScene& scene = *made.value();
  Status status = scene.fill(o.context);
  if (status.ok()) status = scene.begin_step(o.context, o.tokens);
  if (!status.ok()) return status;
  const Result<Timing> timing = scene.time_write(o.repeat);
  if (!timing.ok()) return timing.status();
  Json row = describe("write", scene, o);
  row["tokens"] = o.tokens;
  row["key_rule"] = scale_rule_name(scene.recipe().key_rule);
  row["value_rule"] = scale_rule_name(scene.recipe().value_rule);
  row["hadamard"] = scene.recipe().hadamard;
  row["key_shift"] = scene.layer().key_shift != nullptr;
  add_device_timing(timing.value(), &row);
  const double elements = 2.0 * static_cast<double>(o.tokens) * o.batch * o.kv_heads * o.head_dim;
  row["elements"] = elements;
  row["melements_per_s"] = round_to(elements / timing.value().us_median, 2);
  status = add_error("the written pages are wrong: their error against the rows",
                     scene.write_error(), &row);
  if (!status.ok()) return status;
  add_machine(&row);
  return row;
}

}  // namespace bitdecoding::cli
