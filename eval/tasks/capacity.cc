// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <fstream>
#include <sstream>

#include "engine/server_log.h"
#include "tasks/tasks.h"

namespace bitdecoding::eval {
namespace {

// One entry a worker; a pool for each group of layers.
Result<std::int64_t> pool_bytes(const Client& client) {
  Result<Json> answer = client.collective_rpc("bitdecoding_status", {});
  if (!answer.ok()) return answer.status();
  std::int64_t total = 0;
  const Json workers = answer.value().value("results", Json());
  if (!workers.is_array() || workers.empty()) {
    return Status(StatusCode::kCorrupt, "The server's workers did not report their BF16 pools.");
  }
  for (const Json& worker : workers) {
    if (!worker.is_object() || !worker.contains("pools")) {
      return Status(StatusCode::kCorrupt, "A worker did not report its BF16 pools.");
    }
    for (const Json& pool : worker["pools"]) total += pool.value("bytes", std::int64_t{0});
  }
  return total;
}

}  // namespace

Result<Json> run_capacity(const Client& client, const std::string& log_path,
                          std::int64_t cache_bytes, bool ours) {
  std::ifstream file(log_path);
  std::stringstream content;
  content << file.rdbuf();
  const std::optional<std::int64_t> tokens = capacity_in_log(content.str());
  if (!tokens.has_value() || *tokens <= 0) {
    return Status(StatusCode::kCorrupt,
                  fmt::format("The server's log {} does not state its KV cache size.", log_path));
  }
  std::int64_t pool = 0;
  if (ours) {
    const Result<std::int64_t> bytes = pool_bytes(client);
    if (!bytes.ok()) return bytes.status();
    pool = bytes.value();
  }
  // The pool is memory beside the cache. Counted in, the same total holds fewer tokens.
  const double share = static_cast<double>(cache_bytes) / static_cast<double>(cache_bytes + pool);
  return Json{
      {"cache_bytes", cache_bytes},
      {"pool_bytes", pool},
      {"tokens", *tokens},
      {"tokens_pool_counted", static_cast<std::int64_t>(static_cast<double>(*tokens) * share)},
      {"bytes_per_token", static_cast<double>(cache_bytes + pool) / static_cast<double>(*tokens)}};
}

}  // namespace bitdecoding::eval
