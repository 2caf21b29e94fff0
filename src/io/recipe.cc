// SPDX-License-Identifier: Apache-2.0
// Parsing, checking and printing recipes.
#include "bitdecoding/recipe.h"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <new>
#include <nlohmann/json.hpp>

#include "io/file.h"
#include "io/recipe_fields.h"
#include "io/suggest.h"

namespace bitdecoding {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxRecipeBytes = std::size_t{1} << 20;
// A recipe is one flat object; anything deeper is a mistake, found before it is built.
constexpr int kMaxDepth = 2;
constexpr std::size_t kShownBytes = 60;

Status invalid(std::string_view origin, std::string_view message) {
  return {StatusCode::kInvalidArgument, fmt::format("{}: {}", origin, message)};
}

std::vector<std::string> known_keys() {
  std::vector<std::string> keys = {"mode"};
  for (const RecipeField& field : recipe_fields()) keys.emplace_back(field.name);
  return keys;
}

// Values come from the user; an error quotes them, but never at length.
std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kShownBytes) {
    std::size_t end = kShownBytes;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;
    text = text.substr(0, end) + "...";
  }
  return text;
}

// nlohmann's parser keeps the last of two equal keys; a recipe that names one twice is refused.
Result<Json> parse_object(std::string_view text, std::string_view origin) {
  if (text.size() > kMaxRecipeBytes) {
    return invalid(origin, fmt::format("the recipe is {} bytes long; the most that is read is {}",
                                       text.size(), kMaxRecipeBytes));
  }
  std::vector<std::string> keys;
  std::string twice;
  bool deep = false;
  const auto observe = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth >= kMaxDepth && event != Json::parse_event_t::value) deep = true;
    if (event == Json::parse_event_t::key && depth == 1 && !deep) {
      const auto& key = parsed.get_ref<const std::string&>();
      for (const std::string& seen : keys) {
        if (seen == key && twice.empty()) twice = key;
      }
      if (keys.size() < 64) keys.push_back(key);
    }
    return depth < kMaxDepth;  // false drops the value, so that nesting costs no memory
  };
  // The parser takes a zero byte for the end of the text and would not see what follows it.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    return invalid(origin, fmt::format("the recipe is not valid JSON (byte {} is zero); expected "
                                       "an object such as {{\"mode\": \"bitdecoding-nvfp4\"}}",
                                       zero));
  }
  Json json = Json::parse(text.begin(), text.end(), observe, /*allow_exceptions=*/false);
  if (json.is_discarded() && !deep) {
    const std::size_t at = text.find_first_not_of(" \t\r\n");
    const char* hint = at == std::string_view::npos ? "it is empty"
                       : text[at] != '{'            ? "it does not begin with '{'"
                                                    : "check commas, quotes and braces";
    return invalid(origin, fmt::format("the recipe is not valid JSON ({}); expected an object such "
                                       "as {{\"mode\": \"bitdecoding-nvfp4\"}}",
                                       hint));
  }
  if (!json.is_object()) {
    return invalid(origin,
                   "the recipe must be a JSON object such as {\"mode\": \"bitdecoding-nvfp4\"}");
  }
  if (!twice.empty()) {
    return invalid(origin,
                   fmt::format("the recipe names the key {} twice; keep one", shown(twice)));
  }
  return json;
}

Result<Recipe> start_from_mode(const Json& json, std::string_view origin) {
  const auto mode = json.find("mode");
  if (mode == json.end()) return Recipe{};
  if (!mode->is_string()) {
    return invalid(origin, fmt::format("the value {} of 'mode' is not accepted; expected {}",
                                       shown(*mode), join_or(mode_names())));
  }
  Result<Recipe> recipe = mode_recipe(mode->get_ref<const std::string&>());
  if (recipe.ok()) return recipe;
  return Status(recipe.status().code(), fmt::format("{}: {}", origin, recipe.status().message()));
}

