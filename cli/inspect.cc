// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bitdecoding/page.h"
#include "bitdecoding/recipe.h"
#include "commands.h"
#include "io/file.h"
#include "io/key_shift.h"
#include "io/outer_scale.h"
#include "io/safetensors.h"
#include "output.h"
#include "page_stats.h"

namespace bitdecoding::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMaxPageFile = std::int64_t{256} << 20;

struct Options {
  std::string what;
  int head_dim = 128;
  int page_size = 128;
  bool json = false;
};

// What is found goes out as words or as one JSON object.
struct Report {
  Json json;
  std::string words;
};

int show(const Result<Report>& report, bool json) {
  if (!report.ok()) return fail(report.status());
  if (json) {
    print(report.value().json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
  } else {
    print(report.value().words);
  }
  return kExitOk;
}

const char* meaning(Format format) {
  switch (format) {
    case Format::kBf16:
      return "rows of BF16";
    case Format::kFp8E4m3:
      return "rows of E4M3 with unit scales";
    case Format::kNvfp4Rows:
      return "E2M1 codes with an E4M3 scale for 16 values, K and V both along head_dim";
    case Format::kNvfp4:
      return "E2M1 codes with an E4M3 scale for 16 values, K along head_dim and V along tokens";
    case Format::kMxfp4:
      return "E2M1 codes with a power-of-two scale for 32 values, K along head_dim and V along "
             "tokens";
  }
  return "unknown";
}

// Who keeps pages in an order.
const char* user_of(FragmentOrder order) {
  switch (order) {
    case FragmentOrder::kFp4Mma:
      return "page files";
    case FragmentOrder::kQuad:
      return "the CPU backend";
    case FragmentOrder::kFp16Mma:
      return "the CUDA backend";
  }
  return "nobody";
}

void add_orders(Format format, Report* report) {
  if (!is_tiled(format)) return;
  report->json["orders"] = Json::object();
  std::string words;
  for (const FragmentOrder order :
       {FragmentOrder::kFp4Mma, FragmentOrder::kQuad, FragmentOrder::kFp16Mma}) {
    const std::string name(fragment_order_name(order));
    report->json["orders"][name] = user_of(order);
    words += fmt::format("{}{} ({})", words.empty() ? "" : ", ", name, user_of(order));
  }
  report->words += "Orders inside a tile: " + words + ".\n";
}

Result<Report> inspect_format(Format format, const Options& options) {
  const Result<PageGeometry> made =
      PageGeometry::make(format, FragmentOrder::kFp4Mma, options.head_dim, options.page_size);
  if (!made.ok()) return made.status();
  const PageGeometry& g = made.value();
  const double bf16_bytes = 4.0 * options.head_dim;
  Report report;
  report.json = {{"kind", "format"},
                 {"format", format_name(format)},
                 {"head_dim", g.head_dim},
                 {"page_size", g.page_size},
                 {"tile_bytes", g.tile_bytes},
                 {"head_bytes", g.head_bytes},
                 {"bytes_per_token", g.bytes_per_token},
                 {"bits_per_element", g.bytes_per_token * 8 / (2.0 * g.head_dim)},
                 {"smaller_than_bf16", bf16_bytes / g.bytes_per_token},
                 {"group_tokens", g.group_tokens}};
  report.words = fmt::format(
      "Page format {}: {}.\nhead_dim {}, pages of {} tokens: a tile of 64 tokens has {} bytes, one "
      "KV head of a page {} bytes.\n{:.4g} bytes a token and head ({:.3g} bits an element), {:.3g} "
      "times smaller than BF16.\n",
      format_name(format), meaning(format), g.head_dim, g.page_size, g.tile_bytes, g.head_bytes,
      g.bytes_per_token, g.bytes_per_token * 8 / (2.0 * g.head_dim),
      bf16_bytes / g.bytes_per_token);
  add_orders(format, &report);
  return report;
}

Result<Report> inspect_page(const std::string& bytes) {
  const std::span<const std::uint8_t> span(reinterpret_cast<const std::uint8_t*>(bytes.data()),
                                           bytes.size());
  const Result<FormatTag> read = read_format_tag(span);
  if (!read.ok()) return read.status();
  const FormatTag& tag = read.value();
  const Result<PageGeometry> geometry =
      PageGeometry::make(tag.format, FragmentOrder::kFp4Mma, tag.head_dim, tag.page_size);
  if (!geometry.ok()) return geometry.status();
  const PageGeometry& g = geometry.value();
  // The tag's heads must be there before memory is taken for them.
  if (tag.payload_bytes != static_cast<std::uint64_t>(g.head_bytes) * tag.num_kv_heads ||
      tag.payload_bytes > bytes.size()) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("the tag claims {} bytes for {} heads of {} bytes, and the file has "
                              "{}; it is truncated or corrupt",
                              tag.payload_bytes, tag.num_kv_heads, g.head_bytes, bytes.size()));
  }
  std::vector<std::vector<std::uint8_t>> heads(tag.num_kv_heads);
  std::vector<std::uint8_t*> pointers;
  for (auto& head : heads) {
    head.resize(static_cast<std::size_t>(g.head_bytes));
    pointers.push_back(head.data());
  }
  if (Status s = import_page(g, span, pointers, tag.first_kv_head); !s.ok()) return s;
  Report report;
  report.json = {{"kind", "page"},
                 {"version", tag.version},
                 {"format", format_name(tag.format)},
                 {"order", fragment_order_name(tag.order)},
                 {"head_dim", tag.head_dim},
                 {"page_size", tag.page_size},
                 {"first_kv_head", tag.first_kv_head},
                 {"heads", Json::array()}};
  report.words = fmt::format(
      "A page of format {} (version {}, order {}): {}.\n{} tokens, head_dim {}, {} KV heads from "
      "head {} on, {} bytes each.\n",
      format_name(tag.format), tag.version, fragment_order_name(tag.order), meaning(tag.format),
      tag.page_size, tag.head_dim, tag.num_kv_heads, tag.first_kv_head, g.head_bytes);
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const SideStats key = page_stats(g, heads[h], 0);
    const SideStats value = page_stats(g, heads[h], 1);
    report.json["heads"].push_back({{"key", to_json(key)}, {"value", to_json(value)}});
    report.words += fmt::format("Head {}: K has {}.\n{:9}V has {}.\n", tag.first_kv_head + h,
                                in_words(key, tag.format), "", in_words(value, tag.format));
  }
  return report;
}

