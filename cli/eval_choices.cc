// SPDX-License-Identifier: Apache-2.0
// Modes, benchmarks and data that were asked for, and what they lack.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "bitdecoding/recipe.h"
#include "eval.h"
#include "io/file.h"
#include "io/suggest.h"
#include "output.h"

namespace bitdecoding::cli {

namespace fs = std::filesystem;

Result<std::string> mode_support(const std::string& mode) {
  const Result<Recipe> recipe = mode_recipe(mode);
  if (!recipe.ok()) return recipe.status();
  // vLLM's own formats in the library's pages: the values are theirs, the code is not.
  return std::string(mode == "fp8" || mode == "nvfp4" ? "simulated" : "native");
}

Result<std::vector<std::string>> chosen_modes(const std::vector<std::string>& asked) {
  std::vector<std::string> out;
  for (const std::string& name : mode_names()) {
    const bool all = std::count(asked.begin(), asked.end(), "all") > 0;
    const bool named = std::count(asked.begin(), asked.end(), name) > 0;
    if (!all && !named) continue;
    const Result<std::string> support = mode_support(name);
    if (support.ok()) out.push_back(name);
    if (!support.ok() && named) return support.status();
    if (!support.ok()) print_note("Left out of all modes: " + support.status().message() + ".");
  }
  for (const std::string& name : asked) {
    if (name != "all" && std::count(mode_names().begin(), mode_names().end(), name) == 0) {
      return mode_recipe(name).status();
    }
  }
  return out;
}

Result<std::vector<const eval::Benchmark*>> chosen_benchmarks(
    const std::vector<std::string>& asked) {
  std::vector<const eval::Benchmark*> out;
  for (const std::string& name : asked) {
    if (name == "all") {
      out.clear();
      for (const auto& benchmark : eval::all_benchmarks()) out.push_back(benchmark.get());
      return out;
    }
    const Result<const eval::Benchmark*> found = eval::find_benchmark(name);
    if (!found.ok()) {
      std::vector<std::string> known;
      for (const auto& b : eval::all_benchmarks()) known.emplace_back(b->name());
      return Status(found.status().code(),
                    fmt::format("unknown benchmark '{}'; expected {}{}", name, join_or(known),
                                did_you_mean(name, known)));
    }
    if (std::count(out.begin(), out.end(), found.value()) == 0) out.push_back(found.value());
  }
  return out;
}

eval::LoadOptions load_options(const EvalOptions& options) {
  eval::LoadOptions load;
  std::error_code error;
  load.data_folder = fs::absolute(options.data, error).lexically_normal().string();
  load.compat = options.compat;
  load.embedding_endpoint = options.embedding_endpoint;
  load.python = options.engine.python;
  load.model.thinking = options.thinking;
  load.model.window = options.window;
  const Result<std::string> config = read_file(options.engine.model + "/config.json", 16 << 20);
  load.model.family = eval::family_of(config.ok() ? config.value() : "", options.engine.model);
  return load;
}

std::vector<eval::MissingItem> missing_items(
    const EvalOptions& options, const std::vector<const eval::Benchmark*>& benchmarks) {
  std::vector<eval::MissingItem> out;
  std::error_code error;
  const std::string& model = options.engine.model;
  if (options.endpoint.empty() && !fs::exists(model + "/config.json", error)) {
    out.push_back({fmt::format("model '{}'", model),
                   "Expected a folder with config.json and weights in Hugging Face's layout.", ""});
  }
  for (eval::MissingItem& item : eval::missing_for(benchmarks, load_options(options))) {
    out.push_back(std::move(item));
  }
  return out;
}

std::string missing_text(const std::vector<eval::MissingItem>& items) {
  std::string out;
  for (const eval::MissingItem& item : items) {
    out += fmt::format("- {}\n  {}\n", item.what, item.how);
    if (!item.licence.empty()) out += fmt::format("  Licence: {}\n", item.licence);
  }
  return out;
}

}  // namespace bitdecoding::cli
