// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "backend/validate.h"
#include "bitdecoding/cuda.h"
#include "common/decode.h"
#include "common/fp4.h"
#include "common/memory.h"
#include "common/write.h"
#include "cuda_plan.h"
#include "device.h"

namespace bitdecoding {
namespace cuda {
namespace {

Status invalid(std::string message) { return {StatusCode::kInvalidArgument, std::move(message)}; }

// Bulk copies move sixteen bytes and more at a time.
Status check_aligned(const char* what, const void* data, std::int64_t stride_a,
                     std::int64_t stride_b) {
  if (reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride_a % 16 == 0 &&
      stride_b % 16 == 0) {
    return {};
  }
  return invalid(fmt::format("{} must be aligned to 16 bytes, its strides ({} and {} bytes) too",
                             what, stride_a, stride_b));
}

Status check_layer(const LayerConfig* layer, const CacheView& cache, const Plan& plan) {
  Status status = validate_layer_shape(layer);
  if (status.ok()) status = validate_cache(cache, *layer);
  if (!status.ok()) return status;
  if (layer->value_shift != nullptr) {
    return {StatusCode::kUnsupported,
            "the CUDA backend does not subtract value means; pass a null value_shift (in a recipe: "
            "\"value_shift\": false)"};
  }
  const CudaPlanLimits& limits = plan.limits();
  const PageGeometry& g = layer->geometry;
  const PageGeometry& of = limits.geometry;
  if (g.format != of.format || g.order != of.order || g.head_dim != of.head_dim ||
      g.page_size != of.page_size || layer->num_kv_heads != limits.num_kv_heads) {
    return invalid(fmt::format(
        "the plan is for {} pages ({} order) of {} tokens, {} KV heads of {}, but the layer has {} "
        "({}) "
        "pages of {} tokens, {} heads of {}; layers of different geometry need their own plan",
        format_name(of.format), fragment_order_name(of.order), of.page_size, limits.num_kv_heads,
        of.head_dim, format_name(g.format), fragment_order_name(g.order), g.page_size,
        layer->num_kv_heads, g.head_dim));
  }
  if (cache.num_pages < limits.num_pages) {
    return {StatusCode::kOutOfRange,
            fmt::format("the cache has {} pages, but the plan was made for {}", cache.num_pages,
                        limits.num_pages)};
  }
  return check_aligned("the cache's pages", cache.pages, cache.stride_page, cache.stride_head);
}

Status check_shadow(const ShadowPool& pool, const Plan& plan) {
  const std::int32_t slots = plan.limits().num_slots;
  if (slots == 0) return {};
  if (pool.rows == nullptr || pool.num_slots < slots) {
    return {StatusCode::kOutOfRange,
            fmt::format("the plan hands out {} shadow slots, but the pool has {}{}", slots,
                        pool.num_slots, pool.rows == nullptr ? " and no memory" : "")};
  }
  return check_aligned("the shadow pool", pool.rows, 0, 0);
}

LayerView layer_view(const LayerConfig& layer, const CacheView& cache, const ShadowPool& shadow) {
  LayerView v;
  v.format = layer.geometry.format;
  v.head_dim = layer.geometry.head_dim;
  v.num_kv_heads = layer.num_kv_heads;
  v.key_rule = layer.key_rule;
  v.value_rule = layer.value_rule;
  v.hadamard = layer.hadamard;
  v.key_shift = layer.key_shift;
  v.key_outer = layer.key_outer;
  v.value_outer = layer.value_outer;
  v.pages = cache.pages;
  v.stride_page = cache.stride_page;
  v.stride_head = cache.stride_head;
  v.shadow = shadow.rows;
  return v;
}

Tensor tensor_of(const TensorView& view) {
  const bool aligned = reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 &&
                       view.stride_token % 8 == 0 && view.stride_head % 8 == 0;
  return {view.data, view.dtype, view.stride_token, view.stride_head,
          aligned && view.dtype != DType::kF32};
}

Plan::Place place_of(CudaStream stream) {
  Plan::Place place{stream, 0};
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) {
    cudaGetLastError();  // the launch itself will say what is wrong
  } else if (status == cudaStreamCaptureStatusActive) {
    place.capture = id;
  }
  return place;
}

// Kernels of `any` are asked for here; decode's when attend needs them.
Status check_kernels(const CudaDevice& device) {
  if (has_any_kernels()) return {};
  return {
      StatusCode::kUnsupported,
      fmt::format("{} has compute capability {}.{}, and this library holds nothing that runs on "
                  "it; add its architecture to BITDECODING_CUDA_ARCHITECTURES (8.0 or later) "
                  "and build again",
                  device.name, device.major, device.minor)};
}

// What attend asks for beyond the layer.
Status check_attend(const AttendParams& p, const Plan& plan, int most_head_dim) {
  Status status = check_layer(p.layer, p.cache, plan);
  if (status.ok()) status = validate_group_size(*p.layer);
  if (status.ok()) status = check_shadow(p.shadow, plan);
  if (status.ok()) status = validate_scalars(p);
  if (!status.ok()) return status;
  if (p.arithmetic != Arithmetic::kWide && p.arithmetic != Arithmetic::kFp4) {
    return {StatusCode::kUnsupported,
            fmt::format("the CUDA backend computes in wide arithmetic (FP16 and BF16 tensor cores) "
                        "and emulates fp4, but not {}; set the recipe's arithmetic to wide",
                        arithmetic_name(p.arithmetic))};
  }
  if (p.layer->num_q_heads != plan.limits().num_q_heads ||
      p.layer->geometry.head_dim > most_head_dim) {
    return invalid(
        fmt::format("the layer has {} query heads of {}, but the plan was made for {} and the "
                    "backend for at most {}",
                    p.layer->num_q_heads, p.layer->geometry.head_dim, plan.limits().num_q_heads,
                    most_head_dim));
  }
  const int head_dim = p.layer->geometry.head_dim;
  status = validate_tensor("query", p.query, 1, p.layer->num_q_heads, head_dim);
  if (!status.ok()) return status;
  return validate_tensor("output",
                         {p.output, p.output_dtype, p.stride_output_token, p.stride_output_head}, 1,
                         p.layer->num_q_heads, head_dim);
}

DecodeArgs decode_args(const AttendParams& p, const Plan& plan, const PlanView& view) {
  DecodeArgs args;
  args.plan = view;
  args.pages = p.cache.pages;
  args.stride_page = p.cache.stride_page;
  args.stride_head = p.cache.stride_head;
  args.shadow = p.shadow.rows;
  args.group_tokens = p.layer->geometry.group_tokens;
  args.query = p.query.data;
  args.query_stride_token = p.query.stride_token;
  args.query_stride_head = p.query.stride_head;
  args.query_dtype = p.query.dtype;
  args.output = p.output;
  args.output_dtype = p.output_dtype;
  args.output_stride_token = p.stride_output_token;
  args.output_stride_head = p.stride_output_head;
  args.lse = p.lse;
  args.key_shift = p.layer->key_shift;
  args.key_outer = p.layer->key_outer;
  args.value_outer = p.layer->value_outer;
  args.attn_sink = p.attn_sink;
  args.num_q_heads = p.layer->num_q_heads;
  args.num_kv_heads = p.layer->num_kv_heads;
  args.group = p.layer->num_q_heads / p.layer->num_kv_heads;
  args.rows_in_use = plan.rows_in_use();
  args.sm_scale = p.sm_scale;
  args.softcap = p.softcap;
  args.window_left = p.window_left;
  args.hadamard = p.layer->hadamard;
  return args;
}

// Without the workspace.
Fp4Args fp4_args(const AttendParams& p, const DecodeArgs& decode, int query_rows,
                 int multiprocessors) {
  Fp4Args args;
  args.decode = decode;
  args.query_terms = p.query_terms;
  args.c = p.probability_c;
  args.tau = p.probability_tau;
  args.log_c = std::log(static_cast<double>(args.c));
  args.inverse_softcap = p.softcap == 0.0F ? 0.0 : 1.0 / static_cast<double>(p.softcap);
  args.row_blocks = (query_rows + kFp4Rows - 1) / kFp4Rows;
  args.splits = fp4_splits(fp4_blocks(args), multiprocessors);
  return args;
}

// Two shared rows a block of threads, of two column blocks.
std::int64_t num_partials(const CudaDevice& device, int head_dim) {
  return std::int64_t{2} * device.multiprocessors * partial_floats(2 * kColumns, head_dim);
}

class Backend final : public CudaBackend {
 public:
  Backend(CudaDevice device, const CudaBackendOptions& options)
      : device_(std::move(device)), options_(options) {}

