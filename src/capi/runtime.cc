// SPDX-License-Identifier: Apache-2.0
// The runtime: recipe, backend and sidecar of a process.
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "capi/cuda.h"

namespace bitdecoding::capi {
namespace {

constexpr std::int32_t kMaxThreads = 1024;  // the cpu backend's
constexpr std::int32_t kMaxRequests = 1 << 20;

Result<Recipe> chosen_recipe(const bd_runtime_options& options) {
  if (options.recipe_json != nullptr) {
    const char* origin = options.origin != nullptr ? options.origin : "recipe";
    return parse_recipe(options.recipe_json, origin);
  }
  if (options.recipe_file != nullptr) return load_recipe(options.recipe_file);
  Recipe recipe;
  recipe.key_shift = false;
  return recipe;
}

nlohmann::ordered_json describe_key_shift(const KeyShift& sidecar) {
  return {{"path", sidecar.path},
          {"layers", sidecar.num_layers},
          {"heads", sidecar.num_kv_heads},
          {"head_dim", sidecar.head_dim},
          {"value_means", !sidecar.value_means.empty()},
          {"metadata", sidecar.metadata}};
}

nlohmann::ordered_json describe_outer_scales(const OuterScales& scales) {
  return {{"path", scales.path},
          {"layers", scales.num_layers},
          {"heads", scales.num_kv_heads},
          {"key", !scales.key.empty()},
          {"value", !scales.value.empty()}};
}

// `file` is a KeyShift or OuterScales.
template <class File>
void add_model_warning(const char* what, const File& file, const std::string& model,
                       std::vector<std::string>* warnings) {
  const auto made_from = file.metadata.find("model");
  if (model.empty() || made_from == file.metadata.end() || made_from->second == model) return;
  warnings->push_back(fmt::format("the {} in '{}' were made from the model '{}', and this is '{}'",
                                  what, file.path, made_from->second, model));
}

// Found now and not when the server stops and its work would be lost.
Status check_calibrate_folder(const std::string& file) {
  if (file.empty()) return {};
  const std::filesystem::path folder = std::filesystem::absolute(file).parent_path();
  if (::access(folder.c_str(), W_OK | X_OK) == 0) return {};
  return {StatusCode::kIo,
          fmt::format("the key means are to be written to '{}', but '{}' is no folder that can be "
                      "written: {}; create it, or name another calibrate_file",
                      file, folder.string(), std::strerror(errno))};
}

// What a GPU serves of the recipes; int8 is how CPUs come near to wide.
Status take_device_recipe(Recipe* recipe) {
  if (recipe->arithmetic == Arithmetic::kInt8) recipe->arithmetic = Arithmetic::kWide;
  recipe->value_shift = false;  // describe() warns of a sidecar that has value means
  if (!is_tiled(recipe->format)) {
    return {StatusCode::kUnsupported,
            fmt::format("the cuda backend keeps nvfp4 and mxfp4 pages, and the recipe's format is "
                        "'{}'; choose the mode bitdecoding-nvfp4 or bitdecoding-mxfp4, or the "
                        "backend cpu",
                        format_name(recipe->format))};
  }
  if (recipe->calibrate_file.empty()) return {};
  return {StatusCode::kUnsupported,
          "the cuda backend does not observe keys, and the recipe names a calibrate_file; "
          "calibrate with the backend cpu and name the result as key_shift_file"};
}

Result<std::unique_ptr<Backend>> chosen_backend(const bd_runtime_options& options) {
  const std::string_view name = options.backend != nullptr ? options.backend : "cpu";
  if (name == "cuda") return make_device_backend(options.device);
  if (options.device != 0) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("device is {}, and the backend {} has none; set it to 0, or choose "
                              "the backend cuda",
                              options.device, name));
  }
  BackendOptions backend_options;
  backend_options.num_threads = options.num_threads;
  if (options.isa != nullptr) backend_options.isa = options.isa;
  return make_backend(name, backend_options);
}

