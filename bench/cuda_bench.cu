// SPDX-License-Identifier: Apache-2.0
// Decode, write and plan on a GPU: CUDA events around replays of a graph, each replay over several
// layers' caches so that nothing is found in L2. Prints one JSON object a line.
//
//   cuda_bench [decode] [write] [plan] [--shape BATCHxCONTEXTxQHEADSxKVHEADSxHEAD_DIMxQLEN]...
//   [--repeat N]
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "bitdecoding/cuda.h"
#include "cuda_read.cuh"

namespace bitdecoding::bench {
namespace {

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "cuda_bench: %s\n", cudaGetErrorString(error));
  std::exit(1);
}
void require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "cuda_bench: %s\n", status.message().c_str());
  std::exit(1);
}

template <class T>
struct Array {
  T* data = nullptr;
  explicit Array(std::int64_t n) {
    require(cudaMalloc(reinterpret_cast<void**>(&data), static_cast<std::size_t>(n) * sizeof(T)));
  }
  Array(std::int64_t n, const std::vector<T>& from) : Array(n) {
    require(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
};

// N(0, 1) by Box and Muller over a hash of the index.
__global__ void fill_normal(__nv_bfloat16* out, std::int64_t n, std::uint64_t seed) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    std::uint64_t x = (static_cast<std::uint64_t>(i) + seed * 0x9E3779B97F4A7C15ULL);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    x ^= x >> 31;
    const float u = (static_cast<float>(x >> 40) + 0.5F) * (1.0F / 16777216.0F);
    const float v = static_cast<float>((x >> 8) & 0xFFFFFF) * (1.0F / 16777216.0F);
    out[i] = __float2bfloat16(sqrtf(-2.0F * logf(u)) * cosf(6.2831853F * v));
  }
}

struct Timing {
  double median = 0, least = 0, most = 0;  // us
};

// `enqueue` is captured once and replayed.
template <class Enqueue>
Timing time_graph(int repeat, double per, Enqueue enqueue) {
  cudaStream_t stream;
  require(cudaStreamCreate(&stream));
  enqueue(stream);
  require(cudaStreamSynchronize(stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue(stream);
  require(cudaStreamEndCapture(stream, &graph));
  require(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin;
  cudaEvent_t end;
  require(cudaEventCreate(&begin));
  require(cudaEventCreate(&end));
  for (int i = 0; i < 3; ++i) require(cudaGraphLaunch(exec, stream));
  std::vector<double> us;
  for (int i = 0; i < repeat; ++i) {
    require(cudaEventRecord(begin, stream));
    require(cudaGraphLaunch(exec, stream));
    require(cudaEventRecord(end, stream));
    require(cudaEventSynchronize(end));
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin, end));
    us.push_back(1e3 * ms / per);
  }
  require(cudaGraphExecDestroy(exec));
  require(cudaGraphDestroy(graph));
  require(cudaStreamDestroy(stream));
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us.front(), us.back()};
}

double read_ceiling() {
  constexpr std::int64_t kBytes = std::int64_t{2} << 30;
  const Array<uint4> data(kBytes / 16);
  require(cudaMemset(data.data, 1, kBytes));
  const Array<std::uint32_t> sink(1);
  double best = 0;
  for (const int blocks : {132 * 4, 132 * 8, 132 * 16}) {
    const Timing t = time_graph(20, 1, [&](cudaStream_t s) {
      read_all<<<blocks, 512, 0, s>>>(data.data, kBytes / 16, sink.data);
    });
    best = std::max(best, kBytes / t.least * 1e-6);
  }
  return best;  // TB/s
}

struct Shape {
  int batch, context, q_heads, kv_heads, head_dim, query_len;
  std::vector<int> lengths;  // of each request
  std::string name;
};

class Run {
 public:
  Run(const Shape& shape, Format format);
  void decode(int repeat, double ceiling);
  void write_step(int repeat);
  void write_chunk(int repeat);
  void plan_step(int repeat);