  Status allocate();
  const CudaDevice& device() const override { return device_; }
  std::int64_t device_bytes() const override {
    return partials_.bytes() + arrivals_.bytes() + fp4_workspace_.bytes();
  }
  Status write(const WriteParams& params, const CudaPlan& plan, CudaStream stream) override;
  Status attend(const AttendParams& params, const CudaPlan& plan, CudaStream stream) override;
  Status gather(const AttendParams& params, const CudaGather& what, const CudaPlan& plan,
                CudaStream stream) override;
  Status merge(const Merge& merge, CudaStream stream) override;

 private:
  // Launches that may begin before their predecessor has ended: on devices from 9.0 on.
  bool follows(const Plan& plan, const Plan::Place& place) const {
    return device_.major >= 9 && plan.followed(place);
  }
  Status launch_decode(const DecodeShape& shape, const DecodeArgs& args,
                       const DecodeLaunch& on) const;
  Status attend_fp4(const AttendParams& params, const DecodeArgs& decode, const Plan& plan,
                    CudaStream stream);

  const CudaDevice device_;
  const CudaBackendOptions options_;
  DeviceArray<float> partials_;
  DeviceArray<std::int32_t> arrivals_;
  DeviceArray<double> fp4_workspace_;
};

Status Backend::allocate() {
  const std::int64_t blocks = device_.multiprocessors;
  Status status =
      partials_.allocate(num_partials(device_, options_.head_dim), "allocating attend's workspace");
  if (status.ok()) status = arrivals_.allocate(blocks, "allocating attend's workspace");
  if (!status.ok()) return status;
  return fp4_workspace_.allocate(fp4_workspace(device_.multiprocessors, options_.head_dim),
                                 "allocating attend's workspace");
}

Status Backend::write(const WriteParams& p, const CudaPlan& plan_of, CudaStream stream) {
  const auto& plan = static_cast<const Plan&>(plan_of);
  Status status = check_layer(p.layer, p.cache, plan);
  if (status.ok()) status = check_shadow(p.shadow, plan);
  if (!status.ok()) return status;
  const PlanView view = plan.view(plan.limits().windows.front()).take();
  const std::int64_t tokens = view.max_writes;
  const int head_dim = p.layer->geometry.head_dim;
  status = validate_tensor("key", p.key, tokens, p.layer->num_kv_heads, head_dim);
  if (status.ok())
    status = validate_tensor("value", p.value, tokens, p.layer->num_kv_heads, head_dim);
  if (!status.ok()) return status;
  WriteArgs args;
  args.plan = view;
  args.layer = layer_view(*p.layer, p.cache, p.shadow);
  args.key = tensor_of(p.key);
  args.value = tensor_of(p.value);
  args.counters = p.counters;
  if (view.max_writes == 0) return {};
  const Plan::Place place = place_of(stream);
  status = launch_write(args, stream, follows(plan, place));
  if (status.ok()) plan.launched(place);
  return status;
}

Status Backend::attend(const AttendParams& p, const CudaPlan& plan_of, CudaStream stream) {
  const auto& plan = static_cast<const Plan&>(plan_of);
  Status status = check_attend(p, plan, options_.head_dim);
  if (!status.ok()) return status;
  const auto view = plan.view(p.window_left);
  if (!view.ok()) return view.status();
  if (view.value().num_requests == 0) return {};
  if (view.value().num_blocks != device_.multiprocessors) {
    return invalid(
        fmt::format("the plan was made on a device of {} multiprocessors, but {} has {}; make it "
                    "while the backend's device is the current one",
                    view.value().num_blocks, device_.name, device_.multiprocessors));
  }
  DecodeArgs args = decode_args(p, plan, view.value());
  if (p.arithmetic == Arithmetic::kFp4) return attend_fp4(p, args, plan, stream);
  args.partials = partials_.get();
  args.arrivals = arrivals_.get();
  const DecodeShape shape{p.layer->geometry.format, p.layer->geometry.head_dim,
                          plan.column_blocks()};
  const Plan::Place place = place_of(stream);
  const DecodeLaunch on{device_.multiprocessors, static_cast<int>(device_.shared_bytes), stream,
                        follows(plan, place)};
  status = launch_decode(shape, args, on);
  if (status.ok()) plan.launched(place);
  return status;
}

Status Backend::launch_decode(const DecodeShape& shape, const DecodeArgs& args,
                              const DecodeLaunch& on) const {
#ifdef BITDECODING_CUDA_SM80
  if (device_.kernels == "sm80") return launch_decode_sm80(shape, args, on);
#endif
#ifdef BITDECODING_CUDA_SM90
  if (device_.kernels == "sm90") return launch_decode_sm90(shape, args, on);
#endif
  return no_decode_kernels(device_);
}

Status Backend::attend_fp4(const AttendParams& p, const DecodeArgs& decode, const Plan& plan,
                           CudaStream stream) {
  Fp4Args args = fp4_args(p, decode, plan.query_rows(), device_.multiprocessors);
  args.maxima = fp4_workspace_.get();
  args.partials = args.maxima + fp4_most_parts(device_.multiprocessors) * kFp4Rows;
  const PageGeometry& g = p.layer->geometry;
  return launch_attend_fp4(g.format, g.head_dim, args, stream);
}

Status Backend::gather(const AttendParams& p, const CudaGather& what, const CudaPlan& plan_of,
                       CudaStream stream) {
  const auto& plan = static_cast<const Plan&>(plan_of);
  Status status = check_layer(p.layer, p.cache, plan);
  if (status.ok() && what.with_shadow) status = check_shadow(p.shadow, plan);
  if (!status.ok()) return status;
  const PlanView view = plan.view(plan.limits().windows.front()).take();
  const std::int64_t most = view.page_stride * view.page_size;
  if (what.request < 0 || what.request >= view.num_requests || what.begin < 0 ||
      what.end < what.begin || what.end > most) {
    return {
        StatusCode::kOutOfRange,
        fmt::format("positions [{}, {}) of request {} were asked for, but the step has {} requests "
                    "of at most {} tokens",
                    what.begin, what.end, what.request, view.num_requests, most)};
  }
  const int heads = p.layer->num_kv_heads;
  const int head_dim = p.layer->geometry.head_dim;
  const std::int64_t tokens = what.end - what.begin;
  status = validate_tensor("key", {what.key, what.dtype, what.stride_token, what.stride_head},
                           tokens, heads, head_dim);
  if (status.ok()) {
    status = validate_tensor("value", {what.value, what.dtype, what.stride_token, what.stride_head},
                             tokens, heads, head_dim);
  }
  if (!status.ok()) return status;
  return launch_gather({view, layer_view(*p.layer, p.cache, p.shadow), what}, stream);
}

Status Backend::merge(const Merge& m, CudaStream stream) {
  if (m.tokens < 0 || m.heads < 1 || m.head_dim < 1) {
    return invalid(
        fmt::format("a merge of {} tokens, {} heads of {} is no merge; expected 0 or more "
                    "tokens and 1 or more of the others",
                    m.tokens, m.heads, m.head_dim));
  }
  if (m.tokens > 0 && (m.a == nullptr || m.b == nullptr || m.lse_a == nullptr ||
                       m.lse_b == nullptr || m.out == nullptr)) {
    return invalid("a merge needs both parts, both LSEs and an output; only lse may be null");
  }
  return launch_merge(m, stream);
}

}  // namespace
}  // namespace cuda

