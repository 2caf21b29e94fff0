// SPDX-License-Identifier: Apache-2.0
#include "score/kl.h"

#include <fmt/format.h>

#include <filesystem>

#include "score/statistics.h"
#include "tasks/tasks.h"

namespace bitdecoding::eval {
namespace {

constexpr std::size_t kBin = 64;  // positions in one point of the report's curve

}  // namespace

Result<Json> capture_logits(const Client& client, const Document& document, const Plan& plan,
                            const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  std::filesystem::remove(path, error);
  std::filesystem::remove(path + ".json", error);
  Result<Json> begun = client.collective_rpc("bitdecoding_capture_logits", {path});
  if (!begun.ok()) return begun.status();
  CompletionRequest request;
  request.prompt = document.prefix(plan.kl_tokens);
  request.max_tokens = 1;
  request.prompt_logprobs = 0;
  Result<Completion> reply = client.complete(request);
  Result<Json> ended = client.collective_rpc("bitdecoding_capture_logits", {""});
  if (!reply.ok()) return reply.status();
  if (!ended.ok()) return ended.status();

  const Result<LogitsFile> file = LogitsFile::open(path);
  if (!file.ok()) return file.status();
  if (file.value().rows() + 1 != request.prompt.size()) {
    return Status(
        StatusCode::kCorrupt,
        fmt::format("{} holds {} rows; a prompt of {} tokens has {} next tokens. Was "
                    "another request served during the capture?",
                    path, file.value().rows(), request.prompt.size(), request.prompt.size() - 1));
  }
  std::vector<double> losses;
  for (std::size_t i = plan.kl_first + 1; i < request.prompt.size(); ++i) {
    losses.push_back(-reply.value().prompt_logprobs[i]);
  }
  return Json{{"rows", file.value().rows()},
              {"path", path},
              {"nll", mean(losses)},
              {"seconds", reply.value().seconds}};
}

Result<Json> run_kl(const std::string& baseline, const std::string& path, const Plan& plan,
                    int threads) {
  const Result<LogitsFile> reference = LogitsFile::open(baseline);
  if (!reference.ok()) return reference.status();
  const Result<LogitsFile> other = LogitsFile::open(path);
  if (!other.ok()) return other.status();
  Result<Divergence> result =
      compare_logits(reference.value(), other.value(), plan.kl_first, threads);
  if (!result.ok()) return result.status();
  const Divergence& found = result.value();
  return Json{{"first_scored", found.first_scored},
              {"scored_tokens", found.scored_tokens},
              {"mean", found.mean},
              {"median", found.median},
              {"p99", found.p99},
              {"max", found.max},
              {"top1_agreement", found.top1_agreement},
              {"bin", kBin},
              {"curve", binned_means(found.kl, kBin)}};
}

}  // namespace bitdecoding::eval
