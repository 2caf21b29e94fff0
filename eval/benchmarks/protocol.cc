// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/protocol.h"

#include <algorithm>
#include <cctype>

namespace bitdecoding::eval {

Sampling sampled(Family family) {
  Sampling out;
  out.temperature = family == Family::kGlm ? 1.0 : 0.6;
  out.top_p = 0.95;
  out.top_k = family == Family::kGlm ? 0 : 20;
  return out;
}

Sampling greedy() { return Sampling(); }

Sampling ProtocolBenchmark::sampling(const ModelTraits& model) const {
  return protocol_.greedy_unless_thinking && !model.thinking ? greedy() : sampled(model.family);
}

Budget ProtocolBenchmark::budget(const ModelTraits& model) const {
  Budget out;
  out.max_new_tokens = protocol_.max_new_tokens_wide != 0 && model.window > kWideWindow
                           ? protocol_.max_new_tokens_wide
                           : protocol_.max_new_tokens;
  out.fill_window = protocol_.greedy_unless_thinking && model.thinking;
  return out;
}

Family family_of(std::string_view config, std::string_view name) {
  std::string text(config.empty() ? name : config);
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text.find("glm") == std::string::npos ? Family::kQwen : Family::kGlm;
}

}  // namespace bitdecoding::eval
