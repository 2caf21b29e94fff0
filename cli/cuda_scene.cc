// SPDX-License-Identifier: Apache-2.0
#include "cuda_scene.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "numeric/bf16.h"

namespace bitdecoding::cli {
namespace {

constexpr std::int64_t kFillTokens = 16384;                     // of one step of fill()
constexpr std::int64_t kBeyondCache = std::int64_t{400} << 20;  // bytes of all layers, at least

Status check(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return {};
  return {
      error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted : StatusCode::kInternal,
      fmt::format("{} failed: {}", doing, cudaGetErrorString(error))};
}

std::vector<float> normals(std::int64_t n, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<std::size_t>(n));
  for (float& x : out) x = normal(generator);
  return out;
}

// What the device holds is what the host compares with.
Status upload(std::vector<float>* values, DType dtype, DeviceMemory* to) {
  if (dtype == DType::kF32) return to->put(values->data(), values->size() * sizeof(float));
  std::vector<std::uint16_t> bits;
  for (float& x : *values) {
    bits.push_back(encode_bf16(x));
    x = decode_bf16(bits.back());
  }
  return to->put(bits.data(), bits.size() * 2);
}

Status check_options(const BenchOptions& o) {
  for (const auto& [flag, value] : {std::pair<const char*, std::int64_t>{"--q-heads", o.q_heads},
                                    {"--kv-heads", o.kv_heads},
                                    {"--batch", o.batch},
                                    {"--tokens", o.tokens}}) {
    if (value < 1) {
      return {StatusCode::kInvalidArgument,
              fmt::format("{} is {}; expected 1 or more", flag, value)};
    }
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  if (o.context < 0 || o.context > kMost || o.tokens > kMost) {
    return {StatusCode::kInvalidArgument,
            fmt::format("--context {} and --tokens {} must be between 0 and {}", o.context,
                        o.tokens, kMost)};
  }
  return {};
}

}  // namespace

DeviceMemory::~DeviceMemory() { cudaFree(data_); }

Status DeviceMemory::allocate(std::int64_t bytes) {
  return check(cudaMalloc(&data_, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 16))),
               "allocating device memory");
}

Status DeviceMemory::put(const void* data, std::size_t bytes) {
  return check(cudaMemcpy(data_, data, bytes, cudaMemcpyHostToDevice), "copying to the device");
}

Status DeviceMemory::get(void* data, std::size_t bytes) const {
  return check(cudaMemcpy(data, data_, bytes, cudaMemcpyDeviceToHost), "copying from the device");
}

Result<std::unique_ptr<CudaScene>> CudaScene::make(const BenchOptions& options) {
  if (Status s = check_options(options); !s.ok()) return s;
  std::unique_ptr<CudaScene> scene(new CudaScene(options));
  Status status = scene->open();
  if (status.ok()) status = scene->make_plan();
  if (status.ok()) status = scene->make_data();
  if (!status.ok()) return status;
  return scene;
}

Status CudaScene::open() {
  const BenchOptions& o = options_;
  Result<Recipe> recipe = o.recipe.empty() ? mode_recipe(o.mode) : load_recipe(o.recipe);
  if (!recipe.ok()) return recipe.status();
  recipe_ = recipe.take();
  recipe_.arithmetic = Arithmetic::kWide;  // a preset's int8 is the CPU's
  if (!o.arithmetic.empty()) {
    const Result<Arithmetic> arithmetic = parse_arithmetic(o.arithmetic);
    if (!arithmetic.ok()) return arithmetic.status();
    recipe_.arithmetic = arithmetic.value();
  }
  dtype_ = o.dtype == "f32" ? DType::kF32 : DType::kBf16;
  Result<PageGeometry> geometry =
      PageGeometry::make(recipe_.format, FragmentOrder::kFp16Mma, o.head_dim, o.page_size);
  if (!geometry.ok()) return geometry.status();
  layer_.geometry = geometry.value();
  layer_.num_kv_heads = o.kv_heads;
  layer_.num_q_heads = o.q_heads;
  layer_.key_rule = recipe_.key_rule;
  layer_.value_rule = recipe_.value_rule;
  layer_.hadamard = recipe_.hadamard;
  Result<std::unique_ptr<CudaBackend>> backend = CudaBackend::make({0, o.head_dim});
  if (!backend.ok()) return backend.status();
  backend_ = backend.take();
  return {};
}

Status CudaScene::make_plan() {
  const BenchOptions& o = options_;
  const PageGeometry& g = layer_.geometry;
  per_sequence_ = (o.context + o.tokens + g.page_size - 1) / g.page_size;
  num_pages_ = per_sequence_ * o.batch;
  chunk_ = std::max(kFillTokens, o.tokens * o.batch);
  CudaPlanLimits limits;
  limits.geometry = g;
  limits.rule = make_shadow_rule(g, recipe_.sink_tokens, recipe_.tail_tokens, recipe_.reproducible);
  num_slots_ = 2 * min_shadow_slots(limits.rule, o.batch) +
               2 * o.batch * (recipe_.tail_tokens / g.group_tokens + 2);
  limits.num_pages = num_pages_;
  limits.num_slots = num_slots_;
  limits.max_requests = o.batch;
  limits.max_step_tokens = chunk_;
  limits.max_pages_per_request = per_sequence_;
  limits.num_q_heads = o.q_heads;
  limits.num_kv_heads = o.kv_heads;
  Result<std::unique_ptr<CudaPlan>> plan = CudaPlan::make(limits);
  if (!plan.ok()) return plan.status();
  plan_ = plan.take();
  return {};
}

