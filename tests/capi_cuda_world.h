// SPDX-License-Identifier: Apache-2.0
// The same steps through the C ABI on a GPU and through the reference backend on the host.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "capi_engine.h"

namespace bitdecoding::capi_cuda {

constexpr int kQHeads = 8;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 128;
constexpr int kPageTokens = 64;
constexpr int kNumPages = 12;
constexpr int kNumSlots = 24;
constexpr int kMaxTokens = 256;
constexpr std::int64_t kHeadBytes = std::int64_t{kHeadDim} * 72 / 64 * kPageTokens;
constexpr std::int64_t kSlotElements = std::int64_t{kKvHeads} * 2 * 16 * kHeadDim;
inline constexpr const char* kWideRecipe =
    R"({"mode": "bitdecoding-nvfp4", "key_shift": false, "arithmetic": "wide"})";

template <class T>
class Device {
 public:
  explicit Device(std::size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T)), cudaSuccess);
    cudaMemset(data_, 0xFF, count * sizeof(T));
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  T* get() const { return static_cast<T*>(data_); }
  void put(const std::vector<T>& from) {
    cudaMemcpy(data_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice);
  }
  std::vector<T> take() const {
    std::vector<T> host(count_);
    EXPECT_EQ(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return host;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

inline bd_tensor tensor(const void* data, int heads) {
  bd_tensor t{};
  t.data = data;
  t.stride_token = std::int64_t{heads} * kHeadDim;
  t.stride_head = kHeadDim;
  t.dtype = BD_F32;
  return t;
}

inline bd_layer* make_layer(bd_runtime* runtime) {
  auto o = sized<bd_layer_options>();
  o.num_layers = 1;
  o.num_q_heads = kQHeads;
  o.num_kv_heads = o.total_kv_heads = kKvHeads;
  o.head_dim = kHeadDim;
  o.page_size = kPageTokens;
  o.sm_scale = 0.1F;
  o.window_left = -1;
  bd_layer* layer = nullptr;
  EXPECT_EQ(bd_layer_create(runtime, &o, &layer), BD_OK) << bd_last_error();
  return layer;
}

inline bd_steps_options steps_options() {
  auto o = sized<bd_steps_options>();
  o.head_dim = kHeadDim;
  o.page_size = kPageTokens;
  o.num_pages = kNumPages;
  o.num_slots = kNumSlots;
  o.max_requests = 4;
  return o;
}

inline bd_cuda_steps_options cuda_steps_options() {
  static const std::int32_t kWindow = -1;
  auto o = sized<bd_cuda_steps_options>();
  o.steps = steps_options();
  o.num_q_heads = kQHeads;
  o.num_kv_heads = kKvHeads;
  o.max_step_tokens = kMaxTokens;
  o.max_pages_per_request = 6;
  o.windows = &kWindow;
  o.num_windows = 1;
  return o;
}

inline bd_cache cache(void* pages, void* shadow) {
  return {pages, kNumPages, kKvHeads * kHeadBytes, kHeadBytes, shadow, kNumSlots};
}

// One step's numbers on the host. Two requests, pages of the second before those of the first.
struct Step {
  std::vector<std::int32_t> block_table{7, 8, 9, 10, 0, 0, 1, 2, 3, 4, 0, 0};
  std::vector<std::int32_t> query_start, seq_lens;
  std::vector<std::int64_t> slots;
  std::vector<float> query, key, value;

  Step(std::vector<int> rows, std::vector<int> lengths, std::mt19937* random) {
    query_start = {0};
    for (std::size_t r = 0; r < rows.size(); ++r) {
      seq_lens.push_back(lengths[r]);
      query_start.push_back(query_start.back() + rows[r]);
      for (int p = lengths[r] - rows[r]; p < lengths[r]; ++p) {
        slots.push_back(std::int64_t{block_table[r * 6 + p / kPageTokens]} * kPageTokens +
                        p % kPageTokens);
      }
    }
    std::normal_distribution<float> normal;
    for (auto* rows_of : {&query, &key, &value}) {
      const int heads = rows_of == &query ? kQHeads : kKvHeads;
      rows_of->resize(slots.size() * static_cast<std::size_t>(heads) * kHeadDim);
      for (float& x : *rows_of) x = normal(*random);
    }
  }
  int tokens() const { return static_cast<int>(slots.size()); }
  int longest() const {
    int most = 0;
    for (std::size_t r = 1; r < query_start.size(); ++r) {
      most = std::max(most, query_start[r] - query_start[r - 1]);
    }
    return most;
  }
};

class Reference {
 public:
  Reference() : runtime_(kWideRecipe), layer_(make_layer(runtime_.handle)) {
    const auto o = steps_options();
    EXPECT_EQ(bd_steps_create(runtime_.handle, &o, &steps_), BD_OK) << bd_last_error();
  }
  ~Reference() {
    bd_layer_destroy(layer_);
    bd_steps_destroy(steps_);
  }
  std::vector<float> run(const Step& s) {
    auto in = sized<bd_step_input>();
    in.num_requests = static_cast<std::int32_t>(s.seq_lens.size());
    in.block_table = s.block_table.data();
    in.block_table_stride = 6;
    in.query_start = s.query_start.data();
    in.seq_lens = s.seq_lens.data();
    in.slot_mapping = s.slots.data();
    in.num_tokens = s.tokens();
    EXPECT_EQ(bd_steps_build(steps_, &in), BD_OK) << bd_last_error();
    auto w = sized<bd_write_params>();
    w.layer = layer_;
    w.steps = steps_;
    w.cache = cache(pages_.data(), shadow_.data());
    w.key = tensor(s.key.data(), kKvHeads);
    w.value = tensor(s.value.data(), kKvHeads);
    w.num_tokens = s.tokens();
    EXPECT_EQ(bd_write(&w), BD_OK) << bd_last_error();
    std::vector<float> out(s.query.size());
    auto a = sized<bd_attend_params>();
    a.layer = layer_;
    a.steps = steps_;
    a.cache = w.cache;
    a.query = tensor(s.query.data(), kQHeads);
    a.key = w.key;
    a.value = w.value;
    a.output = tensor(out.data(), kQHeads);
    a.num_tokens = s.tokens();
    EXPECT_EQ(bd_attend(&a), BD_OK) << bd_last_error();
    return out;
  }

 private:
  Runtime runtime_;
  bd_layer* layer_;
  bd_steps* steps_ = nullptr;
  std::vector<std::uint8_t> pages_ =
      std::vector<std::uint8_t>(std::size_t{kNumPages} * kKvHeads * kHeadBytes);
  std::vector<std::uint16_t> shadow_ = std::vector<std::uint16_t>(kNumSlots * kSlotElements);
};

// The same on the device, with room for the longest step: buffers never move.
class Gpu {
 public:
  Gpu() : runtime_(kWideRecipe, nullptr, "cuda"), layer_(make_layer(runtime_.handle)) {
    const auto o = cuda_steps_options();
    EXPECT_EQ(bd_cuda_steps_create(runtime_.handle, &o, &steps_), BD_OK) << bd_last_error();
    cudaStreamCreate(&stream_);
  }
  ~Gpu() {
    bd_layer_destroy(layer_);
    bd_steps_destroy(steps_);
    cudaStreamDestroy(stream_);
  }
  void build(const Step& s) {
    block_table_.put(s.block_table);
    query_start_.put(s.query_start);
    seq_lens_.put(s.seq_lens);
    slots_.put(s.slots);
    query_.put(s.query);
    key_.put(s.key);
    value_.put(s.value);
    auto in = sized<bd_step_input>();
    in.num_requests = static_cast<std::int32_t>(s.seq_lens.size());
    in.block_table = block_table_.get();
    in.block_table_stride = 6;
    in.query_start = query_start_.get();
    in.seq_lens = seq_lens_.get();
    in.slot_mapping = slots_.get();
    in.num_tokens = s.tokens();
    EXPECT_EQ(bd_cuda_steps_build(steps_, &in, s.longest(), stream_), BD_OK) << bd_last_error();
  }
  void launch(const Step& s) {
    auto w = sized<bd_write_params>();
    w.layer = layer_;
    w.steps = steps_;
    w.cache = cache(pages_.get(), shadow_.get());
    w.key = tensor(key_.get(), kKvHeads);
    w.value = tensor(value_.get(), kKvHeads);
    w.num_tokens = s.tokens();
    EXPECT_EQ(bd_cuda_write(&w, stream_), BD_OK) << bd_last_error();
    auto a = sized<bd_attend_params>();
    a.layer = layer_;
    a.steps = steps_;
    a.cache = w.cache;
    a.query = tensor(query_.get(), kQHeads);
    a.key = w.key;
    a.value = w.value;
    a.output = tensor(output_.get(), kQHeads);
    a.num_tokens = s.tokens();
    EXPECT_EQ(bd_cuda_attend(&a, stream_), BD_OK) << bd_last_error();
  }
  std::vector<float> output(const Step& s) {
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    std::vector<float> out = output_.take();
    out.resize(s.query.size());
    return out;
  }
  // Positions of the first request, K and then V.
  std::vector<float> gather(int begin, int end) {
    const std::size_t rows = static_cast<std::size_t>(end - begin) * kKvHeads * kHeadDim;
    Device<float> both(2 * rows);
    auto g = sized<bd_gather_params>();
    g.layer = layer_;
    g.steps = steps_;
    g.cache = cache(pages_.get(), shadow_.get());
    g.with_shadow = 1;
    g.begin = begin;
    g.end = end;
    g.key = tensor(both.get(), kKvHeads);
    g.value = tensor(both.get() + rows, kKvHeads);
    EXPECT_EQ(bd_cuda_gather(&g, stream_), BD_OK) << bd_last_error();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return both.take();
  }
  bd_runtime* runtime() const { return runtime_.handle; }
  cudaStream_t stream() const { return stream_; }

 private:
  Runtime runtime_;
  bd_layer* layer_;
  bd_steps* steps_ = nullptr;
  cudaStream_t stream_ = nullptr;
  Device<std::uint8_t> pages_{std::size_t{kNumPages} * kKvHeads * kHeadBytes};
  Device<std::uint16_t> shadow_{std::size_t{kNumSlots} * kSlotElements};
  Device<std::int32_t> block_table_{12}, query_start_{3}, seq_lens_{2};
  Device<std::int64_t> slots_{kMaxTokens};
  Device<float> query_{std::size_t{kMaxTokens} * kQHeads * kHeadDim};
  Device<float> key_{std::size_t{kMaxTokens} * kKvHeads * kHeadDim};
  Device<float> value_{std::size_t{kMaxTokens} * kKvHeads * kHeadDim};
  Device<float> output_{std::size_t{kMaxTokens} * kQHeads * kHeadDim};
};

}  // namespace bitdecoding::capi_cuda
