// SPDX-License-Identifier: Apache-2.0
// Elements a second of the CPU backend's write and of its dequantized tiles, one thread, next to
// the scalar reference. An element is one value of K or V: a group's values are counted once even
// when a decode step quantizes the whole group again.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <vector>

#include "backend/cpu/dequantize_kernels.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/write.h"
#include "backend/reference/verbs.h"

namespace bitdecoding {
namespace {

constexpr int kPageSize = 128;

// One layer, one sequence: `prefix` tokens are there already, `tokens` are written.
class Layer {
 public:
  Layer(Format format, int heads, int head_dim, std::int64_t prefix, std::int64_t tokens,
        ScaleRule key_rule, ScaleRule value_rule) {
    layer.geometry = PageGeometry::make(format, FragmentOrder::kQuad, head_dim, kPageSize).take();
    layer.num_kv_heads = layer.num_q_heads = heads;
    layer.key_rule = key_rule;
    layer.value_rule = value_rule;
    shift_.assign(static_cast<std::size_t>(heads * head_dim), 0.25F);
    if (is_tiled(format)) layer.key_shift = shift_.data();
    const std::int64_t num_pages = (prefix + tokens + kPageSize - 1) / kPageSize;
    const std::int64_t page_bytes = layer.geometry.head_bytes * heads;
    pages_.assign(static_cast<std::size_t>(page_bytes * num_pages), 0);
    cache = {pages_.data(), num_pages, page_bytes, layer.geometry.head_bytes};
    const auto group = static_cast<std::int64_t>(layer.geometry.group_tokens);
    rows_.assign(static_cast<std::size_t>(shadow_slot_bytes(heads, group_tokens(format), head_dim)),
                 0x3F80);
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const std::int64_t row = std::int64_t{2} * heads * head_dim;  // K and V side by side
    for (std::int64_t i = 0; i < tokens * row; ++i) tensor_.push_back(normal(random));
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::int64_t p = prefix + t;
      if (t > 0 && p % group != 0) {
        ++plan.writes.back().num_rows;
        continue;
      }
      const auto first = static_cast<std::int32_t>(p % group);
      const auto in_page = static_cast<std::int32_t>(p % kPageSize / group);
      // The last group has a slot, as a partial group would.
      plan.writes.push_back({p / kPageSize, in_page, first, 1, t, -1, false});
    }
    plan.writes.back().slot = 0;
    plan.writes.back().prefix_in_slot = plan.writes.back().first_row > 0;
    params.layer = &layer;
    params.cache = cache;
    params.shadow = {rows_.data(), 1};
    params.key = {tensor_.data(), DType::kF32, row, head_dim};
    params.value = {tensor_.data() + std::int64_t{heads} * head_dim, DType::kF32, row, head_dim};
    params.plan = &plan;
  }

  LayerConfig layer;
  CacheView cache;
  StepPlan plan;
  WriteParams params;