Status CudaScene::make_data() {
  const BenchOptions& o = options_;
  const PageGeometry& g = layer_.geometry;
  layer_bytes_ = num_pages_ * o.kv_heads * g.head_bytes;
  layer_rows_ = shadow_slot_bytes(o.kv_heads, g.group_tokens, g.head_dim) / 2 * num_slots_;
  layers_ = static_cast<int>(std::clamp<std::int64_t>(kBeyondCache / layer_bytes_, 1, 32));
  const std::int64_t kv_row = std::int64_t{o.kv_heads} * o.head_dim;
  const std::int64_t q_row = std::int64_t{o.q_heads} * o.head_dim;
  const std::int64_t element = dtype_bytes(dtype_);
  const std::int64_t q_tokens = o.tokens * o.batch;
  const std::pair<DeviceMemory*, std::int64_t> sizes[] = {
      {&pages_, layer_bytes_ * layers_},
      {&rows_, layer_rows_ * layers_ * 2},
      {&device_key_, chunk_ * kv_row * element},
      {&device_value_, chunk_ * kv_row * element},
      {&device_query_, q_tokens * q_row * element},
      {&output_, q_tokens * q_row * 4},
      {&device_shift_, kv_row * 4},
      {&device_table_, num_pages_ * 4},
      {&starts_, (o.batch + 1) * 4},
      {&lengths_, o.batch * 4},
      {&slots_, chunk_ * 8},
      {&gathered_, 2 * chunk_ * kv_row * 4}};
  for (const auto& [memory, bytes] : sizes) {
    if (Status s = memory->allocate(bytes); !s.ok()) return s;
  }
  table_.resize(static_cast<std::size_t>(num_pages_));
  std::iota(table_.begin(), table_.end(), 0);
  std::shuffle(table_.begin(), table_.end(), std::mt19937_64(o.seed));
  key_ = normals(chunk_ * kv_row, o.seed + 1);
  value_ = normals(chunk_ * kv_row, o.seed + 2);
  query_ = normals(q_tokens * q_row, o.seed + 3);
  if (recipe_.key_shift) {
    shift_ = normals(kv_row, o.seed + 4);
    for (std::size_t i = 0; i < key_.size(); ++i) key_[i] += shift_[i % shift_.size()];
    layer_.key_shift = device_shift_.as<float>();
  }
  Status status = upload(&key_, dtype_, &device_key_);
  if (status.ok()) status = upload(&value_, dtype_, &device_value_);
  if (status.ok()) status = upload(&query_, dtype_, &device_query_);
  if (status.ok()) status = device_shift_.put(shift_.data(), shift_.size() * 4);
  return status.ok() ? device_table_.put(table_.data(), table_.size() * 4) : status;
}

CacheView CudaScene::cache(int layer) const {
  const std::int64_t head = layer_.geometry.head_bytes;
  return {pages_.as<std::uint8_t>() + layer * layer_bytes_, num_pages_, head * options_.kv_heads,
          head};
}

ShadowPool CudaScene::shadow(int layer) const {
  return {rows_.as<std::uint16_t>() + layer * layer_rows_, num_slots_};
}

WriteParams CudaScene::write_params(int layer) const {
  WriteParams p;
  p.layer = &layer_;
  p.cache = cache(layer);
  p.shadow = shadow(layer);
  const std::int64_t row = std::int64_t{options_.kv_heads} * options_.head_dim;
  p.key = {device_key_.as<void>(), dtype_, row, options_.head_dim};
  p.value = {device_value_.as<void>(), dtype_, row, options_.head_dim};
  return p;
}

AttendParams CudaScene::attend_params(int layer) const {
  AttendParams p;
  p.layer = &layer_;
  p.cache = cache(layer);
  p.shadow = shadow(layer);
  const std::int64_t row = std::int64_t{options_.q_heads} * options_.head_dim;
  p.query = {device_query_.as<void>(), dtype_, row, options_.head_dim};
  p.output = output_.as<void>();
  p.output_dtype = DType::kF32;
  p.stride_output_token = row;
  p.stride_output_head = options_.head_dim;
  p.sm_scale = 1.0F / std::sqrt(static_cast<float>(options_.head_dim));
  p.arithmetic = recipe_.arithmetic;
  p.query_terms = recipe_.query_terms;
  p.probability_c = recipe_.probability_c;
  p.probability_tau = recipe_.probability_tau;
  return p;
}

