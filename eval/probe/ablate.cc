// SPDX-License-Identifier: Apache-2.0
#include "probe/ablate.h"

#include <fmt/format.h>

#include "bitdecoding/recipe.h"

namespace bitdecoding::eval {
namespace {

AblationRow row(const char* group, const char* name, const Json& recipe) {
  AblationRow out;
  out.group = group;
  out.name = name;
  out.recipe = recipe.dump();
  return out;
}

double number(const Json& json, const char* key) {
  return json.is_object() ? json.value(key, 0.0) : 0.0;
}

// Pages, and the BF16 rows of one sequence that lie beside them.
void add_costs(std::size_t tokens, AblationRow* row) {
  const Json& probe = row->result.probe;
  const Json layers = probe.is_object() ? probe.value("layers", Json::array()) : Json::array();
  for (const Json& layer : layers) row->bits += number(layer, "bits");
  if (!layers.empty()) row->bits /= static_cast<double>(layers.size());
  row->bits_bf16 = row->bits;
  const Result<Recipe> recipe = parse_recipe(row->recipe, "ablation");
  if (recipe.ok() && is_tiled(recipe.value().format)) {
    const double bf16 = recipe.value().sink_tokens + recipe.value().tail_tokens;
    row->bits_bf16 += 16.0 * bf16 / static_cast<double>(tokens);
  }
  const double rows = number(probe, "written_rows");
  if (rows > 0) row->write_ns = 1e9 * number(probe, "write_seconds") / rows;
}

}  // namespace

std::vector<AblationRow> ablation_rows(const std::string& key_shift_file, bool fp4) {
  const Json full = {{"mode", "bitdecoding-nvfp4"}, {"key_shift_file", key_shift_file}};
  const auto with = [&](const Json& changes) {
    Json recipe = full;
    recipe.update(changes);
    return recipe;
  };
  const Json nothing = {{"sink_tokens", 0},    {"tail_tokens", 0},   {"hadamard", false},
                        {"key_rule", "amax6"}, {"key_shift", false}, {"value_shift", false}};
  std::vector<AblationRow> rows = {
      row("neighbours", "fp8", {{"mode", "fp8"}}),
      row("neighbours", "nvfp4 (vLLM's values)", {{"mode", "nvfp4"}}),
      row("off", "the whole recipe", full),
      row("off", "without BF16 sink", with({{"sink_tokens", 0}})),
      row("off", "without BF16 tail", with({{"tail_tokens", 0}})),
      row("off", "without key means", with({{"key_shift", false}})),
      row("off", "without value means", with({{"value_shift", false}})),
      row("off", "without Hadamard", with({{"hadamard", false}})),
      row("off", "keys amax6, not four_six", with({{"key_rule", "amax6"}})),
      row("off", "all of these off", with(nothing)),
      row("beyond", "keys code_search", with({{"key_rule", "code_search"}})),
      row("beyond", "values four_six", with({{"value_rule", "four_six"}})),
      row("beyond", "values code_search", with({{"value_rule", "code_search"}})),
      row("beyond", "both code_search",
          with({{"key_rule", "code_search"}, {"value_rule", "code_search"}})),
      row("beyond", "keys code_search, tail 128",
          with({{"key_rule", "code_search"}, {"tail_tokens", 128}})),
      row("beyond", "sink 4", with({{"sink_tokens", 4}})),
      row("beyond", "sink 64", with({{"sink_tokens", 64}})),
      row("beyond", "tail 16", with({{"tail_tokens", 16}})),
      row("beyond", "tail 128", with({{"tail_tokens", 128}})),
      row("beyond", "wide arithmetic", with({{"arithmetic", "wide"}}))};
  if (!fp4) return rows;
  const auto native = [&](const Json& changes) {
    Json recipe = with({{"arithmetic", "fp4"}});
    recipe.update(changes);
    return recipe;
  };
  for (const auto& [name, changes] : std::vector<std::pair<const char*, Json>>{
           {"fp4 arithmetic: the whole recipe", Json::object()},
           {"fp4: one-term query", {{"query_terms", 1}}},
           {"fp4: amax6, no tau", {{"probability_tau", 0}}},
           {"fp4: tau as calibrated", {{"probability_tau", "calibrate"}}},
           {"fp4: c 1, tau as calibrated",
            {{"probability_c", 1}, {"probability_tau", "calibrate"}}},
           {"fp4: c 1, no tau", {{"probability_c", 1}, {"probability_tau", 0}}},
           {"fp4: c 1536, no tau", {{"probability_c", 1536}, {"probability_tau", 0}}}}) {
    rows.push_back(row("fp4", name, native(changes)));
  }
  return rows;
}

Result<std::vector<AblationRow>> run_ablation(ProbeEngine* engine, std::vector<AblationRow> rows,
                                              Progress* progress) {
  for (AblationRow& row : rows) {
    progress->begin(row.name);
    Result<ProbeResult> result = engine->measure(row.recipe, "all");
    if (!result.ok()) return result.status();
    row.result = result.take();
    add_costs(engine->tokens(), &row);
    progress->done(fmt::format("KL {:.5f}, top-1 {:.1f} %", row.result.divergence.mean,
                               100 * row.result.divergence.top1_agreement));
  }
  return rows;
}

Table ablation_table(const std::vector<AblationRow>& rows) {
  Table table;
  table.header = {"recipe", "KL, nats", "p99", "top-1", "bits", "with BF16", "write, ns"};
  for (const AblationRow& row : rows) {
    const Divergence& d = row.result.divergence;
    table.rows.push_back({row.name, fmt::format("{:.5f}", d.mean), fmt::format("{:.4f}", d.p99),
                          fmt::format("{:.1f} %", 100 * d.top1_agreement),
                          fmt::format("{:.2f}", row.bits), fmt::format("{:.2f}", row.bits_bf16),
                          fmt::format("{:.0f}", row.write_ns)});
  }
  return table;
}

Json ablation_json(const std::vector<AblationRow>& rows, const ProbeEngine& engine) {
  Json out = {{"tokens", engine.tokens()}, {"first_scored", engine.first_scored()}};
  for (const AblationRow& row : rows) {
    const Divergence& d = row.result.divergence;
    out["rows"].push_back({{"name", row.name},
                           {"group", row.group},
                           {"recipe", Json::parse(row.recipe)},
                           {"kl", d.mean},
                           {"kl_median", d.median},
                           {"kl_p99", d.p99},
                           {"kl_max", d.max},
                           {"top1_agreement", d.top1_agreement},
                           {"bits", row.bits},
                           {"bits_with_bf16", row.bits_bf16},
                           {"write_ns_token_head", row.write_ns},
                           {"probe", row.result.probe}});
  }
  return out;
}

}  // namespace bitdecoding::eval
