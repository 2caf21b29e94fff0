// SPDX-License-Identifier: Apache-2.0
#include "capi/probe.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "backend/tensor.h"

namespace bitdecoding::capi {
namespace {

using Json = nlohmann::ordered_json;

// Keys and scores are compared at one row in so many: they take a pass over the prefix.
constexpr std::int64_t kRowDistance = 512;
constexpr int kSlotsPerRequest = 4;  // times the floor: one request, no cached prefixes

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

Status last(bd_status status) {
  return status == BD_OK ? Status()
                         : Status(static_cast<StatusCode>(status), "the probe: " + last_error());
}

bool active(const RequestPlan& request, std::int64_t row) {
  return (request.seq_len - request.query_len + row + 1) % kRowDistance == 0;
}

Json ratios(const std::vector<double>& error, const std::vector<double>& norm) {
  Json out = Json::array();
  for (std::size_t i = 0; i < error.size(); ++i) {
    if (norm[i] > 0) {
      out.push_back(std::sqrt(error[i] / norm[i]));
    } else {
      out.push_back(nullptr);
    }
  }
  return out;
}

// Scores count by their differences along the row: a constant changes no softmax.
void compare_scores(const TensorView& query, std::int64_t token, int head,
                    const std::vector<float>& want, const std::vector<float>& got, std::int64_t dim,
                    ProbeErrors* errors) {
  const std::int64_t rows = static_cast<std::int64_t>(want.size()) / dim;
  double sum[2] = {};
  double squares[2] = {};
  for (std::int64_t p = 0; p < rows; ++p) {
    double exact = 0;
    double other = 0;
    for (std::int64_t d = 0; d < dim; ++d) {
      const double q = load_element(query, token, head, static_cast<int>(d));
      exact += q * double{want[static_cast<std::size_t>(p * dim + d)]};
      other += q * double{got[static_cast<std::size_t>(p * dim + d)]};
    }
    sum[0] += other - exact;
    sum[1] += exact;
    squares[0] += (other - exact) * (other - exact);
    squares[1] += exact * exact;
  }
  const auto n = static_cast<double>(rows);
  const auto h = static_cast<std::size_t>(head);
  errors->score[h] += squares[0] - sum[0] * sum[0] / n;
  errors->score_norm[h] += squares[1] - sum[1] * sum[1] / n;
}

}  // namespace

Result<std::unique_ptr<Probe>> Probe::make(const RuntimeState& owner, const std::string& recipe) {
  if (owner.recipe.format != Format::kBf16) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("a probe compares a recipe with exact keys and values, so the engine "
                              "must run mode bf16, and it runs {}",
                              owner.recipe.mode));
  }
  std::unique_ptr<Probe> probe(new Probe());
  auto options = sized<bd_runtime_options>();
  options.recipe_json = recipe.c_str();
  options.origin = "the probe's recipe";
  const std::string backend(owner.backend->name());
  options.backend = backend.c_str();
  const std::string isa = owner.backend->isa();
  if (backend == "cpu") options.isa = isa.c_str();  // the one that was chosen for the owner
  options.num_threads = owner.backend->num_threads();
  if (Status s = last(bd_runtime_create(&options, &probe->runtime_)); !s.ok()) return s;
  return probe;
}

Probe::~Probe() {
  for (auto& [outer, layer] : layers_) bd_layer_destroy(layer.layer);
  for (auto& [outer, steps] : steps_) bd_steps_destroy(steps);
  bd_runtime_destroy(runtime_);
}

void Probe::forget(const bd_layer* outer) {
  const auto found = layers_.find(outer);
  if (found == layers_.end()) return;
  bd_layer_destroy(found->second.layer);
  layers_.erase(found);
}

void Probe::forget(const bd_steps* outer) {
  const auto found = steps_.find(outer);
  if (found == steps_.end()) return;
  bd_steps_destroy(found->second);
  steps_.erase(found);
}

Status Probe::build(const bd_steps* outer, const bd_steps_options& options,
                    const bd_step_input& input) {
  bd_steps*& steps = steps_[outer];
  if (steps == nullptr) {
    bd_steps_options own = options;
    auto info = sized<bd_page_info>();
    if (Status s =
            last(bd_page_info_get(runtime_, own.head_dim, own.page_size, own.max_requests, &info));
        !s.ok()) {
      return s;
    }
    own.num_slots = std::max(1, info.min_slots * kSlotsPerRequest);
    if (Status s = last(bd_steps_create(runtime_, &own, &steps)); !s.ok()) return s;
  }
  return last(bd_steps_build(steps, &input));
}

