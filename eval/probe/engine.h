// SPDX-License-Identifier: Apache-2.0
// One engine with BF16 pages, and probes of recipes in it (bd_probe_start): the divergence from the
// engine's own next-token distributions when a recipe answers in some or all layers.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bitdecoding/recipe.h"
#include "bitdecoding/status.h"
#include "engine/client.h"
#include "engine/launch.h"
#include "engine/server.h"
#include "report/progress.h"
#include "score/kl.h"

namespace bitdecoding::eval {

struct ProbeOptions {
  std::string program;
  std::string python;
  std::string model;  // a folder
  std::string text = "/usr/share/common-licenses/GPL-3";
  std::string dtype;
  std::string scratch;  // a folder for logs and logits
  std::size_t tokens = 4096;
  std::size_t chunk_tokens = 128;
  std::size_t first_scored = 256;
  std::int64_t cache_bytes = std::int64_t{512} << 20;
  int threads = 1;
  int start_timeout = 600;
};

struct ProbeResult {
  Divergence divergence;
  Json probe;  // of bd_probe_describe
  double seconds = 0;
};

class ProbeEngine {
 public:
  ProbeEngine(ProbeOptions options, Progress* progress)
      : options_(std::move(options)), progress_(progress) {}
  ~ProbeEngine();

  // Starts the server and keeps the logits of its own pages.
  Status start();
  // `layers` as the worker's: "all", or numbers by commas; empty compares and answers with BF16,
  // and then no divergence is computed.
  Result<ProbeResult> measure(const std::string& recipe_json, const std::string& layers);

  std::size_t tokens() const { return prompt_.size(); }
  std::size_t first_scored() const { return first_; }
  int num_layers() const { return num_layers_; }

 private:
  Status read_model();
  Status start_server();
  Status make_prompt();
  Status capture(const std::string& path);
  std::string path(const char* name) const { return options_.scratch + "/" + name; }

  ProbeOptions options_;
  Progress* progress_;
  std::unique_ptr<Server> server_;
  std::optional<Client> client_;
  Tokens prompt_;
  std::size_t first_ = 0;
  int num_layers_ = 0;
};

}  // namespace bitdecoding::eval