 private:
  static constexpr int kPageSize = 128;
  void fill_caches();
  StepInput decode_step();
  CacheView cache(int layer) const {
    return {pages_->data + layer * layer_bytes_, num_pages_, page_bytes_,
            layer_.geometry.head_bytes};
  }
  ShadowPool shadow(int layer) const { return {rows_->data + layer * layer_rows_, num_slots_}; }
  WriteParams write_params(const LayerConfig& config, int layer) const {
    const std::int64_t row = std::int64_t{shape_.kv_heads} * shape_.head_dim;
    WriteParams p;
    p.layer = &config;
    p.cache = cache(layer);
    p.shadow = shadow(layer);
    p.key = {chunk_->data, DType::kBf16, row, shape_.head_dim};
    p.value = {chunk_->data + kChunk * row, DType::kBf16, row, shape_.head_dim};
    return p;
  }

  Shape shape_;
  LayerConfig layer_;
  int layers_ = 1;
  std::int64_t tokens_ = 0, num_pages_ = 0, stride_ = 0;
  std::unique_ptr<Array<std::uint8_t>> pages_;
  std::unique_ptr<Array<std::uint16_t>> rows_;
  std::unique_ptr<Array<__nv_bfloat16>> chunk_, query_, output_;
  std::unique_ptr<Array<std::int32_t>> table_, starts_, lengths_;
  std::unique_ptr<Array<std::int64_t>> slots_;
  std::vector<std::vector<std::int32_t>> host_table_;
  std::int64_t page_bytes_ = 0, layer_bytes_ = 0, layer_rows_ = 0;
  std::int32_t num_slots_ = 0;
  std::unique_ptr<CudaPlan> plan_;
  std::unique_ptr<CudaBackend> backend_;
  static constexpr std::int64_t kChunk = 16384;
};

Run::Run(const Shape& shape, Format format) : shape_(shape) {
  layer_.geometry =
      PageGeometry::make(format, FragmentOrder::kFp16Mma, shape.head_dim, kPageSize).take();
  layer_.num_kv_heads = shape.kv_heads;
  layer_.num_q_heads = shape.q_heads;
  if (format == Format::kMxfp4) layer_.key_rule = layer_.value_rule = ScaleRule::kMxfp4Search;
  std::int64_t longest = 0;
  std::int64_t pages = 0;
  for (const int n : shape.lengths) {
    tokens_ += n;
    longest = std::max<std::int64_t>(longest, n);
    pages += (n + kPageSize - 1) / kPageSize;
  }
  num_pages_ = pages;
  stride_ = (longest + kPageSize - 1) / kPageSize;
  page_bytes_ = layer_.geometry.head_bytes * shape.kv_heads;
  layer_bytes_ = page_bytes_ * num_pages_;
  // Together well beyond L2.
  layers_ =
      static_cast<int>(std::clamp<std::int64_t>((std::int64_t{400} << 20) / layer_bytes_, 1, 64));
  pages_ = std::make_unique<Array<std::uint8_t>>(layer_bytes_ * layers_);
  const ShadowRule rule = make_shadow_rule(layer_.geometry, 16, 64, false);
  num_slots_ = 8 * shape.batch + 16;
  layer_rows_ = shadow_slot_bytes(shape.kv_heads, layer_.geometry.group_tokens, shape.head_dim) /
                2 * num_slots_;
  rows_ = std::make_unique<Array<std::uint16_t>>(layer_rows_ * layers_);

  std::vector<std::int32_t> order(static_cast<std::size_t>(num_pages_));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(1));
  std::vector<std::int32_t> table(static_cast<std::size_t>(stride_) * shape.lengths.size(), -1);
  std::size_t next = 0;
  for (std::size_t r = 0; r < shape.lengths.size(); ++r) {
    for (int p = 0; p < (shape.lengths[r] + kPageSize - 1) / kPageSize; ++p) {
      table[r * static_cast<std::size_t>(stride_) + static_cast<std::size_t>(p)] = order[next++];
    }
  }
  for (std::size_t r = 0; r < shape.lengths.size(); ++r) {
    const auto begin =
        table.begin() + static_cast<std::ptrdiff_t>(r * static_cast<std::size_t>(stride_));
    host_table_.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(stride_));
  }
  table_ = std::make_unique<Array<std::int32_t>>(static_cast<std::int64_t>(table.size()), table);

  CudaPlanLimits limits;
  limits.geometry = layer_.geometry;
  limits.rule = rule;
  limits.num_pages = num_pages_;
  limits.num_slots = num_slots_;
  limits.max_requests = shape.batch;
  limits.max_step_tokens = kChunk;
  limits.max_pages_per_request = stride_;
  limits.num_q_heads = shape.q_heads;
  limits.num_kv_heads = shape.kv_heads;
  auto plan = CudaPlan::make(limits);
  require(plan.status());
  plan_ = plan.take();
  auto backend = CudaBackend::make({0, shape.head_dim});
  require(backend.status());
  backend_ = backend.take();
  const std::int64_t chunk = kChunk * shape.kv_heads * shape.head_dim * 2;
  chunk_ = std::make_unique<Array<__nv_bfloat16>>(chunk);
  fill_normal<<<1024, 256>>>(chunk_->data, chunk, 7);
  const std::int64_t q =
      std::int64_t{shape.batch} * shape.query_len * shape.q_heads * shape.head_dim;
  query_ = std::make_unique<Array<__nv_bfloat16>>(q);
  output_ = std::make_unique<Array<__nv_bfloat16>>(q);
  fill_normal<<<1024, 256>>>(query_->data, q, 9);
  starts_ = std::make_unique<Array<std::int32_t>>(shape.batch + 1);
  lengths_ = std::make_unique<Array<std::int32_t>>(shape.batch);
  slots_ = std::make_unique<Array<std::int64_t>>(kChunk);
  require(cudaDeviceSynchronize());
  fill_caches();
}