Result<Report> inspect_key_shift(const std::string& path) {
  Result<KeyShift> loaded = load_key_shift(path);
  if (!loaded.ok()) return loaded.status();
  const KeyShift& s = loaded.value();
  Report report;
  report.json = {{"kind", "key_shift"},
                 {"layers", s.num_layers},
                 {"heads", s.num_kv_heads},
                 {"head_dim", s.head_dim},
                 {"value_means", !s.value_means.empty()},
                 {"metadata", s.metadata},
                 {"warnings", s.warnings},
                 {"largest_by_layer", Json::array()}};
  report.words = fmt::format("{} means of {} layers, {} KV heads, head_dim {}.\n",
                             s.value_means.empty() ? "Key" : "Key and value", s.num_layers,
                             s.num_kv_heads, s.head_dim);
  for (const auto& [key, value] : s.metadata) report.words += fmt::format("{}: {}\n", key, value);
  for (const std::string& warning : s.warnings) report.words += "Warning: " + warning + ".\n";
  report.words += "Largest mean of each layer:";
  for (int layer = 0; layer < s.num_layers; ++layer) {
    float largest = 0;
    for (const float v : s.slice(layer, 0, s.num_kv_heads)) {
      if (std::abs(v) > std::abs(largest)) largest = v;
    }
    report.json["largest_by_layer"].push_back(largest);
    report.words += fmt::format("{}{:.3g}", layer % 10 == 0 ? "\n  " : " ", largest);
  }
  report.words += "\n";
  return report;
}

void add_outer_side(const char* name, const std::vector<std::int8_t>& side, Report* report) {
  Json& json = report->json["outer_scales"][name];
  if (side.empty()) {
    json = nullptr;
    report->words += fmt::format("{}: none (2^0).\n", name);
    return;
  }
  const auto [least, greatest] = std::minmax_element(side.begin(), side.end());
  json = {{"least", *least}, {"greatest", *greatest}};
  report->words += fmt::format("{}: 2^{} to 2^{}.\n", name, *least, *greatest);
}

Status add_outer_scales(const std::string& path, Report* report) {
  const Result<OuterScales> loaded = load_outer_scales(path);
  if (!loaded.ok()) return loaded.status();
  const OuterScales& scales = loaded.value();
  report->json["outer_scales"] = {{"layers", scales.num_layers}, {"heads", scales.num_kv_heads}};
  report->words += fmt::format("Outer scales of {} layers, {} KV heads.\n", scales.num_layers,
                               scales.num_kv_heads);
  add_outer_side("key", scales.key, report);
  add_outer_side("value", scales.value, report);
  return {};
}

