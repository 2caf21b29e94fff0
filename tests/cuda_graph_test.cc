// SPDX-License-Identifier: Apache-2.0
// A model's step as one CUDA graph: a plan, then write and attend of several layers that lie beside
// each other in one pool, captured once and replayed. Every layer is held against a reference of
// its own. Skipped where there is no GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>

#include "cuda_compare.h"

namespace bitdecoding::test {
namespace {

constexpr int kLayers = 3;
constexpr std::size_t kMostTokens = 256;
// As in cuda_attend_test.
constexpr Limits kLimits = {1.0e-3, 4.0e-3};

void require(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }
void require(const Status& status) { ASSERT_TRUE(status.ok()) << status.message(); }

// The layers' references: the same steps of other tokens, so that no layer's bytes are another's.
class References {
 public:
  explicit References(const WorldOptions& o) {
    for (int i = 0; i < kLayers; ++i) worlds.push_back(std::make_unique<World>(o));
  }
  void add_sequence(const std::vector<std::int32_t>& pages) {
    for (auto& w : worlds) w->add_sequence(pages);
  }
  // `lengths[i]` new tokens of sequence sequences[i].
  void step(const std::vector<int>& sequences, const std::vector<std::int64_t>& lengths) {
    results.clear();
    for (std::size_t i = 0; i < worlds.size(); ++i) {
      std::vector<Work> work;
      for (std::size_t r = 0; r < sequences.size(); ++r) {
        const auto first = static_cast<std::uint32_t>(100000 * i) + next_ + 1000 * sequences[r];
        work.push_back({sequences[r], iota_tokens(first, lengths[r])});
      }
      results.push_back(worlds[i]->step(work));
      require(results.back().status);
    }
    next_ += 10;
  }

  std::vector<std::unique_ptr<World>> worlds;
  std::vector<StepResult> results;  // of the newest step

 private:
  std::uint32_t next_ = 0;
};

// All layers on the device. Pages of the layers alternate in one pool.
class Model {
 public:
  explicit Model(const World& like) : layer_(like.layer), options_(like.options) {
    CudaPlanLimits limits;
    limits.geometry = layer_.geometry;
    limits.rule = make_shadow_rule(layer_.geometry, options_.sink_tokens, options_.tail_tokens,
                                   options_.reproducible);
    limits.num_pages = options_.num_pages;
    limits.num_slots = options_.num_slots;
    limits.max_requests = options_.max_requests;
    limits.max_step_tokens = kMostTokens;
    limits.max_pages_per_request = 8;
    limits.num_q_heads = options_.num_q_heads;
    limits.num_kv_heads = options_.num_kv_heads;
    plan_ = CudaPlan::make(limits).take();
    backend_ = CudaBackend::make({0, options_.head_dim}).take();
    page_bytes_ = layer_.geometry.head_bytes * options_.num_kv_heads;
    const auto pool = static_cast<std::size_t>(kLayers * page_bytes_ * options_.num_pages);
    const std::vector<std::uint8_t> poison(pool, options_.fill);
    pages_.put(poison.data(), pool);
    const auto elements = static_cast<std::size_t>(options_.num_kv_heads * options_.head_dim);
    layer_.key_shift = static_cast<const float*>(shift_.put(layer_.key_shift, 4 * elements));
    const auto rows = static_cast<std::size_t>(
        shadow_slot_bytes(options_.num_kv_heads, layer_.geometry.group_tokens, options_.head_dim) *
        options_.num_slots);
    for (int i = 0; i < kLayers; ++i) rows_[i].reserve(rows);
    for (auto& tensors : tensors_) {
      for (auto& t : tensors) t.reserve(kMostTokens * options_.num_q_heads * options_.head_dim * 4);
    }
    for (DeviceBuffer* b : {&table_, &starts_, &lengths_, &slots_}) b->reserve(1 << 16);
    require(cudaStreamCreate(&stream_));
  }
  ~Model() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
    cudaStreamDestroy(stream_);
  }

