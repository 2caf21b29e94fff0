// SPDX-License-Identifier: Apache-2.0
// eval generate ruler_niah: needles in haystacks, in the tokens of the model that is served.
#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>

#include "benchmarks/ruler_niah/generate.h"
#include "engine/chat.h"
#include "engine/process.h"
#include "eval.h"
#include "output.h"
#include "report/progress.h"
#include "run/local_host.h"

namespace bitdecoding::cli {
namespace {

struct Options {
  EngineOptions engine;
  std::string endpoint, what, data = "data/eval";
  std::vector<std::size_t> lengths = {1024};
  eval::NiahPlan plan;
};

Result<std::unique_ptr<eval::EngineHost>> make_host(const Options& options,
                                                    eval::Progress* progress) {
  if (!options.endpoint.empty()) {
    const Result<eval::Endpoint> endpoint = eval::parse_endpoint(options.endpoint);
    if (!endpoint.ok()) return endpoint.status();
    return std::unique_ptr<eval::EngineHost>(new eval::RemoteHost(endpoint.value()));
  }
  eval::LocalHost::Options host;
  if (Status s = complete(options.engine, &host.serve.program, &host.serve.python,
                          &host.serve.model, &host.serve.dtype, &host.serve.threads);
      !s.ok()) {
    return s;
  }
  host.serve.max_model_len = 2048;  // it counts tokens and answers nothing
  host.serve.cache_bytes = std::int64_t{256} << 20;
  host.mode = "bf16";
  host.log_folder = std::filesystem::absolute(options.data).string() + "/logs";
  host.start_timeout = std::chrono::seconds(options.engine.start_timeout);
  host.progress = [progress](double, const std::string& line) { progress->update(line); };
  return std::unique_ptr<eval::EngineHost>(new eval::LocalHost(std::move(host)));
}

int run(const Options& options) {
  eval::watch_signals();
  eval::adopt_orphans();
  eval::Progress progress(STDOUT_FILENO);
  Result<std::unique_ptr<eval::EngineHost>> host = make_host(options, &progress);
  if (!host.ok()) return fail(host.status());
  progress.begin("the server that counts tokens");
  const Result<eval::Endpoint> endpoint = host.value()->up();
  if (!endpoint.ok()) return ended(endpoint.status(), /*goes_on=*/false);
  progress.done("ready");
  eval::ChatClient client(endpoint.value(), "", std::chrono::seconds(60));
  std::size_t window = 0;
  const Result<std::vector<std::string>> models = client.models(&window);
  if (!models.ok()) return ended(models.status(), /*goes_on=*/false);
  client.set_model(models.value().front());
  const auto count = [&](const std::string& text) -> Result<std::size_t> {
    if (eval::interrupted()) return Status(StatusCode::kIo, "Interrupted.");
    const Result<std::vector<int>> tokens = client.tokenize(text);
    if (!tokens.ok()) return tokens.status();
    return tokens.value().size();
  };
  for (const std::size_t length : options.lengths) {
    eval::NiahPlan plan = options.plan;
    plan.length = length;
    const std::string path = fmt::format("{}/ruler/niah_{}.jsonl", options.data, length);
    progress.begin(path);
    if (Status s = eval::write_niah(plan, count, path); !s.ok()) return ended(s, /*goes_on=*/false);
    progress.done("written");
  }
  host.value()->down();
  return kExitOk;
}

}  // namespace

void add_eval_generate(CLI::App* eval, int* exit_code) {
  CLI::App* command =
      eval->add_subcommand("generate", "Write RULER's needles in the model's own tokens");
  auto options = std::make_shared<Options>();
  command->add_option("WHAT", options->what, "ruler_niah")
      ->required()
      ->check(CLI::IsMember({"ruler_niah"}));
  add_engine_options(command, &options->engine, /*with_recipe=*/false);
  command->add_option("--endpoint", options->endpoint, "A server that counts, instead of one here");
  command->add_option("--data", options->data, "Data folder")->capture_default_str();
  command->add_option("--length", options->lengths, "Tokens of a prompt, by commas")
      ->delimiter(',')
      ->check(CLI::Range(256, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--variant", options->plan.variants, "Variants, by commas; default: all eight")
      ->delimiter(',')
      ->check(CLI::IsMember(eval::niah_variants()));
  command->add_option("--rows", options->plan.rows, "Rows of a variant")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--seed", options->plan.seed, "Seed")->capture_default_str();
  command->add_flag("--one-haystack", options->plan.one_haystack,
                    "One haystack for all rows of a variant, which a prefix cache computes once");
  command->callback([options, exit_code] { *exit_code = run(*options); });
}

}  // namespace bitdecoding::cli