std::int64_t CudaBackend::bytes_for(const CudaDevice& device, int head_dim) {
  const std::int64_t floats = cuda::num_partials(device, head_dim);
  const std::int64_t doubles = cuda::fp4_workspace(device.multiprocessors, head_dim);
  return floats * static_cast<std::int64_t>(sizeof(float)) +
         device.multiprocessors * static_cast<std::int64_t>(sizeof(std::int32_t)) +
         doubles * static_cast<std::int64_t>(sizeof(double));
}

Result<std::unique_ptr<CudaBackend>> CudaBackend::make(const CudaBackendOptions& options) {
  auto devices = cuda_devices();
  if (!devices.ok()) return devices.status();
  if (options.device < 0 || options.device >= static_cast<int>(devices.value().size())) {
    return Status(StatusCode::kOutOfRange, fmt::format("device {} was asked for, but there are {}",
                                                       options.device, devices.value().size()));
  }
  CudaDevice device = devices.value()[static_cast<std::size_t>(options.device)];
  if (std::find(kHeadDims.begin(), kHeadDims.end(), options.head_dim) == kHeadDims.end()) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("the workspace is for head_dim {}; expected one of {}",
                              options.head_dim, fmt::join(kHeadDims, ", ")));
  }
  Status status = cuda::check(cudaSetDevice(options.device), "choosing the device");
  if (status.ok()) status = cuda::check_kernels(device);
  if (!status.ok()) return status;
  auto backend = std::make_unique<cuda::Backend>(std::move(device), options);
  status = backend->allocate();
  if (!status.ok()) return status;
  return std::unique_ptr<CudaBackend>(std::move(backend));
}

}  // namespace bitdecoding