  // The newest step of the references into the buffers that the step reads.
  void load(const References& from) {
    const StepInput& in = from.worlds[0]->input;
    const auto n = static_cast<std::size_t>(in.num_requests);
    input_ = in;
    input_.block_table = static_cast<const std::int32_t*>(
        table_.put(in.block_table, 4 * n * static_cast<std::size_t>(in.block_table_stride)));
    input_.query_start = static_cast<const std::int32_t*>(starts_.put(in.query_start, 4 * n + 4));
    input_.seq_lens = static_cast<const std::int32_t*>(lengths_.put(in.seq_lens, 4 * n));
    const auto tokens = static_cast<std::size_t>(in.num_tokens);
    input_.slot_mapping = static_cast<const std::int64_t*>(slots_.put(in.slot_mapping, 8 * tokens));
    longest_ = 0;
    for (std::size_t r = 0; r < n; ++r) {
      longest_ = std::max(longest_, in.query_start[r + 1] - in.query_start[r]);
    }
    for (int i = 0; i < kLayers; ++i) {
      const AttendParams& p = from.worlds[static_cast<std::size_t>(i)]->params;
      const std::size_t row = tokens * static_cast<std::size_t>(options_.head_dim) * 4;
      tensors_[i][0].put(p.key.data, row * static_cast<std::size_t>(options_.num_kv_heads));
      tensors_[i][1].put(p.value.data, row * static_cast<std::size_t>(options_.num_kv_heads));
      tensors_[i][2].put(p.query.data, row * static_cast<std::size_t>(options_.num_q_heads));
    }
  }
  void enqueue(cudaStream_t stream) {
    require(plan_->build(input_, longest_, stream));
    for (int i = 0; i < kLayers; ++i) {
      require(backend_->write(write_params(i), *plan_, stream));
      require(backend_->attend(attend_params(i), *plan_, stream));
    }
  }
  void run() {
    enqueue(stream_);
    require(cudaStreamSynchronize(stream_));
  }
  void replay() {
    if (graph_ == nullptr) {
      cudaGraph_t captured = nullptr;
      require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
      enqueue(stream_);
      require(cudaStreamEndCapture(stream_, &captured));
      require(cudaGraphInstantiate(&graph_, captured, 0));
      require(cudaGraphDestroy(captured));
    }
    require(cudaGraphLaunch(graph_, stream_));
    require(cudaStreamSynchronize(stream_));
  }

  void expect_equal(const References& want) {
    for (int i = 0; i < kLayers; ++i) {
      SCOPED_TRACE(testing::Message() << "layer " << i);
      World& w = *want.worlds[static_cast<std::size_t>(i)];
      const StepResult& expected = want.results[static_cast<std::size_t>(i)];
      StepResult got = expected;
      tensors_[i][3].get(got.output.data(), 4 * got.output.size());
      tensors_[i][4].get(got.lse.data(), 4 * got.lse.size());
      expect_decoded_rows(w, got, expected, kLimits);
      std::vector<std::uint8_t> pool(static_cast<std::size_t>(kLayers * page_bytes_) *
                                     static_cast<std::size_t>(options_.num_pages));
      pages_.get(pool.data(), pool.size());
      for (std::int64_t page = 0; page < options_.num_pages; ++page) {
        const auto* at = pool.data() + (page * kLayers + i) * page_bytes_;
        ASSERT_EQ(std::vector<std::uint8_t>(at, at + page_bytes_), w.page_bytes(page))
            << "page " << page;
      }
    }
  }
  void poison_outputs() {
    for (auto& t : tensors_) {
      require(cudaMemset(t[3].data(), 0xFF, kMostTokens * options_.num_q_heads * 4));
    }
  }
  bool outputs_are_poison() {
    std::vector<std::uint8_t> bytes(kMostTokens * static_cast<std::size_t>(options_.num_q_heads));
    for (auto& t : tensors_) {
      t[3].get(bytes.data(), bytes.size());
      for (const std::uint8_t b : bytes) {
        if (b != 0xFF) return false;
      }
    }
    return true;
  }
  StepInput& input() { return input_; }
  CudaCounters counters() { return plan_->counters(stream_).take(); }

