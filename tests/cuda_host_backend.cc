// SPDX-License-Identifier: Apache-2.0
#include "cuda_host_backend.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <utility>

namespace bitdecoding::test {
namespace {

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    ADD_FAILURE() << what << ": " << cudaGetErrorString(error);
  }
}

std::size_t tensor_bytes(const TensorView& t, std::int64_t tokens) {
  return static_cast<std::size_t>(tokens * t.stride_token * dtype_bytes(t.dtype));
}

}  // namespace

std::string why_no_gpu() {
  const auto devices = cuda_devices();
  if (!devices.ok()) return devices.status().message();
  for (const CudaDevice& d : devices.value()) {
    if (!d.kernels.empty()) return "";
  }
  return "no device with kernels of this library";
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}
DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

void DeviceBuffer::reserve(std::size_t bytes) {
  if (bytes <= size_) return;
  require(cudaFree(data_), "free");
  data_ = nullptr;
  require(cudaMalloc(&data_, bytes), "allocate");
  size_ = bytes;
}

void* DeviceBuffer::put(const void* data, std::size_t bytes) {
  reserve(bytes);
  if (bytes > 0)
    require(cudaMemcpy(data_, data, bytes, cudaMemcpyHostToDevice), "copy to the device");
  return data_;
}

void DeviceBuffer::get(void* data, std::size_t bytes) const {
  require(cudaMemcpy(data, data_, bytes, cudaMemcpyDeviceToHost), "copy from the device");
}

CudaHostBackend::CudaHostBackend(World* world, Planner planner, std::int64_t max_pages_per_request)
    : world_(world), planner_(planner) {
  const WorldOptions& o = world->options;
  CudaPlanLimits limits;
  limits.geometry = world->layer.geometry;
  limits.rule = make_shadow_rule(limits.geometry, o.sink_tokens, o.tail_tokens, o.reproducible);
  limits.num_pages = o.num_pages;
  limits.num_slots = o.num_slots;
  limits.max_requests = o.max_requests;
  limits.max_step_tokens = 8192;
  limits.max_pages_per_request = max_pages_per_request;
  limits.num_q_heads = o.num_q_heads;
  limits.num_kv_heads = o.num_kv_heads;
  if (world->params.window_left >= 0) limits.windows.push_back(world->params.window_left);
  auto plan = CudaPlan::make(limits);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  plan_ = plan.take();
  auto backend = CudaBackend::make({0, o.head_dim});
  EXPECT_TRUE(backend.ok()) << backend.status().message();
  device_ = backend.take();
  page_bytes_ = static_cast<std::size_t>(world->cache.stride_page * o.num_pages);
  row_bytes_ = static_cast<std::size_t>(
      shadow_slot_bytes(o.num_kv_heads, limits.geometry.group_tokens, o.head_dim) * o.num_slots);
  pages_.put(world->cache.pages, page_bytes_);
  rows_.put(world->shadow.rows, row_bytes_);
  for (DeviceBuffer* b : {&query_, &key_, &value_, &output_}) b->reserve(std::size_t{16} << 20);
  for (DeviceBuffer* b : {&lse_, &shift_, &table_, &slots_}) b->reserve(std::size_t{1} << 18);
  for (DeviceBuffer* b : {&starts_, &lengths_, &sink_, &key_outer_, &value_outer_})
    b->reserve(4096);
}

LayerConfig CudaHostBackend::device_layer(const LayerConfig& layer) {
  LayerConfig l = layer;
  const auto heads = static_cast<std::size_t>(layer.num_kv_heads);
  const auto elements = heads * static_cast<std::size_t>(layer.geometry.head_dim);
  if (l.key_shift != nullptr) {
    l.key_shift = static_cast<const float*>(shift_.put(l.key_shift, elements * sizeof(float)));
  }
  if (l.key_outer != nullptr) {
    l.key_outer = static_cast<const std::int8_t*>(key_outer_.put(l.key_outer, heads));
  }
  if (l.value_outer != nullptr) {
    l.value_outer = static_cast<const std::int8_t*>(value_outer_.put(l.value_outer, heads));
  }
  return l;
}

Status CudaHostBackend::plan_step(void* stream) {
  if (planner_ == Planner::kHost) return plan_->upload(world_->plan, nullptr);
  const StepInput& in = world_->input;
  StepInput on = in;
  const auto n = static_cast<std::size_t>(in.num_requests);
  on.block_table = static_cast<const std::int32_t*>(
      table_.put(in.block_table, n * static_cast<std::size_t>(in.block_table_stride) * 4));
  on.query_start = static_cast<const std::int32_t*>(starts_.put(in.query_start, (n + 1) * 4));
  on.seq_lens = static_cast<const std::int32_t*>(lengths_.put(in.seq_lens, n * 4));
  on.slot_mapping = static_cast<const std::int64_t*>(
      slots_.put(in.slot_mapping, static_cast<std::size_t>(in.num_tokens) * 8));
  int longest = 0;
  for (std::size_t r = 0; r < n; ++r) {
    longest = std::max(longest, in.query_start[r + 1] - in.query_start[r]);
  }
  if (planner_ == Planner::kGraph) {
    input_ = on;
    longest_ = longest;
    return {};
  }
  return plan_->build(on, longest, stream);
}

