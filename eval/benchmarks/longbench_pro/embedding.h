// SPDX-License-Identifier: Apache-2.0
// How alike texts are by an embedding model behind an OpenAI-style server.
#pragma once

#include <string>
#include <vector>

#include "bitdecoding/status.h"

namespace bitdecoding::eval {

// The largest cosine between the embedding of `text` and one of `others`. `model` empty: the first
// that the server names.
Result<double> best_similarity(const std::string& endpoint, const std::string& model,
                               const std::vector<std::string>& others, const std::string& text);

}  // namespace bitdecoding::eval