Result<StepInput> CudaScene::upload_step(std::int64_t first, std::int64_t count) {
  std::vector<std::int32_t> starts = {0};
  std::vector<std::int64_t> slots;
  const int page_size = options_.page_size;
  for (int r = 0; r < options_.batch; ++r) {
    for (std::int64_t p = first; p < first + count; ++p) {
      const auto entry = static_cast<std::size_t>(r * per_sequence_ + p / page_size);
      slots.push_back(std::int64_t{table_[entry]} * page_size + p % page_size);
    }
    starts.push_back(static_cast<std::int32_t>(slots.size()));
  }
  const std::vector<std::int32_t> lengths(static_cast<std::size_t>(options_.batch),
                                          static_cast<std::int32_t>(first + count));
  Status status = starts_.put(starts.data(), starts.size() * 4);
  if (status.ok()) status = lengths_.put(lengths.data(), lengths.size() * 4);
  if (status.ok()) status = slots_.put(slots.data(), slots.size() * 8);
  if (!status.ok()) return status;
  StepInput in;
  in.num_requests = options_.batch;
  in.block_table = device_table_.as<std::int32_t>();
  in.block_table_stride = per_sequence_;
  in.query_start = starts_.as<std::int32_t>();
  in.seq_lens = lengths_.as<std::int32_t>();
  in.slot_mapping = slots_.as<std::int64_t>();
  in.num_tokens = static_cast<std::int64_t>(slots.size());
  in.num_pages = num_pages_;
  return in;
}

Status CudaScene::begin_step(std::int64_t first, std::int64_t count) {
  first_ = first;
  count_ = count;
  const Result<StepInput> in = upload_step(first, count);
  return in.ok() ? plan_->build(in.value(), static_cast<int>(count), nullptr) : in.status();
}

Status CudaScene::fill(std::int64_t tokens) {
  const std::int64_t step = std::max<std::int64_t>(kFillTokens / options_.batch, 1);
  for (std::int64_t first = 0; first < tokens; first += step) {
    Status status = begin_step(first, std::min(step, tokens - first));
    for (int layer = 0; layer < layers_ && status.ok(); ++layer) {
      status = backend_->write(write_params(layer), *plan_, nullptr);
    }
    if (status.ok()) status = check(cudaDeviceSynchronize(), "filling the cache");
    if (!status.ok()) return status;
  }
  return {};
}

Result<Timing> CudaScene::time(int repeat, int per, const std::function<Status(void*)>& enqueue) {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  Status status = check(cudaStreamCreate(&stream), "making a stream");
  const auto run = [&](cudaError_t error) {
    if (status.ok()) status = check(error, "timing on the device");
  };
  if (status.ok()) status = enqueue(stream);
  run(cudaStreamSynchronize(stream));
  run(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  if (status.ok()) status = enqueue(stream);
  run(cudaStreamEndCapture(stream, &graph));
  run(cudaGraphInstantiate(&exec, graph, 0));
  run(cudaEventCreate(&begin));
  run(cudaEventCreate(&end));
  std::vector<double> us;
  for (int i = 0; status.ok() && i < std::max(repeat, 1) + 3; ++i) {
    run(cudaEventRecord(begin, stream));
    run(cudaGraphLaunch(exec, stream));
    run(cudaEventRecord(end, stream));
    run(cudaEventSynchronize(end));
    float ms = 0;
    run(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 3) us.push_back(1e3 * ms / per);
  }
  if (exec != nullptr) cudaGraphExecDestroy(exec);
  if (graph != nullptr) cudaGraphDestroy(graph);
  for (const cudaEvent_t event : {begin, end}) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (stream != nullptr) cudaStreamDestroy(stream);
  if (!status.ok()) return status;
  std::sort(us.begin(), us.end());
  Timing timing;
  timing.us_median = us[us.size() / 2];
  timing.us_min = us.front();
  timing.us_max = us.back();
  timing.calls = static_cast<int>(us.size());
  return timing;
}

Result<Timing> CudaScene::time_attend(int repeat) {
  return time(repeat, layers_, [&](void* stream) {
    Status status;
    for (int layer = 0; layer < layers_ && status.ok(); ++layer) {
      status = backend_->attend(attend_params(layer), *plan_, stream);
    }
    return status;
  });
}

Result<Timing> CudaScene::time_write(int repeat) {
  return time(repeat, layers_, [&](void* stream) {
    Status status;
    for (int layer = 0; layer < layers_ && status.ok(); ++layer) {
      status = backend_->write(write_params(layer), *plan_, stream);
    }
    return status;
  });
}

Result<Timing> CudaScene::time_plan(int repeat) {
  const Result<StepInput> in = upload_step(first_, count_);
  if (!in.ok()) return in.status();
  return time(repeat, 1, [&](void* stream) {
    return plan_->build(in.value(), static_cast<int>(count_), stream);
  });
}

std::int64_t CudaScene::bytes_read() const {
  const std::int64_t tokens = first_ + count_;
  return (tokens + kTileTokens - 1) / kTileTokens * layer_.geometry.tile_bytes * options_.kv_heads *
         options_.batch;
}

}  // namespace bitdecoding::cli