std::string describe(const RuntimeState& state) {
  std::vector<std::string> warnings;
  if (state.key_shift) {
    warnings = state.key_shift->warnings;
    add_model_warning("key means", *state.key_shift, state.model, &warnings);
    if (is_device(state) && !state.key_shift->value_means.empty()) {
      warnings.push_back(fmt::format(
          "the value means in '{}' are not used: the cuda backend does not subtract them",
          state.key_shift->path));
    }
    if (state.recipe.value_shift && state.key_shift->value_means.empty()) {
      warnings.push_back(fmt::format(
          "'{}' holds no value means, so values are stored with theirs, less accurately; "
          "`bitdecoding calibrate` makes them, \"value_shift\": false says that none are wanted",
          state.key_shift->path));
    }
  }
  if (state.outer_scales) {
    add_model_warning("outer scales", *state.outer_scales, state.model, &warnings);
  }
  nlohmann::ordered_json json;
  json["version"] = BITDECODING_VERSION;
  json["backend"] = state.backend->name();
  json["isa"] = state.backend->isa();
  json["threads"] = state.backend->num_threads();
  json["fragment_order"] = fragment_order_name(state.backend->fragment_order());
  json["recipe"] = nlohmann::ordered_json::parse(recipe_to_json(state.recipe));
  json["sidecar"] = state.key_shift ? describe_key_shift(*state.key_shift) : nullptr;
  json["outer_scales"] = state.outer_scales ? describe_outer_scales(*state.outer_scales) : nullptr;
  json["warnings"] = warnings;
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void fill_recipe_values(RuntimeState* state) {
  // A variable: items() refers to the object, and the loop would outlive a temporary.
  const nlohmann::json values = nlohmann::json::parse(recipe_to_json(state->recipe));
  for (const auto& [key, value] : values.items()) {
    state->recipe_values[key] = value.is_string() ? value.get<std::string>() : value.dump();
  }
}

Status create(const bd_runtime_options& options, bd_runtime** runtime) {
  if (Status s = check_range("num_threads", options.num_threads, 0, kMaxThreads); !s.ok()) {
    return s;
  }
  auto state = std::make_shared<RuntimeState>();
  Result<Recipe> recipe = chosen_recipe(options);
  if (!recipe.ok()) return recipe.status();
  state->recipe = recipe.take();
  if (options.backend != nullptr && std::string_view(options.backend) == "cuda") {
    if (Status s = take_device_recipe(&state->recipe); !s.ok()) return s;
  }
  if (options.model != nullptr) state->model = options.model;
  const bool means = state->recipe.key_shift || state->recipe.value_shift;
  if (means && !state->recipe.key_shift_file.empty()) {
    Result<KeyShift> sidecar = load_key_shift(state->recipe.key_shift_file);
    if (!sidecar.ok()) return sidecar.status();
    state->key_shift = sidecar.take();
    if (Status s = take_calibrated_tau(*state->key_shift, state.get()); !s.ok()) return s;
  }
  if (!state->recipe.outer_scale_file.empty()) {
    Result<OuterScales> scales = load_outer_scales(state->recipe.outer_scale_file);
    if (!scales.ok()) return scales.status();
    state->outer_scales = scales.take();
  }
  if (Status s = check_calibrate_folder(state->recipe.calibrate_file); !s.ok()) return s;
  Result<std::unique_ptr<Backend>> backend = chosen_backend(options);
  if (!backend.ok()) return backend.status();
  state->backend = backend.take();
  fill_recipe_values(state.get());
  state->describe = describe(*state);
  *runtime = new bd_runtime{std::move(state)};
  return {};
}

Status load_shift(RuntimeState* state, const char* path) {
  Result<KeyShift> sidecar = load_key_shift(path);
  if (!sidecar.ok()) return sidecar.status();
  const std::lock_guard<std::mutex> lock(state->mutex);
  if (!is_tiled(state->recipe.format)) {
    return invalid(
        "key means need a tiled format (nvfp4 or mxfp4), and the recipe's format is "
        "'{}'",
        format_name(state->recipe.format));
  }
  if (state->live_layers > 0) {
    return invalid(
        "the key means cannot change while the runtime has {} layers: pages written "
        "under other means would be read wrongly; load them before bd_layer_create",
        state->live_layers);
  }
  if (Status s = take_calibrated_tau(sidecar.value(), state); !s.ok()) return s;
  state->key_shift = sidecar.take();
  state->recipe.key_shift = true;
  state->recipe.key_shift_file = path;
  fill_recipe_values(state);
  state->describe = describe(*state);
  return {};
}

Status page_info(const RuntimeState& state, std::int32_t head_dim, std::int32_t page_size,
                 std::int32_t max_requests, bd_page_info* info) {
  if (Status s = check_range("max_requests", max_requests, 1, kMaxRequests); !s.ok()) return s;
  const Result<PageGeometry> made =
      PageGeometry::make(state.recipe.format, state.backend->fragment_order(), head_dim, page_size);
  if (!made.ok()) return made.status();
  const PageGeometry& geometry = made.value();
  info->head_bytes = geometry.head_bytes;
  info->group_tokens = geometry.group_tokens;
  info->groups_per_page = geometry.groups_per_page;
  info->slot_bytes_per_head = shadow_slot_bytes(1, geometry.group_tokens, head_dim);
  info->min_slots = min_shadow_slots(state.shadow_rule(geometry), max_requests);
  info->bytes_per_token_x1000 =
      static_cast<std::int32_t>(std::lround(geometry.bytes_per_token * 1000.0));
  return {};
}

}  // namespace