// Real codes: random keys and values through the writer, a chunk of one request at a time.
void Run::fill_caches() {
  for (std::size_t r = 0; r < shape_.lengths.size(); ++r) {
    for (std::int64_t begin = 0; begin < shape_.lengths[r]; begin += kChunk) {
      const std::int64_t n = std::min(kChunk, shape_.lengths[r] - begin);
      std::vector<std::int64_t> slots;
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t p = begin + i;
        slots.push_back(std::int64_t{host_table_[r][static_cast<std::size_t>(p / kPageSize)]} *
                            kPageSize +
                        p % kPageSize);
      }
      const std::int32_t starts[2] = {0, static_cast<std::int32_t>(n)};
      const auto length = static_cast<std::int32_t>(begin + n);
      require(cudaMemcpy(slots_->data, slots.data(), slots.size() * 8, cudaMemcpyHostToDevice));
      require(cudaMemcpy(starts_->data, starts, sizeof(starts), cudaMemcpyHostToDevice));
      require(cudaMemcpy(lengths_->data, &length, 4, cudaMemcpyHostToDevice));
      StepInput in;
      in.num_requests = 1;
      in.block_table = table_->data + static_cast<std::int64_t>(r) * stride_;
      in.block_table_stride = stride_;
      in.query_start = starts_->data;
      in.seq_lens = lengths_->data;
      in.slot_mapping = slots_->data;
      in.num_tokens = n;
      in.num_pages = num_pages_;
      require(plan_->build(in, static_cast<int>(n), nullptr));
      for (int layer = 0; layer < layers_; ++layer) {
        require(backend_->write(write_params(layer_, layer), *plan_, nullptr));
      }
      require(cudaDeviceSynchronize());
    }
  }
}

StepInput Run::decode_step() {
  std::vector<std::int32_t> starts = {0};
  std::vector<std::int64_t> slots;
  for (std::size_t r = 0; r < shape_.lengths.size(); ++r) {
    for (int i = 0; i < shape_.query_len; ++i) {
      const int p = shape_.lengths[r] - shape_.query_len + i;
      slots.push_back(std::int64_t{host_table_[r][static_cast<std::size_t>(p / kPageSize)]} *
                          kPageSize +
                      p % kPageSize);
    }
    starts.push_back(static_cast<std::int32_t>(slots.size()));
  }
  require(cudaMemcpy(slots_->data, slots.data(), slots.size() * 8, cudaMemcpyHostToDevice));
  require(cudaMemcpy(starts_->data, starts.data(), starts.size() * 4, cudaMemcpyHostToDevice));
  require(cudaMemcpy(lengths_->data, shape_.lengths.data(), shape_.lengths.size() * 4,
                     cudaMemcpyHostToDevice));
  StepInput in;
  in.num_requests = shape_.batch;
  in.block_table = table_->data;
  in.block_table_stride = stride_;
  in.query_start = starts_->data;
  in.seq_lens = lengths_->data;
  in.slot_mapping = slots_->data;
  in.num_tokens = static_cast<std::int64_t>(slots.size());
  in.num_pages = num_pages_;
  return in;
}