// The whole step as one graph; each shape of step is captured when it is first met.
Status CudaHostBackend::replay() {
  void*& graph = graphs_[{input_.num_requests, input_.num_tokens, longest_}];
  cudaStream_t stream = nullptr;
  require(cudaStreamCreate(&stream), "create a stream");
  Status status;
  if (graph == nullptr) {
    cudaGraph_t captured = nullptr;
    require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin the capture");
    status = plan_->build(input_, longest_, stream);
    if (status.ok()) status = device_->write(write_, *plan_, stream);
    if (status.ok()) status = device_->attend(attend_, *plan_, stream);
    require(cudaStreamEndCapture(stream, &captured), "end the capture");
    cudaGraphExec_t exec = nullptr;
    require(cudaGraphInstantiate(&exec, captured, 0), "instantiate the graph");
    graph = exec;
    require(cudaGraphDestroy(captured), "destroy the graph");
  }
  require(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream), "launch the graph");
  require(cudaStreamSynchronize(stream), "run the graph");
  require(cudaStreamDestroy(stream), "destroy a stream");
  return status;
}

CudaHostBackend::~CudaHostBackend() {
  for (auto& [shape, graph] : graphs_) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

Status CudaHostBackend::write(const WriteParams& params) {
  Status status = plan_step(nullptr);
  if (!status.ok()) return status;
  // The pools on the device follow the host's only where tests change those by hand.
  pages_.put(params.cache.pages, page_bytes_);
  if (planner_ == Planner::kHost) rows_.put(params.shadow.rows, row_bytes_);
  layer_ = device_layer(*params.layer);
  WriteParams p = params;
  const std::int64_t tokens = params.plan->num_tokens;
  p.layer = &layer_;
  p.cache.pages = static_cast<std::uint8_t*>(pages_.data());
  p.shadow.rows = static_cast<std::uint16_t*>(rows_.data());
  p.key.data = key_.put(params.key.data, tensor_bytes(params.key, tokens));
  p.value.data = value_.put(params.value.data, tensor_bytes(params.value, tokens));
  p.plan = nullptr;
  p.counters = static_cast<WriteCounters*>(counters_.put(params.counters, sizeof(WriteCounters)));
  if (planner_ == Planner::kGraph) {
    write_ = p;
    counters_of_write_ = params.counters;
    return {};  // attend() runs the whole step
  }
  status = device_->write(p, *plan_, nullptr);
  if (!status.ok()) return status;
  pages_.get(params.cache.pages, page_bytes_);
  if (planner_ == Planner::kHost) rows_.get(params.shadow.rows, row_bytes_);
  counters_.get(params.counters, sizeof(WriteCounters));
  return {};
}

Status CudaHostBackend::attend(const AttendParams& params) {
  const LayerConfig layer = device_layer(*params.layer);
  AttendParams p = params;
  const std::int64_t tokens = params.plan->num_tokens;
  const auto out_bytes = static_cast<std::size_t>(tokens * params.stride_output_token *
                                                  dtype_bytes(params.output_dtype));
  const auto lse_bytes = static_cast<std::size_t>(tokens * params.layer->num_q_heads * 4);
  if (planner_ != Planner::kGraph) pages_.put(params.cache.pages, page_bytes_);
  p.layer = &layer;
  p.cache.pages = static_cast<std::uint8_t*>(pages_.data());
  p.shadow.rows = static_cast<std::uint16_t*>(rows_.data());
  p.query.data = query_.put(params.query.data, tensor_bytes(params.query, tokens));
  p.output = output_.put(params.output, out_bytes);
  p.lse = static_cast<float*>(lse_.put(params.lse, lse_bytes));
  p.plan = nullptr;
  if (p.attn_sink != nullptr) {
    p.attn_sink = static_cast<const float*>(
        sink_.put(p.attn_sink, static_cast<std::size_t>(layer.num_q_heads) * 4));
  }
  attend_ = p;
  attend_.layer = &layer_;
  Status status = planner_ == Planner::kGraph ? replay() : device_->attend(p, *plan_, nullptr);
  if (!status.ok()) return status;
  if (planner_ == Planner::kGraph) {
    pages_.get(params.cache.pages, page_bytes_);
    counters_.get(counters_of_write_, sizeof(WriteCounters));
  }
  output_.get(params.output, out_bytes);
  lse_.get(params.lse, lse_bytes);
  return {};
}

Status CudaHostBackend::gather(const AttendParams& params, int request, int kv_head,
                               std::int64_t begin, std::int64_t end, float* key, float* value) {
  const LayerConfig layer = device_layer(*params.layer);
  AttendParams p = params;
  p.layer = &layer;
  p.cache.pages = static_cast<std::uint8_t*>(pages_.data());
  p.shadow.rows = static_cast<std::uint16_t*>(rows_.data());
  const auto head_dim = static_cast<std::size_t>(layer.geometry.head_dim);
  const auto heads = static_cast<std::size_t>(layer.num_kv_heads);
  const auto tokens = static_cast<std::size_t>(end - begin);
  std::vector<float> k(tokens * heads * head_dim, -1.0F);
  std::vector<float> v = k;
  CudaGather what;
  what.request = request;
  what.begin = begin;
  what.end = end;
  what.with_shadow = false;
  what.dtype = DType::kF32;
  what.stride_head = static_cast<std::int64_t>(head_dim);
  what.stride_token = static_cast<std::int64_t>(heads * head_dim);
  what.key = key_.put(k.data(), k.size() * 4);
  what.value = value_.put(v.data(), v.size() * 4);
  Status status = device_->gather(p, what, *plan_, nullptr);
  if (!status.ok()) return status;
  key_.get(k.data(), k.size() * 4);
  value_.get(v.data(), v.size() * 4);
  for (std::size_t t = 0; t < tokens; ++t) {
    for (std::size_t d = 0; d < head_dim; ++d) {
      const std::size_t at = (t * heads + static_cast<std::size_t>(kv_head)) * head_dim + d;
      key[t * head_dim + d] = k[at];
      value[t * head_dim + d] = v[at];
    }
  }
  return {};
}

CudaCounters CudaHostBackend::counters() { return plan_->counters(nullptr).take(); }

}  // namespace bitdecoding::test