Status apply(const std::string& key, const Json& value, std::string_view origin, Recipe* recipe) {
  if (key == "mode") return {};
  for (const RecipeField& field : recipe_fields()) {
    if (key != field.name) continue;
    if (field.set(value, recipe)) return {};
    return invalid(origin, fmt::format("the value {} of '{}' is not accepted; expected {}",
                                       shown(value), key, field.accepts));
  }
  const std::vector<std::string> known = known_keys();
  const std::string hint = did_you_mean(key, known);
  return invalid(origin, fmt::format("unknown recipe key {}{}", shown(Json(key)),
                                     hint.empty() ? "; expected " + join_or(known) : hint));
}

Result<Recipe> parse_checked(std::string_view json_text, std::string_view origin) {
  Result<Json> json = parse_object(json_text, origin);
  if (!json.ok()) return json.status();
  Result<Recipe> recipe = start_from_mode(json.value(), origin);
  if (!recipe.ok()) return recipe;
  for (const auto& [key, value] : json.value().items()) {
    if (Status status = apply(key, value, origin, &recipe.value()); !status.ok()) return status;
  }
  return recipe;
}

Status with_origin(const Status& status, std::string_view origin) {
  if (status.ok()) return status;
  return {status.code(), fmt::format("{}: {}", origin, status.message())};
}

std::string beside(const std::string& recipe_path, const std::string& path) {
  const std::filesystem::path file(path);
  if (path.empty() || file.is_absolute()) return path;
  return (std::filesystem::path(recipe_path).parent_path() / file).lexically_normal().string();
}

}  // namespace

Result<Recipe> parse_recipe(std::string_view json, std::string_view origin) {
  try {
    Result<Recipe> recipe = parse_checked(json, origin);
    if (!recipe.ok()) return recipe;
    if (Status s = with_origin(validate_recipe(recipe.value()), origin); !s.ok()) return s;
    return recipe;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("{}: out of memory while reading the recipe", origin));
  }
}

Result<Recipe> read_recipe(const std::string& path) {
  try {
    Result<std::string> text = read_file(path, static_cast<std::int64_t>(kMaxRecipeBytes));
    if (!text.ok()) {
      return Status(text.status().code(), "the recipe: " + text.status().message());
    }
    Result<Recipe> recipe = parse_checked(text.value(), path);
    if (!recipe.ok()) return recipe;
    recipe.value().key_shift_file = beside(path, recipe.value().key_shift_file);
    recipe.value().outer_scale_file = beside(path, recipe.value().outer_scale_file);
    recipe.value().calibrate_file = beside(path, recipe.value().calibrate_file);
    return recipe;
  } catch (const std::bad_alloc&) {
    return Status(StatusCode::kResourceExhausted,
                  fmt::format("{}: out of memory while reading the recipe", path));
  }
}

Result<Recipe> load_recipe(const std::string& path) {
  Result<Recipe> recipe = read_recipe(path);
  if (!recipe.ok()) return recipe;
  if (Status s = with_origin(validate_recipe(recipe.value()), path); !s.ok()) return s;
  return recipe;
}

std::string recipe_to_json(const Recipe& recipe, int indent) {
  nlohmann::ordered_json json;
  json["mode"] = recipe.mode;
  for (const RecipeField& field : recipe_fields()) json[field.name] = field.get(recipe);
  return json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string explain_recipe(const Recipe& recipe) {
  std::string text = fmt::format("{:<18} {:<20} the preset it starts from; {}\n", "mode",
                                 recipe.mode, join_or(mode_names()));
  for (const RecipeField& field : recipe_fields()) {
    const Json json = field.get(recipe);
    std::string value = json.is_string() ? json.get<std::string>() : json.dump();
    if (value.empty()) value = "(none)";
    text += fmt::format("{:<18} {:<20} {}; {}\n", field.name, value, field.does, field.accepts);
  }
  return text;
}

}  // namespace bitdecoding