void Run::decode(int repeat, double ceiling) {
  const StepInput in = decode_step();
  require(plan_->build(in, shape_.query_len, nullptr));
  require(cudaDeviceSynchronize());
  const Timing t = time_graph(repeat, layers_, [&](cudaStream_t stream) {
    for (int layer = 0; layer < layers_; ++layer) {
      AttendParams p;
      p.layer = &layer_;
      p.cache = cache(layer);
      p.shadow = shadow(layer);
      p.query = {query_->data, DType::kBf16, std::int64_t{shape_.q_heads} * shape_.head_dim,
                 shape_.head_dim};
      p.output = output_->data;
      p.output_dtype = DType::kBf16;
      p.stride_output_token = std::int64_t{shape_.q_heads} * shape_.head_dim;
      p.stride_output_head = shape_.head_dim;
      p.sm_scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim));
      p.arithmetic = Arithmetic::kWide;
      require(backend_->attend(p, *plan_, stream));
    }
  });
  const double bytes =
      static_cast<double>(tokens_) * shape_.kv_heads * layer_.geometry.bytes_per_token;
  std::printf(
      "{\"bench\":\"decode\",\"backend\":\"cuda\",\"format\":\"%s\",\"name\":\"%s\",\"batch\":%d,"
      "\"context\":%d,"
      "\"q_heads\":%d,\"kv_heads\":%d,\"head_dim\":%d,\"query_len\":%d,\"layers\":%d,"
      "\"us_median\":%.2f,\"us_min\":%.2f,\"us_max\":%.2f,\"bytes\":%.0f,\"read_tbps\":%.3f,"
      "\"ceiling_tbps\":%.3f,\"share\":%.3f}\n",
      std::string(format_name(layer_.geometry.format)).c_str(), shape_.name.c_str(), shape_.batch,
      shape_.context, shape_.q_heads, shape_.kv_heads, shape_.head_dim, shape_.query_len, layers_,
      t.median, t.least, t.most, bytes, bytes / t.median * 1e-6, ceiling,
      bytes / t.median * 1e-6 / ceiling);
  std::fflush(stdout);
}

void Run::plan_step(int repeat) {
  const StepInput in = decode_step();
  const Timing t = time_graph(
      repeat, 1, [&](cudaStream_t stream) { require(plan_->build(in, shape_.query_len, stream)); });
  std::printf(
      "{\"bench\":\"plan\",\"name\":\"%s\",\"batch\":%d,\"us_median\":%.2f,\"us_min\":%.2f}\n",
      shape_.name.c_str(), shape_.batch, t.median, t.least);
  std::fflush(stdout);
}

void Run::write_step(int repeat) {
  const StepInput in = decode_step();
  require(plan_->build(in, shape_.query_len, nullptr));
  const Timing t = time_graph(repeat, layers_, [&](cudaStream_t stream) {
    for (int layer = 0; layer < layers_; ++layer) {
      require(backend_->write(write_params(layer_, layer), *plan_, stream));
    }
  });
  std::printf(
      "{\"bench\":\"write_step\",\"name\":\"%s\",\"batch\":%d,\"us_median\":%.2f,\"us_min\":%.2f}"
      "\n",
      shape_.name.c_str(), shape_.batch, t.median, t.least);
  std::fflush(stdout);
}

