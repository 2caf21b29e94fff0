// SPDX-License-Identifier: Apache-2.0
#include "bench.h"

#include <memory>
#include <string>

#include "bench_measure.h"
#include "bench_verbs.h"
#include "output.h"

namespace bitdecoding::cli {
namespace {

using Json = nlohmann::ordered_json;
using Bench = Result<Json> (*)(const BenchOptions&);

void add_shape(CLI::App* command, BenchOptions* o) {
  command->add_option("--kv-heads", o->kv_heads, "KV heads")->capture_default_str();
  command->add_option("--head-dim", o->head_dim, "64, 96, 128, 192 or 256")->capture_default_str();
  command->add_option("--page-size", o->page_size, "Tokens of a page")->capture_default_str();
  command->add_flag("--json", o->json, "Print one JSON object on one line");
}

void add_run(CLI::App* command, BenchOptions* o) {
  command->add_option("--backend", o->backend, "cpu, reference or cuda")->capture_default_str();
  command->add_option("--isa", o->isa, "Instruction set; default: the best of this machine");
  command->add_option("--q-heads", o->q_heads, "Query heads")->capture_default_str();
  command->add_option("--batch", o->batch, "Sequences")->capture_default_str();
  command->add_option("--threads", o->threads, "Threads, ours and the peer's")
      ->capture_default_str();
  auto* mode = command->add_option("--mode", o->mode, "KV mode")->capture_default_str();
  command->add_option("--recipe", o->recipe, "Recipe file, instead of a mode")->excludes(mode);
  command->add_option("--arithmetic", o->arithmetic, "int8, wide or fp4; default: the recipe's");
  command->add_option("--dtype", o->dtype, "Type of queries, keys and values")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  command->add_option("--seconds", o->seconds, "Time of each measurement")->capture_default_str();
  command->add_option("--repeat", o->repeat, "Calls at least")->capture_default_str();
  command->add_option("--seed", o->seed, "Seed of the data")->capture_default_str();
  command
      ->add_option("--peer", o->peer,
                   "Compare, interleaved in one process, with vLLM's or ggml's own operator")
      ->check(CLI::IsMember({"none", "vllm", "ggml", "all"}))
      ->capture_default_str();
  command->add_option("--peer-dtype", o->peer_dtype, "Cache type of the peer vLLM")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->capture_default_str();
  command->add_flag("--peer-huge-pages", o->peer_huge_pages,
                    "Huge pages under the peers' caches too, which they do not ask for themselves");
  command->add_option("--python", o->python, "Python of the peers; default: .venv/bin/python");
}

void add_capacity(CLI::App* command, BenchOptions* o) {
  command->add_option("--gib", o->gib, "Memory of the cache, BF16 slots included")
      ->capture_default_str();
  command->add_option("--layers", o->layers, "Layers of the model")->capture_default_str();
  command->add_option("--max-requests", o->max_requests, "Rows that run at once")
      ->capture_default_str();
}

void on_run(CLI::App* command, const std::shared_ptr<BenchOptions>& options, Bench bench,
            int* exit_code) {
  command->callback([options, bench, exit_code] {
    Result<Json> row = bench(*options);
    if (row.ok()) {
      print_row(row.value(), options->json);
      return;
    }
    *exit_code = fail(row.status());
  });
}

}  // namespace

void add_bench(CLI::App& app, int* exit_code) {
  CLI::App* bench = app.add_subcommand(
      "bench", "Time the verbs on one layer, beside the memory's bandwidth and other systems");
  bench->require_subcommand(1);
  const auto add = [&](const char* name, const char* text, Bench run) {
    auto options = std::make_shared<BenchOptions>();
    CLI::App* command = bench->add_subcommand(name, text);
    add_shape(command, options.get());
    on_run(command, options, run, exit_code);
    return std::pair(command, options);
  };
  auto [decode, decode_options] =
      add("decode", "One new token a sequence attends to a long cache", bench_decode);
  add_run(decode, decode_options.get());
  decode->add_option("--context", decode_options->context, "Tokens, the new one included")
      ->capture_default_str();

  const auto add_chunk = [](CLI::App* command, BenchOptions* o, std::int64_t context) {
    add_run(command, o);
    o->context = context;
    o->tokens = 512;
    command->add_option("--context", o->context, "Tokens cached before")->capture_default_str();
    command->add_option("--tokens", o->tokens, "New tokens a sequence")->capture_default_str();
  };
  auto [write, write_options] = add("write", "Quantize new keys and values", bench_write);
  add_chunk(write, write_options.get(), 0);
  auto [prefill, prefill_options] =
      add("prefill", "A chunk attends to itself and to a cached prefix", bench_prefill);
  add_chunk(prefill, prefill_options.get(), 4096);

  auto [capacity, capacity_options] =
      add("capacity", "Tokens a cache holds in each mode", bench_capacity);
  add_capacity(capacity, capacity_options.get());
}

}  // namespace bitdecoding::cli