Result<Probe::Layer*> Probe::layer_of(const bd_layer* outer, const bd_steps* steps) {
  const auto found = layers_.find(outer);
  if (found != layers_.end()) return &found->second;
  bd_layer_options options = outer->options;
  options.attn_sink = outer->attn_sink.empty() ? nullptr : outer->attn_sink.data();
  options.key_outer = nullptr;
  options.value_outer = nullptr;
  auto info = sized<bd_page_info>();
  if (Status s = last(bd_page_info_get(runtime_, options.head_dim, options.page_size, 1, &info));
      !s.ok()) {
    return s;
  }
  Layer layer;
  if (Status s = last(bd_layer_create(runtime_, &options, &layer.layer)); !s.ok()) return s;
  const auto heads = static_cast<std::int64_t>(options.num_kv_heads);
  layer.cache.num_pages = steps->num_pages;
  layer.cache.stride_head = info.head_bytes;
  layer.cache.stride_page = info.head_bytes * heads;
  layer.cache.num_slots = steps->num_slots;
  layer.pages = std::make_unique<Memory>(
      static_cast<std::size_t>(steps->num_pages * layer.cache.stride_page));
  layer.shadow = std::make_unique<Memory>(
      static_cast<std::size_t>(steps->num_slots * heads * info.slot_bytes_per_head));
  if (layer.pages->data == nullptr || layer.shadow->data == nullptr) throw std::bad_alloc();
  layer.cache.pages = layer.pages->data;
  layer.cache.shadow = layer.shadow->data;
  ProbeErrors& e = layer.errors;
  e.key.assign(static_cast<std::size_t>(heads), 0);
  e.score.assign(static_cast<std::size_t>(options.num_q_heads), 0);
  e.key_norm = e.key;
  e.score_norm = e.output = e.output_norm = e.score;
  return &layers_.emplace(outer, std::move(layer)).first->second;
}

Status Probe::write(const bd_write_params& params) {
  const auto steps = steps_.find(params.steps);
  if (steps == steps_.end()) return {};  // the step was planned before the probe began
  Result<Layer*> layer = layer_of(params.layer, steps->second);
  if (!layer.ok()) return layer.status();
  bd_write_params own = params;
  own.layer = layer.value()->layer;
  own.steps = steps->second;
  own.cache = layer.value()->cache;
  const auto begin = std::chrono::steady_clock::now();
  Status status = last(bd_write(&own));
  write_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  written_rows_ += static_cast<std::uint64_t>(steps->second->plan.num_tokens) *
                   static_cast<std::uint64_t>(params.layer->config.num_kv_heads);
  return status;
}

Status Probe::attend(const bd_attend_params& params, const AttendParams& own,
                     const RuntimeState& owner) {
  const auto steps = steps_.find(params.steps);
  const auto found = layers_.find(params.layer);
  if (steps == steps_.end() || found == layers_.end()) return {};
  Layer& layer = found->second;
  bd_attend_params probed = params;
  probed.layer = layer.layer;
  probed.steps = steps->second;
  probed.cache = layer.cache;
  if (replaced_.count(params.layer->layer_index) > 0) return last(bd_attend(&probed));
  if (!replaced_.empty()) return {};
  const LayerConfig& config = params.layer->config;
  const std::int64_t dim = config.geometry.head_dim;
  std::vector<float> output(static_cast<std::size_t>(params.num_tokens * config.num_q_heads * dim));
  probed.lse = nullptr;
  probed.output = {output.data(), config.num_q_heads * dim, dim, BD_F32, 0};
  if (Status s = last(bd_attend(&probed)); !s.ok()) return s;
  return compare(params, own, owner, steps->second, &layer, output);
}

Status Probe::compare(const bd_attend_params& params, const AttendParams& own,
                      const RuntimeState& owner, const bd_steps* steps, Layer* layer,
                      const std::vector<float>& output) {
  const LayerConfig& config = params.layer->config;
  const std::int64_t dim = config.geometry.head_dim;
  const TensorView exact{params.output.data, own.output_dtype, own.stride_output_token,
                         own.stride_output_head};
  for (const RequestPlan& request : own.plan->requests) {
    for (std::int64_t t = request.query_begin; t < request.query_begin + request.query_len; ++t) {
      for (int h = 0; h < config.num_q_heads; ++h) {
        for (std::int64_t d = 0; d < dim; ++d) {
          const double want = load_element(exact, t, h, static_cast<int>(d));
          const double got =
              output[static_cast<std::size_t>((t * config.num_q_heads + h) * dim + d)];
          layer->errors.output[static_cast<std::size_t>(h)] += (got - want) * (got - want);
          layer->errors.output_norm[static_cast<std::size_t>(h)] += want * want;
        }
      }
    }
  }
  AttendParams probed = own;
  probed.layer = &layer->layer->config;
  probed.cache = {static_cast<std::uint8_t*>(layer->cache.pages), layer->cache.num_pages,
                  layer->cache.stride_page, layer->cache.stride_head};
  probed.shadow = {static_cast<std::uint16_t*>(layer->cache.shadow),
                   static_cast<std::int32_t>(layer->cache.num_slots)};
  probed.plan = &steps->plan;
  for (std::size_t r = 0; r < own.plan->requests.size(); ++r) {
    const RequestPlan& request = own.plan->requests[r];
    for (std::int64_t i = 0; i < request.query_len; ++i) {
      if (!active(request, i)) continue;
      if (Status s = compare_row(own, probed, owner, static_cast<int>(r), i, layer); !s.ok())
        return s;
    }
  }
  return {};
}