 private:
  std::vector<float> shift_;
  std::vector<std::uint8_t> pages_;
  std::vector<std::uint16_t> rows_;
  std::vector<float> tensor_;
};

cpu::Isa isa_at(std::int64_t index) {
  const std::vector<cpu::Isa> isas = cpu::supported_isas();
  return isas[static_cast<std::size_t>(index) % isas.size()];
}

struct WriteCase {
  const char* name;
  Format format;
  int heads, head_dim;
  std::int64_t prefix, tokens;
  ScaleRule key_rule, value_rule;
};

constexpr WriteCase kWrites[] = {
    {"nvfp4 chunk of 512, 8 x 128", Format::kNvfp4, 8, 128, 0, 512, ScaleRule::kFourSix,
     ScaleRule::kAmax6},
    {"nvfp4 chunk of 512, 8 x 128, four_six twice", Format::kNvfp4, 8, 128, 0, 512,
     ScaleRule::kFourSix, ScaleRule::kFourSix},
    {"nvfp4 chunk of 512, 8 x 128, code_search twice", Format::kNvfp4, 8, 128, 0, 512,
     ScaleRule::kCodeSearch, ScaleRule::kCodeSearch},
    {"mxfp4 chunk of 512, 8 x 128", Format::kMxfp4, 8, 128, 0, 512, ScaleRule::kMxfp4Search,
     ScaleRule::kMxfp4Search},
    {"nvfp4_rows chunk of 512, 8 x 128", Format::kNvfp4Rows, 8, 128, 0, 512, ScaleRule::kAmax6,
     ScaleRule::kAmax6},
    {"fp8 chunk of 512, 8 x 128", Format::kFp8E4m3, 8, 128, 0, 512, ScaleRule::kAmax6,
     ScaleRule::kAmax6},
    {"bf16 chunk of 512, 8 x 128", Format::kBf16, 8, 128, 0, 512, ScaleRule::kAmax6,
     ScaleRule::kAmax6},
    {"nvfp4 decode, 3 x 64", Format::kNvfp4, 3, 64, 1000, 1, ScaleRule::kFourSix,
     ScaleRule::kAmax6},
    {"nvfp4 decode, 8 x 128", Format::kNvfp4, 8, 128, 1000, 1, ScaleRule::kFourSix,
     ScaleRule::kAmax6},
};

void count(benchmark::State& state, std::int64_t elements) {
  state.SetItemsProcessed(state.iterations() * elements);
}

void write_cpu(benchmark::State& state) {
  const WriteCase& c = kWrites[state.range(0)];
  const cpu::Isa isa = isa_at(state.range(1));
  state.SetLabel(std::string(c.name) + ", " + isa.name);
  Layer layer(c.format, c.heads, c.head_dim, c.prefix, c.tokens, c.key_rule, c.value_rule);
  const cpu::WriteKernels& kernels = *cpu::write_kernels(isa.target);
  for (auto _ : state) {
    const Status status = cpu::cpu_write(layer.params, kernels, {});
    if (!status.ok()) state.SkipWithError(status.message().c_str());
    benchmark::ClobberMemory();
  }
  count(state, c.tokens * c.heads * c.head_dim * 2);
}

void write_reference(benchmark::State& state) {
  const WriteCase& c = kWrites[state.range(0)];
  state.SetLabel(std::string(c.name) + ", reference");
  Layer layer(c.format, c.heads, c.head_dim, c.prefix, c.tokens, c.key_rule, c.value_rule);
  for (auto _ : state) {
    reference::write(layer.params);
    benchmark::ClobberMemory();
  }
  count(state, c.tokens * c.heads * c.head_dim * 2);
}

constexpr Format kFormats[] = {Format::kNvfp4, Format::kMxfp4, Format::kNvfp4Rows, Format::kFp8E4m3,
                               Format::kBf16};

void dequantize_cpu(benchmark::State& state) {
  constexpr int kHeadDim = 128;
  const Format format = kFormats[state.range(0)];
  const cpu::Isa isa = isa_at(state.range(1));
  state.SetLabel(std::string(format_name(format)) + " tile of 128, " + isa.name);
  const bool mx = format == Format::kMxfp4;
  Layer layer(format, 1, kHeadDim, 0, kTileTokens, mx ? ScaleRule::kMxfp4Search : ScaleRule::kAmax6,
              mx ? ScaleRule::kMxfp4Search : ScaleRule::kAmax6);
  reference::write(layer.params);
  std::vector<float> key(std::size_t{kTileTokens} * kHeadDim);
  std::vector<float> value(key.size());
  cpu::DequantizeArgs args;
  args.format = format;
  args.head_dim = kHeadDim;
  args.tile = layer.cache.pages;
  args.key_shift = layer.layer.key_shift;
  args.key = key.data();
  args.value = value.data();
  const cpu::DequantizeKernels& kernels = *cpu::dequantize_kernels(isa.target);
  for (auto _ : state) {
    benchmark::DoNotOptimize(kernels.tile(args));
    benchmark::ClobberMemory();
  }
  count(state, std::int64_t{2} * kTileTokens * kHeadDim);
}

const auto kNumIsas = static_cast<std::int64_t>(cpu::supported_isas().size());
constexpr auto kNumWrites = static_cast<std::int64_t>(std::size(kWrites));
constexpr auto kNumFormats = static_cast<std::int64_t>(std::size(kFormats));

BENCHMARK(write_cpu)
    ->ArgsProduct({benchmark::CreateDenseRange(0, kNumWrites - 1, 1),
                   benchmark::CreateDenseRange(0, kNumIsas - 1, 1)})
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(write_reference)->DenseRange(0, kNumWrites - 1)->Unit(benchmark::kMicrosecond);
BENCHMARK(dequantize_cpu)
    ->ArgsProduct({benchmark::CreateDenseRange(0, kNumFormats - 1, 1),
                   benchmark::CreateDenseRange(0, kNumIsas - 1, 1)})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace bitdecoding

BENCHMARK_MAIN();