void Run::write_chunk(int repeat) {
  std::vector<std::int64_t> slots;
  const std::int64_t n = std::min<std::int64_t>(kChunk, shape_.lengths[0]);
  for (std::int64_t p = 0; p < n; ++p) {
    slots.push_back(std::int64_t{host_table_[0][static_cast<std::size_t>(p / kPageSize)]} *
                        kPageSize +
                    p % kPageSize);
  }
  const std::int32_t starts[2] = {0, static_cast<std::int32_t>(n)};
  const auto length = static_cast<std::int32_t>(n);
  StepInput in = decode_step();
  require(cudaMemcpy(slots_->data, slots.data(), slots.size() * 8, cudaMemcpyHostToDevice));
  require(cudaMemcpy(starts_->data, starts, sizeof(starts), cudaMemcpyHostToDevice));
  require(cudaMemcpy(lengths_->data, &length, 4, cudaMemcpyHostToDevice));
  in.num_requests = 1;
  in.num_tokens = n;
  require(plan_->build(in, static_cast<int>(n), nullptr));
  for (const ScaleRule rule : {ScaleRule::kAmax6, ScaleRule::kFourSix, ScaleRule::kCodeSearch}) {
    LayerConfig layer = layer_;
    if (layer.geometry.format == Format::kNvfp4) layer.key_rule = rule;
    const Timing t = time_graph(repeat, layers_, [&](cudaStream_t stream) {
      for (int i = 0; i < layers_; ++i) {
        require(backend_->write(write_params(layer, i), *plan_, stream));
      }
    });
    const double bytes = static_cast<double>(n) * shape_.kv_heads *
                         (4.0 * shape_.head_dim + layer_.geometry.bytes_per_token);
    std::printf(
        "{\"bench\":\"write_chunk\",\"name\":\"%s\",\"tokens\":%lld,\"rule\":\"%s\",\"us_median\":%"
        ".2f,"
        "\"us_min\":%.2f,\"bytes\":%.0f,\"tbps\":%.3f}\n",
        shape_.name.c_str(), static_cast<long long>(n), std::string(scale_rule_name(rule)).c_str(),
        t.median, t.least, bytes, bytes / t.median * 1e-6);
    std::fflush(stdout);
  }
}

Shape parse_shape(const char* text) {
  Shape s;
  if (std::sscanf(text, "%dx%dx%dx%dx%dx%d", &s.batch, &s.context, &s.q_heads, &s.kv_heads,
                  &s.head_dim, &s.query_len) != 6) {
    std::fprintf(stderr,
                 "cuda_bench: a shape is BATCHxCONTEXTxQHEADSxKVHEADSxHEAD_DIMxQLEN, not %s\n",
                 text);
    std::exit(2);
  }
  s.name = text;
  if (s.context > 0) {
    s.lengths.assign(static_cast<std::size_t>(s.batch), s.context);
  } else {
    // Mixed: 1K to 128K, evenly in the logarithm, in a random order.
    for (int i = 0; i < s.batch; ++i) {
      s.lengths.push_back(static_cast<int>(1024 * std::pow(128.0, i / (s.batch - 1.0))));
    }
    std::shuffle(s.lengths.begin(), s.lengths.end(), std::mt19937(3));
  }
  return s;
}

int main_of(int argc, char** argv) {
  std::vector<Shape> shapes;
  bool decode = false;
  bool write = false;
  bool plan = false;
  Format format = Format::kNvfp4;
  int repeat = 50;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "decode") == 0) decode = true;
    if (std::strcmp(argv[i], "write") == 0) write = true;
    if (std::strcmp(argv[i], "plan") == 0) plan = true;
    if (std::strcmp(argv[i], "--mxfp4") == 0) format = Format::kMxfp4;
    if (std::strcmp(argv[i], "--shape") == 0 && i + 1 < argc)
      shapes.push_back(parse_shape(argv[++i]));
    if (std::strcmp(argv[i], "--repeat") == 0 && i + 1 < argc) repeat = std::atoi(argv[++i]);
  }
  if (shapes.empty()) {
    for (const char* s :
         {"8x131072x32x8x128x1", "32x32768x32x8x128x1", "1x131072x32x8x128x1", "8x32768x32x8x128x1",
          "1x32768x32x8x128x1", "8x8192x32x8x128x1", "1x8192x32x8x128x1"}) {
      shapes.push_back(parse_shape(s));
    }
  }
  const double ceiling = read_ceiling();
  for (const Shape& shape : shapes) {
    Run run(shape, format);
    if (decode) run.decode(repeat, ceiling);
    if (plan) run.plan_step(repeat);
    if (write) run.write_step(repeat);
    if (write) run.write_chunk(repeat);
  }
  return 0;
}

}  // namespace
}  // namespace bitdecoding::bench

int main(int argc, char** argv) { return bitdecoding::bench::main_of(argc, argv); }
