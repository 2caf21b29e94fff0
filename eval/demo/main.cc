// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>

#include "demo/options.h"
#include "demo/runner.h"
#include "engine/folder_lock.h"
#include "engine/process.h"
#include "report/page.h"
#include "report/progress.h"
#include "report/summary.h"

namespace {

using bitdecoding::Status;
using namespace bitdecoding::eval;  // NOLINT(google-build-using-namespace): this is its program

constexpr int kInterrupted = 130;

void show(const DemoRunner& runner, const DemoOptions& options, Style style) {
  const Summary summary = runner.summary();
  fmt::print("\n{}\n{}\n", answers_text(summary, style),
             format_table(figures_table(summary), style));
  fmt::print(
      "KV tokens: in {} MiB, with the BF16 pool's bytes counted.\nKL to bf16: mean divergence of "
      "the "
      "next token's distribution, in nats, behind a cached prefix.\nprefill, users: tokens/s; "
      "users "
      "decode at the same time.\nWeights and activations: {}{}.\nThe whole report: {}\n",
      options.cache_mib, options.dtype,
      !options.dtype_chosen         ? ""
      : options.dtype == "bfloat16" ? ", as this processor has BF16 matrix instructions"
                                    : ", as this processor has no BF16 matrix instructions",
      runner.report_path());
}

void show_next_step(const DemoRunner& runner, const DemoOptions& options, Style style) {
  const std::string program = options.root + "/build/release/bin/bitdecoding";
  fmt::print("\nServe your own model with an FP4 KV cache:\n  {}\n",
             toned(program + " serve YOUR_MODEL --mode bitdecoding-nvfp4", Tone::kBold, style));
  if (runner.key_shift_file().empty()) return;
  fmt::print("This one, with the key means found above:\n  {}\n",
             toned(fmt::format("{} serve {} --mode bitdecoding-nvfp4 --key-shift {}", program,
                               options.model, runner.key_shift_file()),
                   Tone::kBold, style));
}

}  // namespace

int main(int argc, char** argv) {
  DemoOptions options;
  int exit_code = 0;
  if (!parse_options(argc, argv, &options, &exit_code)) return exit_code;
  watch_signals();
  adopt_orphans();
  Progress progress(STDOUT_FILENO);
  // Two demos would share ports' timings, logs and results.
  const bitdecoding::Result<FolderLock> lock = FolderLock::take(options.out);
  if (!lock.ok()) {
    fmt::print(stderr, "demo: {}.\n", lock.status().message());
    return 1;
  }
  DemoRunner runner(options, &progress);
  const Status status = runner.run();
  if (!status.ok()) {
    fmt::print(stderr, "\ndemo: {}\n", status.message());
    return interrupted() ? kInterrupted : 1;
  }
  show(runner, options, progress.style());
  show_next_step(runner, options, progress.style());
  return 0;
}