 private:
  CacheView cache(int i) {
    return {static_cast<std::uint8_t*>(pages_.data()) + i * page_bytes_, options_.num_pages,
            kLayers * page_bytes_, layer_.geometry.head_bytes};
  }
  ShadowPool shadow(int i) {
    return {static_cast<std::uint16_t*>(rows_[i].data()), options_.num_slots};
  }
  TensorView view(int i, int which, int heads) {
    return {tensors_[i][which].data(), DType::kF32, std::int64_t{heads} * options_.head_dim,
            options_.head_dim};
  }
  WriteParams write_params(int i) {
    WriteParams p;
    p.layer = &layer_;
    p.cache = cache(i);
    p.shadow = shadow(i);
    p.key = view(i, 0, options_.num_kv_heads);
    p.value = view(i, 1, options_.num_kv_heads);
    return p;
  }
  AttendParams attend_params(int i) {
    AttendParams p;
    p.layer = &layer_;
    p.cache = cache(i);
    p.shadow = shadow(i);
    p.query = view(i, 2, options_.num_q_heads);
    p.output = tensors_[i][3].data();
    p.output_dtype = DType::kF32;
    p.stride_output_token = std::int64_t{options_.num_q_heads} * options_.head_dim;
    p.stride_output_head = options_.head_dim;
    p.lse = static_cast<float*>(tensors_[i][4].data());
    p.sm_scale = 1.0F / std::sqrt(static_cast<float>(options_.head_dim));
    p.arithmetic = Arithmetic::kWide;
    return p;
  }

  LayerConfig layer_;
  WorldOptions options_;
  std::int64_t page_bytes_ = 0;
  std::unique_ptr<CudaPlan> plan_;
  std::unique_ptr<CudaBackend> backend_;
  cudaStream_t stream_ = nullptr;
  cudaGraphExec_t graph_ = nullptr;
  StepInput input_;
  int longest_ = 0;
  DeviceBuffer pages_, shift_, table_, starts_, lengths_, slots_;
  DeviceBuffer rows_[kLayers];
  DeviceBuffer tensors_[kLayers][5];  // key, value, query, output, lse
};

WorldOptions options_of(int head_dim) {
  WorldOptions o = WorldOptions::for_cuda();
  o.head_dim = head_dim;
  o.num_q_heads = 8;
  o.order = FragmentOrder::kFp16Mma;
  return o;
}

const std::vector<std::int32_t> kPages[4] = {
    {7, 3, 11, 1, 20, 9}, {30, 31, 5, 6, 12, 13}, {0, 2, 4, 8, 10, 14}, {29, 28, 27, 26, 25, 24}};

// Between replays lengths, block tables and slot mappings change: the two requests grow over
// groups and pages, change places, and are other sequences; chunks come between, not captured.
TEST_F(Cuda, AGraphOfSeveralLayersIsReplayed) {
  for (const int head_dim : {64, 128}) {
    SCOPED_TRACE(testing::Message() << "head_dim " << head_dim);
    References want(options_of(head_dim));
    for (const auto& pages : kPages) want.add_sequence(pages);
    Model model(*want.worlds[0]);
    const auto eager = [&](const std::vector<int>& who, const std::vector<std::int64_t>& n) {
      want.step(who, n);
      model.load(want);
      model.run();
      model.expect_equal(want);
    };
    const auto replay = [&](int a, int b) {
      want.step({a, b}, {1, 1});
      model.load(want);
      model.poison_outputs();
      model.replay();
      model.expect_equal(want);
    };
    eager({0, 1}, {120, 61});
    for (int i = 0; i < 20 && !HasFatalFailure(); ++i) replay(0, 1);
    eager({2, 3}, {200, 15});
    for (int i = 0; i < 6 && !HasFatalFailure(); ++i) replay(3, 2);
    eager({1, 3}, {4, 3});
    for (int i = 0; i < 6 && !HasFatalFailure(); ++i) replay(i % 2 == 0 ? 2 : 0, 1);
    if (HasFatalFailure()) return;
    const CudaCounters c = model.counters();
    EXPECT_EQ(c.bad_pages + c.bad_slots + c.bad_lengths, 0U);
  }
}

// A step without tokens writes nothing, and attend behind it touches nothing. The next is as ever.
TEST_F(Cuda, AStepWithoutTokens) {
  References want(options_of(128));
  for (const auto& pages : kPages) want.add_sequence(pages);
  Model model(*want.worlds[0]);
  for (int i = 0; i < 3; ++i) {
    want.step({0, 1}, {i == 0 ? 150 : 1, i == 0 ? 70 : 2});
    model.load(want);
    const StepInput whole = model.input();
    model.poison_outputs();
    model.input().num_tokens = 0;
    model.run();
    EXPECT_TRUE(model.outputs_are_poison());
    model.input().num_requests = 0;
    model.run();
    EXPECT_TRUE(model.outputs_are_poison());
    model.input() = whole;
    model.run();
    model.expect_equal(want);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace bitdecoding::test