// Key means, outer scales or both: what a recipe can name.
Result<Report> inspect_sidecar(const std::string& path, bool key_shift, bool outer_scales) {
  Report report;
  report.json = {{"kind", "outer_scales"}};
  if (key_shift) {
    Result<Report> means = inspect_key_shift(path);
    if (!means.ok()) return means;
    report = means.take();
  }
  if (outer_scales) {
    if (Status s = add_outer_scales(path, &report); !s.ok()) return s;
  }
  return report;
}

Result<Report> inspect_safetensors(const std::string& path) {
  Result<std::unique_ptr<ByteSource>> source = open_byte_source(path);
  if (!source.ok()) return source.status();
  const Result<SafetensorsIndex> index = read_safetensors_index(*source.value());
  if (!index.ok()) return index.status();
  const bool key_shift = index.value().find("key_shift") != nullptr;
  const bool outer_scales =
      index.value().find("key_outer") != nullptr || index.value().find("value_outer") != nullptr;
  if (key_shift || outer_scales) return inspect_sidecar(path, key_shift, outer_scales);
  Report report;
  report.json = {{"kind", "safetensors"}, {"tensors", Json::array()}};
  report.words =
      fmt::format("A safetensors file with {} tensors, without key means and outer scales.\n",
                  index.value().tensors.size());
  for (const SafetensorsEntry& entry : index.value().tensors) {
    report.json["tensors"].push_back(
        {{"name", entry.name}, {"dtype", entry.dtype}, {"shape", entry.shape}});
    report.words += fmt::format("  {} {} {} bytes at byte {}\n", entry.name, entry.dtype,
                                entry.bytes, entry.offset);
  }
  return report;
}

Result<Report> inspect_recipe(const Recipe& recipe) {
  Report report;
  report.json = {{"kind", "recipe"}, {"recipe", Json::parse(recipe_to_json(recipe))}};
  report.words = explain_recipe(recipe);
  return report;
}

Result<Report> inspect_file(const std::string& path) {
  // What is inspected is opened more than once; a device or a pipe may never end, too.
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("'{}' is no regular file but a folder, a device or a pipe; give a "
                              "page file, a sidecar or a recipe",
                              path));
  }
  // A sidecar may be large and is read in parts; the others are read whole.
  const std::string extension = std::filesystem::path(path).extension().string();
  if (extension == ".safetensors") return inspect_safetensors(path);
  const Result<std::string> bytes = read_file(path, kMaxPageFile);
  if (!bytes.ok()) return bytes.status();
  if (bytes.value().compare(0, 4, "BD4P") == 0) return inspect_page(bytes.value());
  const std::size_t first = bytes.value().find_first_not_of(" \t\r\n");
  if (first != std::string::npos && bytes.value()[first] == '{') {
    const Result<Recipe> recipe = load_recipe(path);
    if (!recipe.ok()) return recipe.status();
    return inspect_recipe(recipe.value());
  }
  Result<Report> sidecar = inspect_safetensors(path);
  if (sidecar.ok()) return sidecar;
  return Status(
      sidecar.status().code(),
      fmt::format("'{}' is no page file (it does not begin with BD4P) and no recipe (it does "
                  "not begin with '{{'); read as a sidecar: {}",
                  path, sidecar.status().message()));
}

int run(const Options& options) {
  std::error_code ignored;
  if (!std::filesystem::exists(options.what, ignored)) {
    const Result<Format> format = parse_format(options.what);
    if (format.ok()) return show(inspect_format(format.value(), options), options.json);
    const Result<Recipe> recipe = mode_recipe(options.what);
    if (recipe.ok()) return show(inspect_recipe(recipe.value()), options.json);
    return fail({StatusCode::kNotFound,
                 fmt::format("'{}' is no file, no page format (bf16, fp8_e4m3, nvfp4_rows, nvfp4, "
                             "mxfp4) and no mode",
                             options.what)});
  }
  return show(inspect_file(options.what), options.json);
}

}  // namespace

void add_inspect(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "inspect", "Say in words what a page file, a sidecar, a recipe or a page format holds");
  auto options = std::make_shared<Options>();
  command->add_option("WHAT", options->what, "A file, the name of a page format, or a mode")
      ->required();
  command->add_option("--head-dim", options->head_dim, "For a format: 64, 96, 128, 192 or 256")
      ->capture_default_str();
  command->add_option("--page-size", options->page_size, "For a format: tokens of a page")
      ->capture_default_str();
  command->add_flag("--json", options->json, "Print one JSON object");
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace bitdecoding::cli
