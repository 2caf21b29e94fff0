// SPDX-License-Identifier: Apache-2.0
// The thinking part of a reply. Some chat templates put `<think>` into the prompt, so a reply may
// begin inside the thinking part without saying so.
#include "benchmarks/benchmark.h"

namespace bitdecoding::eval {
namespace {

constexpr std::string_view kOpen = "<think>";
constexpr std::string_view kClose = "</think>";

}  // namespace

std::string without_thinking(std::string_view reply) {
  const std::size_t close = reply.rfind(kClose);
  if (close != std::string_view::npos) reply.remove_prefix(close + kClose.size());
  return std::string(reply.substr(0, reply.find(kOpen)));
}

std::string answer_of(std::string_view reply, const ModelTraits& model) {
  if (model.thinking && reply.find(kClose) == std::string_view::npos) return "";
  return without_thinking(reply);
}

}  // namespace bitdecoding::eval
