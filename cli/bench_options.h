// SPDX-License-Identifier: Apache-2.0
// What the subcommands of `bitdecoding bench` take from the command line.
#pragma once

#include <cstdint>
#include <string>

namespace bitdecoding::cli {

struct BenchOptions {
  std::string backend = "cpu";
  std::string isa;  // empty = the best of the machine
  int q_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int page_size = 128;
  std::int64_t context = 32768;  // decode: all tokens; write, prefill: tokens cached before
  std::int64_t tokens = 1;       // tokens a request adds in the timed call
  int batch = 1;
  int threads = 1;
  std::string mode = "bitdecoding-nvfp4";
  std::string recipe;      // a file; replaces mode
  std::string arithmetic;  // empty = the recipe's
  std::string dtype = "f32";
  double seconds = 2.0;
  int repeat = 7;  // calls at least
  std::uint64_t seed = 1;
  bool json = false;

  std::string peer = "none";
  std::string peer_dtype = "bf16";
  bool peer_huge_pages = false;
  std::string python;  // empty = .venv/bin/python of the source tree

  double gib = 4.0;  // capacity
  int layers = 32;
  int max_requests = 16;
};

}  // namespace bitdecoding::cli
