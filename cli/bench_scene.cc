// SPDX-License-Identifier: Apache-2.0
#include "bench_scene.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace bitdecoding::cli {
namespace {

constexpr std::size_t kNormalValues = std::size_t{1} << 20;
// Queries have values of their own: one cut where a key was cut would score far above all others.
constexpr std::size_t kQueryValues = std::size_t{1} << 18;
constexpr std::int64_t kFillTokens = 4096;  // of all sequences in one step
enum Tensor : std::uint64_t { kQuery = 1, kKey = 2, kValue = 3 };

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

std::uint16_t to_bf16(float x) {  // finite values: to nearest, ties to even
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return static_cast<std::uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

Status check_options(const BenchOptions& o) {
  const auto positive = [](const char* flag, std::int64_t value) -> Status {
    if (value >= 1) return {};
    return {StatusCode::kInvalidArgument, fmt::format("{} is {}; expected 1 or more", flag, value)};
  };
  for (const auto& [flag, value] : {std::pair<const char*, std::int64_t>{"--q-heads", o.q_heads},
                                    {"--kv-heads", o.kv_heads},
                                    {"--batch", o.batch},
                                    {"--threads", o.threads},
                                    {"--tokens", o.tokens}}) {
    if (Status s = positive(flag, value); !s.ok()) return s;
  }
  if (o.q_heads % o.kv_heads != 0) {
    return {StatusCode::kInvalidArgument,
            fmt::format("--q-heads {} is no multiple of --kv-heads {}; every KV head serves the "
                        "same number of query heads",
                        o.q_heads, o.kv_heads)};
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 24;
  if (o.context < 0 || o.context > kMost || o.tokens > kMost) {
    return {StatusCode::kInvalidArgument,
            fmt::format("--context {} and --tokens {} must be between 0 and {}", o.context,
                        o.tokens, kMost)};
  }
  return {};
}

Result<Recipe> choose_recipe(const BenchOptions& o) {
  Result<Recipe> recipe = o.recipe.empty() ? mode_recipe(o.mode) : load_recipe(o.recipe);
  if (!recipe.ok()) return recipe;
  if (recipe.value().tau_calibrate) {
    return Status(
        StatusCode::kInvalidArgument,
        "probability_tau is \"calibrate\", and a bench has no model to take it from: give "
        "the number that `bitdecoding calibrate MODEL` prints");
  }
  if (!o.arithmetic.empty()) {
    Result<Arithmetic> arithmetic = parse_arithmetic(o.arithmetic);
    if (!arithmetic.ok()) return arithmetic.status();
    recipe.value().arithmetic = arithmetic.value();
  }
  return recipe;
}

}  // namespace

float Rows::at(std::int64_t token, int head, int dim) const {
  const auto i =
      static_cast<std::size_t>(token * view.stride_token + head * view.stride_head + dim);
  if (view.dtype == DType::kF32) return f32[i];
  return std::bit_cast<float>(static_cast<std::uint32_t>(bf16[i]) << 16);
}

Result<std::unique_ptr<Scene>> Scene::make(const BenchOptions& options) {
  if (Status s = check_options(options); !s.ok()) return s;
  std::unique_ptr<Scene> scene(new Scene(options));
  Result<Recipe> recipe = choose_recipe(options);
  if (!recipe.ok()) return recipe.status();
  scene->recipe_ = recipe.take();
  if (Status s = scene->open_backend(); !s.ok()) return s;
  if (Status s = scene->allocate(); !s.ok()) return s;
  scene->make_inputs();
  return scene;
}

Status Scene::open_backend() {
  BackendOptions backend;
  backend.num_threads = options_.threads;
  backend.isa = options_.isa;
  Result<std::unique_ptr<Backend>> made = make_backend(options_.backend, backend);
  if (!made.ok()) return made.status();
  backend_ = made.take();
  Result<PageGeometry> geometry = PageGeometry::make(recipe_.format, backend_->fragment_order(),
                                                     options_.head_dim, options_.page_size);
  if (!geometry.ok()) return geometry.status();
  layer_.geometry = geometry.value();
  layer_.num_kv_heads = options_.kv_heads;
  layer_.num_q_heads = options_.q_heads;
  layer_.key_rule = recipe_.key_rule;
  layer_.value_rule = recipe_.value_rule;
  layer_.hadamard = recipe_.hadamard;
  return {};
}

Status Scene::allocate() {
  const PageGeometry& geometry = layer_.geometry;
  const std::int64_t page_size = geometry.page_size;
  const std::int64_t per_sequence =
      (options_.context + options_.tokens + page_size - 1) / page_size;
  const std::int64_t num_pages = per_sequence * options_.batch;
  capacity_ = per_sequence * page_size;
  ShadowRule rule;
  rule.sink_tokens = recipe_.sink_tokens;
  rule.tail_tokens = recipe_.tail_tokens;
  rule.group_tokens = geometry.group_tokens;
  rule.reproducible = recipe_.reproducible;
  rule.page_size = geometry.page_size;
  ShadowDirectory::Limits limits;
  limits.num_pages = num_pages;
  limits.num_slots = 2 * min_shadow_slots(rule, options_.batch) +
                     2 * options_.batch * (recipe_.tail_tokens / geometry.group_tokens + 2);
  limits.max_requests = options_.batch;
  Result<std::unique_ptr<ShadowDirectory>> directory =
      ShadowDirectory::make(geometry, rule, limits);
  if (!directory.ok()) return directory.status();
  directory_ = directory.take();

  CacheView cache;
  cache.num_pages = num_pages;
  cache.stride_head = geometry.head_bytes;
  cache.stride_page = geometry.head_bytes * options_.kv_heads;
  pages_.reset(static_cast<std::uint8_t*>(
      allocate_huge(static_cast<std::size_t>(cache.stride_page * num_pages))));
  if (pages_ == nullptr) {
    return {StatusCode::kResourceExhausted,
            fmt::format("no memory for {} pages of {} bytes; lower --context or --batch", num_pages,
                        cache.stride_page)};
  }
  cache.pages = pages_.get();
  slots_.resize(
      static_cast<std::size_t>(limits.num_slots) *
      static_cast<std::size_t>(
          shadow_slot_bytes(options_.kv_heads, geometry.group_tokens, geometry.head_dim) / 2));
  write_.cache = attend_.cache = cache;
  write_.shadow = attend_.shadow = {slots_.data(), limits.num_slots};

  block_table_.resize(static_cast<std::size_t>(num_pages));
  std::iota(block_table_.begin(), block_table_.end(), 0);
  std::shuffle(block_table_.begin(), block_table_.end(), std::mt19937_64(options_.seed));
  return {};
}

void Scene::make_inputs() {
  std::mt19937_64 generator(options_.seed);
  std::normal_distribution<float> normal;
  normal_.resize(kNormalValues + kQueryValues);
  for (float& x : normal_) x = normal(generator);
  if (!recipe_.key_shift) return;
  key_shift_.resize(static_cast<std::size_t>(options_.kv_heads) *
                    static_cast<std::size_t>(options_.head_dim));
  for (float& x : key_shift_) x = normal(generator);
  layer_.key_shift = key_shift_.data();
}

// Row (sequence, position, head) is the same in every step: cut from the table at a mixed offset.
void Scene::make_rows(std::uint64_t tensor, int heads, const float* shift, Rows* rows) const {
  const int dim = options_.head_dim;
  const bool f32 = options_.dtype == "f32";
  const float* table = normal_.data() + (tensor == kQuery ? kNormalValues : 0);
  const std::size_t offsets =
      (tensor == kQuery ? kQueryValues : kNormalValues) - static_cast<std::size_t>(dim);
  const auto tokens = static_cast<std::size_t>(count_ * options_.batch);
  const std::size_t elements =
      tokens * static_cast<std::size_t>(heads) * static_cast<std::size_t>(dim);
  rows->f32.resize(f32 ? elements : 0);
  rows->bf16.resize(f32 ? 0 : elements);
  std::size_t out = 0;
  for (std::size_t token = 0; token < tokens; ++token) {
    const std::uint64_t sequence = token / static_cast<std::uint64_t>(count_);
    const std::uint64_t position =
        static_cast<std::uint64_t>(first_) + token % static_cast<std::uint64_t>(count_);
    for (int head = 0; head < heads; ++head) {
      const std::uint64_t id = ((sequence << 24 | position) << 12 | static_cast<unsigned>(head))
                               << 2;
      const float* source = table + mix(options_.seed ^ mix(id | tensor)) % offsets;
      for (int d = 0; d < dim; ++d, ++out) {
        const float x = source[d] + (shift != nullptr ? shift[head * dim + d] : 0.0F);
        if (f32) {
          rows->f32[out] = x;
        } else {
          rows->bf16[out] = to_bf16(x);
        }
      }
    }
  }
  const void* data = f32 ? static_cast<const void*>(rows->f32.data())
                         : static_cast<const void*>(rows->bf16.data());
  rows->view = {data, f32 ? DType::kF32 : DType::kBf16, std::int64_t{heads} * dim, dim};
}

Status Scene::begin_step(std::int64_t first, std::int64_t count) {
  if (first < 0 || count < 1 || first + count > capacity_) {
    return {StatusCode::kInternal, fmt::format("positions {} to {} leave the {} that were made",
                                               first, first + count, capacity_)};
  }
  first_ = first;
  count_ = count;
  const int batch = options_.batch;
  query_start_.assign(1, 0);
  seq_lens_.clear();
  slot_mapping_.clear();
  const std::int64_t per_sequence = capacity_ / options_.page_size;
  for (int r = 0; r < batch; ++r) {
    query_start_.push_back(static_cast<std::int32_t>((r + 1) * count));
    seq_lens_.push_back(static_cast<std::int32_t>(first + count));
    for (std::int64_t p = first; p < first + count; ++p) {
      const auto entry = static_cast<std::size_t>(r * per_sequence + p / options_.page_size);
      slot_mapping_.push_back(std::int64_t{block_table_[entry]} * options_.page_size +
                              p % options_.page_size);
    }
  }
  if (Status s = plan_again(); !s.ok()) return s;
  make_rows(kQuery, options_.q_heads, nullptr, &query_);
  make_rows(kKey, options_.kv_heads, key_shift_.empty() ? nullptr : key_shift_.data(), &key_);
  make_rows(kValue, options_.kv_heads, nullptr, &value_);
  bind();
  return {};
}

Status Scene::plan_again() {
  StepInput input;
  input.num_requests = options_.batch;
  input.block_table = block_table_.data();
  input.block_table_stride = capacity_ / options_.page_size;
  input.query_start = query_start_.data();
  input.seq_lens = seq_lens_.data();
  input.slot_mapping = slot_mapping_.data();
  input.num_tokens = static_cast<std::int64_t>(slot_mapping_.size());
  input.num_pages = write_.cache.num_pages;
  return directory_->build(input, &plan_);
}

void Scene::bind() {
  const std::int64_t row = std::int64_t{options_.q_heads} * options_.head_dim;
  // Poisoned, so that a row that was not written cannot pass for a result.
  output_.assign(static_cast<std::size_t>(count_ * options_.batch * row),
                 std::numeric_limits<float>::quiet_NaN());
  write_.layer = attend_.layer = &layer_;
  write_.key = attend_.key = key_.view;
  write_.value = attend_.value = value_.view;
  write_.plan = attend_.plan = &plan_;
  write_.counters = &counters_;
  attend_.query = query_.view;
  attend_.output = output_.data();
  attend_.output_dtype = DType::kF32;
  attend_.stride_output_token = row;
  attend_.stride_output_head = options_.head_dim;
  attend_.sm_scale = 1.0F / std::sqrt(static_cast<float>(options_.head_dim));
  attend_.arithmetic = recipe_.arithmetic;
  attend_.query_terms = recipe_.query_terms;
  attend_.probability_c = recipe_.probability_c;
  attend_.probability_tau = recipe_.probability_tau;
}

Status Scene::fill(std::int64_t tokens) {
  const std::int64_t step = std::max<std::int64_t>(kFillTokens / options_.batch, 64);
  for (std::int64_t first = 0; first < tokens; first += step) {
    if (Status s = begin_step(first, std::min(step, tokens - first)); !s.ok()) return s;
    if (Status s = write(); !s.ok()) return s;
  }
  return {};
}

Status Scene::write() { return backend_->write(write_); }
Status Scene::attend() { return backend_->attend(attend_); }

std::int64_t bytes_read(const Scene& scene) {
  const PageGeometry& geometry = scene.layer().geometry;
  std::int64_t bytes = 0;
  for (const RequestPlan& request : scene.plan().requests) {
    // A tile whose positions are all in BF16 is not read.
    std::vector<std::int64_t> in_bf16(
        static_cast<std::size_t>((request.seq_len + kTileTokens - 1) / kTileTokens), 0);
    for (std::int64_t i = 0; i < request.num_spans; ++i) {
      for (std::int64_t p = request.spans[i].begin; p < request.spans[i].end; ++p) {
        ++in_bf16[static_cast<std::size_t>(p / kTileTokens)];
        bytes += std::int64_t{4} * geometry.head_dim;
      }
    }
    for (std::size_t tile = 0; tile < in_bf16.size(); ++tile) {
      const std::int64_t rows = std::min<std::int64_t>(
          kTileTokens, request.seq_len - static_cast<std::int64_t>(tile) * kTileTokens);
      if (in_bf16[tile] < rows) bytes += geometry.tile_bytes;
    }
  }
  return bytes * scene.layer().num_kv_heads;
}

}  // namespace bitdecoding::cli