ShadowRule RuntimeState::shadow_rule(const PageGeometry& geometry) const {
  return make_shadow_rule(geometry, recipe.sink_tokens, recipe.tail_tokens, recipe.reproducible);
}

}  // namespace bitdecoding::capi

using bitdecoding::Status;
namespace capi = bitdecoding::capi;

bd_status bd_runtime_create(const bd_runtime_options* options, bd_runtime** runtime) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(options, "bd_runtime_options"); !s.ok()) return s;
    if (runtime == nullptr) return capi::invalid("the pointer to the new runtime is null");
    *runtime = nullptr;
    return capi::create(*options, runtime);
  });
}

void bd_runtime_destroy(bd_runtime* runtime) { delete runtime; }

const char* bd_runtime_describe(const bd_runtime* runtime) {
  if (runtime == nullptr) return "{}";
  const std::lock_guard<std::mutex> lock(runtime->state->mutex);
  return runtime->state->describe.c_str();
}

bd_status bd_runtime_load_key_shift(bd_runtime* runtime, const char* path) {
  return capi::guarded([&]() -> Status {
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    if (path == nullptr) return capi::invalid("the path of the key means is null");
    return capi::load_shift(runtime->state.get(), path);
  });
}

const char* bd_runtime_recipe_value(const bd_runtime* runtime, const char* key) {
  if (runtime == nullptr || key == nullptr) return nullptr;
  const std::lock_guard<std::mutex> lock(runtime->state->mutex);
  const auto found = runtime->state->recipe_values.find(std::string_view(key));
  return found == runtime->state->recipe_values.end() ? nullptr : found->second.c_str();
}

bd_status bd_page_info_get(const bd_runtime* runtime, int32_t head_dim, int32_t page_size,
                           int32_t max_requests, bd_page_info* info) {
  return capi::guarded([&]() -> Status {
    if (Status s = capi::check_struct(info, "bd_page_info"); !s.ok()) return s;
    if (runtime == nullptr) return capi::invalid("the runtime is null");
    return capi::page_info(*runtime->state, head_dim, page_size, max_requests, info);
  });
}
