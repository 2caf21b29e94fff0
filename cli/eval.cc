// SPDX-License-Identifier: Apache-2.0
// eval: benchmarks asked of one engine a KV mode, one row after the other, resumable.
#include "eval.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>

#include "bitdecoding/bitdecoding.h"
#include "commands.h"
#include "engine/folder_lock.h"
#include "engine/process.h"
#include "io/calibration_identity.h"
#include "io/file.h"
#include "output.h"
#include "report/json_lines.h"
#include "report/machine.h"
#include "report/progress.h"
#include "report/results_log.h"
#include "report/table.h"
#include "run/local_host.h"
#include "run/mode_run.h"

namespace bitdecoding::cli {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

constexpr std::size_t kProtocolChunk = 40960;

struct Mode {
  std::string name, support;
  std::unique_ptr<eval::EngineHost> host;
  Json recipe;         // as served; null where vLLM's own cache is
  std::string engine;  // its identity, for the rows' keys
};

// The recipe as it is served, with the bytes of its key means instead of their path.
Json served_recipe(const eval::Command& command) {
  const auto at = command.environment.find("BITDECODING_RECIPE");
  if (at == command.environment.end()) return nullptr;
  Json recipe = Json::parse(at->second, nullptr, false);
  if (!recipe.is_object()) return at->second;
  const std::string sidecar = recipe.value("key_shift_file", "");
  const Result<std::string> bytes = read_file(sidecar, std::int64_t{1} << 30);
  recipe["key_shift_file"] = bytes.ok() ? eval::stable_hash(bytes.value()) : "";
  return recipe;
}

Result<Mode> make_mode(const EvalOptions& options, const std::string& name,
                       const eval::ServeSettings& serve, eval::Progress* progress) {
  Mode mode;
  mode.name = name;
  if (!options.endpoint.empty()) {
    const Result<eval::Endpoint> endpoint = eval::parse_endpoint(options.endpoint);
    if (!endpoint.ok()) return endpoint.status();
    mode.support = "as served";
    mode.host = std::make_unique<eval::RemoteHost>(endpoint.value());
    mode.engine = Json{options.engine.model, name, options.endpoint}.dump();
    return mode;
  }
  const Result<std::string> support = mode_support(name);
  if (!support.ok()) return support.status();
  mode.support = support.value();
  eval::LocalHost::Options host;
  host.serve = serve;
  host.mode = name;
  host.log_folder = options.out + "/logs";
  host.start_timeout = std::chrono::seconds(options.engine.start_timeout);
  host.progress = [progress](double, const std::string& line) { progress->update(line); };
  auto local = std::make_unique<eval::LocalHost>(std::move(host));
  const Result<eval::Command> command = local->command();
  if (!command.ok()) return command.status();
  const Result<Identity> model = model_identity(serve.model);
  if (!model.ok()) return model.status();
  mode.recipe = served_recipe(command.value());
  mode.engine = Json{model.value(), name, serve.dtype, serve.chunk_tokens, mode.recipe}.dump();
  mode.host = std::move(local);
  return mode;
}

Result<eval::ServeSettings> serve_settings(EvalOptions* options) {
  eval::ServeSettings serve;
  if (!options->endpoint.empty()) return serve;
  if (Status s = complete(options->engine, &serve.program, &serve.python, &serve.model,
                          &serve.dtype, &serve.threads);
      !s.ok()) {
    return s;
  }
  options->engine.model = serve.model;
  serve.cache_bytes = options->cache_mib << 20;
  serve.max_model_len = options->window;
  serve.max_requests = options->max_num_seqs;
  serve.chunk_tokens =
      options->chunk_tokens > 0 ? options->chunk_tokens : std::max(kProtocolChunk, options->window);
  options->chunk_tokens = serve.chunk_tokens;
  return serve;
}

std::string progress_words(const eval::ModeProgress& p) {
  const std::size_t fresh = p.done - p.reused;
  std::string left = "?";
  if (fresh > 0) {
    left = fmt::format(
        "{:.0f} s", p.seconds / static_cast<double>(fresh) * static_cast<double>(p.total - p.done));
  }
  return fmt::format("{}/{} rows, {:.0f} tokens/s in, {:.1f} out, {} left {}", p.done, p.total,
                     p.seconds > 0 ? static_cast<double>(p.tokens_in) / p.seconds : 0.0,
                     p.seconds > 0 ? static_cast<double>(p.tokens_out) / p.seconds : 0.0, left,
                     p.benchmark);
}

std::string result_words(const eval::ModeProgress& p) {
  std::string out = fmt::format("{} of {} rows", p.done, p.total);
  if (p.reused > 0) out += fmt::format(", {} of them from before", p.reused);
  if (p.errors > 0) out += fmt::format(", {} errors", p.errors);
  if (p.skipped > 0) out += fmt::format(", {} longer than the window", p.skipped);
  return out;
}

eval::ModeSettings mode_settings(const EvalOptions& options, const eval::LoadOptions& load,
                                 const Mode& mode) {
  eval::ModeSettings settings;
  settings.mode = mode.name;
  settings.engine = mode.engine;
  settings.folder = options.out;
  settings.load = load;
  settings.most_new_tokens = options.rows.most_new_tokens;
  settings.concurrency = options.max_num_seqs;
  settings.silence = std::chrono::seconds(options.row_timeout);
  return settings;
}

// Score, rows and what went wrong, a line a mode and benchmark.
eval::Table score_table(const EvalOptions& options, const eval::LoadOptions& load,
                        const std::vector<Mode>& modes,
                        const std::vector<eval::PlannedBenchmark>& plan) {
  eval::Table table{{"mode", "", "benchmark", "score", "rows", "errors", "skipped", "unscored",
                     "truncated", "tokens/reply"},
                    {}};
  for (const Mode& mode : modes) {
    for (const eval::PlannedBenchmark& planned : plan) {
      const std::string name(planned.benchmark->name());
      const Result<std::vector<eval::RowRecord>> rows =
          eval::planned_records(mode_settings(options, load, mode), planned);
      if (!rows.ok() || rows.value().empty()) continue;
      std::size_t scored = 0, errors = 0, skipped = 0, missing = 0, truncated = 0, tokens = 0;
      double sum = 0.0;
      for (const eval::RowRecord& row : rows.value()) {
        errors += row.error.empty() ? 0 : 1;
        skipped += row.skipped.empty() ? 0 : 1;
        missing += row.answered() && row.missing ? 1 : 0;
        if (!row.scored()) continue;
        ++scored;
        sum += row.score;
        truncated += row.truncated ? 1 : 0;
        tokens += row.completion_tokens;
      }
      const double n = static_cast<double>(std::max<std::size_t>(scored, 1));
      table.rows.push_back(
          {mode.name, mode.support == "native" ? "" : mode.support, name,
           scored > 0 ? fmt::format("{:.2f}", 100.0 * sum / n) : "-", fmt::format("{}", scored),
           fmt::format("{}", errors), fmt::format("{}", skipped), fmt::format("{}", missing),
           fmt::format("{}", truncated), fmt::format("{:.1f}", static_cast<double>(tokens) / n)});
    }
  }
  return table;
}

// run.json: what was run, on what, and what each engine said that it is.
Status save_run(const EvalOptions& options, const std::vector<eval::PlannedBenchmark>& plan,
                const Json& modes) {
  Json data = Json::object();
  for (const eval::PlannedBenchmark& planned : plan) {
    Json problems = Json::array();
    for (const eval::RowProblem& p : planned.problems) problems.push_back(p.where + ": " + p.what);
    data[std::string(planned.benchmark->name())] = {
        {"rows", planned.rows.size()}, {"files", planned.files}, {"problems", problems}};
  }
  const Json run = {{"version", bd_version()},
                    {"time", eval::utc_now()},
                    {"machine", eval::describe_machine()},
                    {"model", options.engine.model},
                    {"window", options.window},
                    {"max_num_seqs", options.max_num_seqs},
                    {"chunk_tokens", options.chunk_tokens},
                    {"cache_mib", options.cache_mib},
                    {"seed", options.rows.seed},
                    {"repeats", options.rows.repeats},
                    {"greedy", options.rows.greedy},
                    {"most_new_tokens", options.rows.most_new_tokens},
                    {"benchmarks", data},
                    {"modes", modes}};
  return write_file_atomic(options.out + "/run.json",
                           run.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

Status run_mode(const EvalOptions& options, Mode* mode,
                const std::vector<eval::PlannedBenchmark>& plan, const eval::LoadOptions& load,
                eval::Progress* progress, Json* facts) {
  eval::ModeRun run(mode_settings(options, load, *mode), mode->host.get(), &plan);
  if (Status s = run.prepare(); !s.ok()) return s;
  progress->begin(mode->name);
  Status status =
      run.run([&](const eval::ModeProgress& p) { progress->update(progress_words(p)); });
  if (mode->host->running()) {
    *facts = mode->host->facts();
    (*facts)["support"] = mode->support;
    (*facts)["recipe"] = mode->recipe;
  }
  mode->host->down();
  progress->done(result_words(run.progress()));
  return status;
}

Status run_all(EvalOptions options, eval::Progress* progress,
               const std::vector<const eval::Benchmark*>& benchmarks) {
  const Result<eval::ServeSettings> serve = serve_settings(&options);
  if (!serve.ok()) return serve.status();
  const eval::LoadOptions load = load_options(options);
  const Result<std::vector<eval::PlannedBenchmark>> plan =
      eval::plan_rows(benchmarks, load, options.rows);
  if (!plan.ok()) return plan.status();
  const Result<std::string> old = read_file(options.out + "/run.json", 64 << 20);
  const Json before = Json::parse(old.ok() ? old.value() : "", nullptr, false);
  Json facts = before.is_object() ? before.value("modes", Json::object()) : Json::object();
  std::vector<Mode> modes;
  for (const std::string& name : options.modes) {
    Result<Mode> mode = make_mode(options, name, serve.value(), progress);
    if (!mode.ok()) return mode.status();
    modes.push_back(mode.take());
  }
  for (Mode& mode : modes) {
    if (options.rescore) {
      std::size_t rows = 0;
      if (Status s = eval::rescore(options.out, mode.name, plan.value(), load, &rows); !s.ok())
        return s;
      progress->say(fmt::format("{}: {} rows scored anew", mode.name, rows));
      continue;
    }
    Json found;
    Status status = run_mode(options, &mode, plan.value(), load, progress, &found);
    if (found.is_object()) facts[mode.name] = found;
    if (Status s = save_run(options, plan.value(), facts); !s.ok()) return s;
    if (!status.ok()) return status;
    if (eval::interrupted()) break;
  }
  progress->say("\n" + eval::format_table(score_table(options, load, modes, plan.value()),
                                          progress->style()));
  progress->say(
      fmt::format("Scores are means over the rows that have one, times 100. Rows: "
                  "{0}/rows, settings and engines: {0}/run.json",
                  options.out));
  return {};
}

int run(EvalOptions options, bool stage_only) {
  const Result<std::vector<std::string>> modes =
      options.endpoint.empty() ? chosen_modes(options.modes)
                               : Result<std::vector<std::string>>(options.modes);
  if (!modes.ok()) return fail(modes.status());
  options.modes = modes.value();
  const Result<std::vector<const eval::Benchmark*>> benchmarks =
      chosen_benchmarks(options.benchmarks);
  if (!benchmarks.ok()) return fail(benchmarks.status());
  if (!options.endpoint.empty() && options.modes.size() != 1) {
    return fail({StatusCode::kInvalidArgument,
                 "an endpoint serves one mode; name it with --mode, for the records"});
  }
  std::vector<eval::MissingItem> missing = missing_items(options, benchmarks.value());
  const auto optional = std::stable_partition(missing.begin(), missing.end(),
                                              [](const auto& item) { return !item.optional; });
  const std::vector<eval::MissingItem> without(optional, missing.end());
  missing.erase(optional, missing.end());
  if (!without.empty()) {
    print_note("Without these it runs, and the scores that need them are missing:\n" +
               missing_text(without));
  }
  if (!missing.empty()) {
    return fail({StatusCode::kNotFound,
                 fmt::format("this is missing for what was asked:\n{}", missing_text(missing))});
  }
  if (stage_only) {
    print(without.empty() ? "Nothing is missing.\n" : "Nothing else is missing.\n");
    return kExitOk;
  }
  options.out = fs::absolute(options.out).lexically_normal().string();
  eval::watch_signals_gently();
  eval::adopt_orphans();
  eval::Progress progress(STDOUT_FILENO);
  const Result<eval::FolderLock> lock = eval::FolderLock::take(options.out);
  if (!lock.ok()) return fail(lock.status());
  const Status status = run_all(options, &progress, benchmarks.value());
  return ended(status, /*goes_on=*/true);
}

void add_options(CLI::App* command, EvalOptions* o) {
  add_engine_options(command, &o->engine, /*with_recipe=*/false);
  command->add_option("--mode", o->modes, "KV modes, by commas, or all that are served here")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--benchmark", o->benchmarks, "Benchmarks, by commas, or all")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--data", o->data, "Data folder")->capture_default_str();
  command->add_option("--out", o->out, "Folder of the records")->capture_default_str();
  command->add_option("--endpoint", o->endpoint,
                      "An OpenAI-compatible server that runs already, instead of one a mode");
  command->add_option("--rows", o->rows.rows, "Rows of a benchmark, over its groups; 0 = all")
      ->capture_default_str();
  command->add_option("--repeat", o->rows.repeats, "Replies to each row")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--seed", o->rows.seed, "Seed of all rows' seeds")->capture_default_str();
  command
      ->add_option("--max-new-tokens", o->rows.most_new_tokens,
                   "Caps the replies' budgets; 0 = the protocol's")
      ->capture_default_str();
  command->add_flag("--greedy", o->rows.greedy,
                    "Temperature 0 in every benchmark; vLLM 0.32 on CPU ends at a seeded sample");
  command->add_flag("--strict", o->rows.strict, "A row that cannot be read ends the run");
  command->add_option("--window", o->window, "Tokens of prompt and reply together")
      ->check(CLI::Range(256, 1 << 22))
      ->capture_default_str();
  command->add_option("--max-num-seqs", o->max_num_seqs, "Rows that run at once")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--chunk-tokens", o->chunk_tokens,
                      "Tokens of a prefill chunk; 0 = the larger of 40,960 and the window");
  command->add_option("--cache-mib", o->cache_mib, "Memory of each engine's KV cache")
      ->check(CLI::Range(64, 1 << 22))
      ->capture_default_str();
  command->add_option("--row-timeout", o->row_timeout, "Seconds a server may be silent")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
  command->add_option("--compat", o->compat, "Another public scorer's rules: simple-evals")
      ->check(CLI::IsMember({"simple-evals"}));
  command->add_option("--embedding-endpoint", o->embedding_endpoint,
                      "Server of an embedding model, for LongBench-Pro's summaries");
  command->add_flag("--thinking", o->thinking, "The model thinks before it answers");
}

}  // namespace

void add_eval(CLI::App& app, int* exit_code) {
  CLI::App* command = app.add_subcommand(
      "eval", "Benchmarks of a model in each KV mode: run (resumable), stage, generate");
  command->require_subcommand(1);
  const auto add = [&](const char* name, const char* words, bool stage_only) {
    auto options = std::make_shared<EvalOptions>();
    CLI::App* sub = command->add_subcommand(name, words);
    add_options(sub, options.get());
    if (!stage_only) {
      sub->add_flag("--rescore", options->rescore, "Score the recorded replies anew, no engine");
    }
    sub->callback([options, stage_only, exit_code] { *exit_code = run(*options, stage_only); });
  };
  add("run", "Ask and score the rows that are not recorded yet", false);
  add("stage", "List what is missing for what is asked, and where it comes from", true);
  add_eval_generate(command, exit_code);
}

}  // namespace bitdecoding::cli
