// SPDX-License-Identifier: Apache-2.0
// The tasks of the demo. Each one asks a running server and gives what it found as JSON, which is
// what the results log keeps; docs/demo.md describes the fields.
#pragma once

#include <string>

#include "bitdecoding/status.h"
#include "engine/client.h"
#include "tasks/document.h"
#include "tasks/plan.h"

namespace bitdecoding::eval {

// A few short questions, answered greedily.
Result<Json> run_questions(const Client& client, const Plan& plan);

// Questions for the facts hidden in the first tokens of the document.
Result<Json> run_needles(const Client& client, const Document& document, const Plan& plan);

// Makes the server write the logits of every prompt position to `path`. The prompt is prefilled in
// chunks, so all but the newest tokens are read from the cache's pages.
Result<Json> capture_logits(const Client& client, const Document& document, const Plan& plan,
                            const std::string& path);

// Exact divergence of two captures, in nats; `baseline` is P and `path` is Q.
Result<Json> run_kl(const std::string& baseline, const std::string& path, const Plan& plan,
                    int threads);

// Prefill tokens/s from where the earlier tasks left the cache to `plan.context`, then decode
// tokens/s there. Steps count only while all users decode.
Result<Json> run_throughput(const Client& client, const Document& document, const Plan& plan);

// Tokens of KV capacity, with and without the bytes of the BF16 pool.
Result<Json> run_capacity(const Client& client, const std::string& log_path,
                          std::int64_t cache_bytes, bool ours);

}  // namespace bitdecoding::eval