// Keys as the pages give them back, behind the sink, and the scores of one query row with them.
Status Probe::compare_row(const AttendParams& own, const AttendParams& probed,
                          const RuntimeState& owner, int r, std::int64_t row, Layer* layer) {
  const LayerConfig& config = *own.layer;
  const RequestPlan& request = own.plan->requests[static_cast<std::size_t>(r)];
  const std::int64_t dim = config.geometry.head_dim;
  const std::int64_t begin = probed.plan->rule.sink_tokens;
  const std::int64_t end = request.seq_len - request.query_len + row + 1;
  if (end <= begin) return {};
  const int group = config.num_q_heads / config.num_kv_heads;
  std::vector<float> want(static_cast<std::size_t>((end - begin) * dim));
  std::vector<float> got(want.size());
  std::vector<float> values(want.size());
  for (int kv = 0; kv < config.num_kv_heads; ++kv) {
    Status s = owner.backend->gather(own, r, kv, begin, end, want.data(), values.data());
    if (s.ok()) {
      s = runtime_->state->backend->gather(probed, r, kv, begin, end, got.data(), values.data());
    }
    if (!s.ok()) return s;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double difference = double{got[i]} - double{want[i]};
      layer->errors.key[static_cast<std::size_t>(kv)] += difference * difference;
      layer->errors.key_norm[static_cast<std::size_t>(kv)] += double{want[i]} * double{want[i]};
    }
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
      compare_scores(own.query, request.query_begin + row, h, want, got, dim, &layer->errors);
    }
  }
  return {};
}

std::string Probe::describe() const {
  Json layers = Json::array();
  for (const auto& [outer, layer] : layers_) {
    layers.push_back({{"layer", outer->layer_index},
                      {"first_kv_head", outer->first_kv_head},
                      {"window", outer->window_left < 0 ? 0 : outer->window_left + 1},
                      {"bits", 8.0 * layer.layer->config.geometry.bytes_per_token /
                                   (2.0 * outer->config.geometry.head_dim)},
                      {"key", ratios(layer.errors.key, layer.errors.key_norm)},
                      {"score", ratios(layer.errors.score, layer.errors.score_norm)},
                      {"output", ratios(layer.errors.output, layer.errors.output_norm)}});
  }
  std::sort(layers.begin(), layers.end(),
            [](const Json& a, const Json& b) { return a["layer"] < b["layer"]; });
  auto counters = sized<bd_counters>();
  bd_counters_get(runtime_, &counters);
  return Json{{"layers", layers},
              {"write_seconds", write_seconds_},
              {"written_rows", written_rows_},
              {"flushed_blocks", counters.flushed_blocks},
              {"saturated_blocks", counters.saturated_blocks},
              {"refused_groups", counters.refused_groups},
              {"missing_tokens", counters.missing_tokens}}
      .dump();
}

}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_probe_start(bd_runtime* runtime, const char* recipe_json) {
  return capi::guarded([&]() -> Status {
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    runtime->state->probe.reset();
    if (recipe_json == nullptr || *recipe_json == '\0') return {};
    auto probe = capi::Probe::make(*runtime->state, recipe_json);
    if (!probe.ok()) return probe.status();
    runtime->state->probe = probe.take();
    return {};
  });
}

bd_status bd_probe_replace(bd_runtime* runtime, const int32_t* layers, int32_t num_layers) {
  return capi::guarded([&]() -> Status {
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (runtime->state->probe == nullptr) return capi::invalid("the runtime has no probe");
    if (num_layers < 0 || (num_layers > 0 && layers == nullptr)) {
      return capi::invalid("{} layers at a null pointer", num_layers);
    }
    runtime->state->probe->replace({layers, layers + num_layers});
    return {};
  });
}

const char* bd_probe_describe(bd_runtime* runtime) {
  if (runtime == nullptr || runtime->state->probe == nullptr) return "{}";
  try {
    runtime->state->probe_text = runtime->state->probe->describe();
  } catch (...) {
    return "{}";
  }
  return runtime->state->probe_text.c_str();
}
