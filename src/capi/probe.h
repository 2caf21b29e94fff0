// SPDX-License-Identifier: Apache-2.0
// A probe: another recipe's cache beside a runtime's own, fed by the same calls. It says per layer
// and head what that recipe would change, and can put its outputs in place of the runtime's, in all
// layers or in some, so that a running engine measures recipes without being started anew.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bitdecoding/bitdecoding.h"
#include "capi/internal.h"

namespace bitdecoding::capi {

struct ProbeErrors {
  // Sums of squares of differences and of the exact values.
  std::vector<double> key, key_norm;        // [kv_heads]
  std::vector<double> score, score_norm;    // [q_heads]
  std::vector<double> output, output_norm;  // [q_heads]
};

class Probe {
 public:
  // `recipe` as of bd_runtime_options.
  static Result<std::unique_ptr<Probe>> make(const RuntimeState& owner, const std::string& recipe);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  // Layers whose outputs are replaced; nothing is compared while there are some.
  void replace(std::set<int> layers) { replaced_ = std::move(layers); }

  Status build(const bd_steps* outer, const bd_steps_options& options, const bd_step_input& input);
  Status write(const bd_write_params& params);
  // After the runtime's own attention; `own` are its backend's params.
  Status attend(const bd_attend_params& params, const AttendParams& own, const RuntimeState& owner);
  std::string describe() const;
  // The owner's layer or steps go away.
  void forget(const bd_layer* outer);
  void forget(const bd_steps* outer);

 private:
  struct Memory {
    explicit Memory(std::size_t bytes) : data(std::calloc(bytes, 1)) {}
    Memory(Memory&& other) noexcept : data(std::exchange(other.data, nullptr)) {}
    Memory& operator=(Memory&&) = delete;
    ~Memory() { std::free(data); }
    void* data;
  };
  struct Layer {
    bd_layer* layer = nullptr;
    std::unique_ptr<Memory> pages, shadow;  // untouched pages take no memory
    bd_cache cache{};
    ProbeErrors errors;
  };

  Probe() = default;
  Result<Layer*> layer_of(const bd_layer* outer, const bd_steps* steps);
  Status compare(const bd_attend_params& params, const AttendParams& own, const RuntimeState& owner,
                 const bd_steps* steps, Layer* layer, const std::vector<float>& output);
  Status compare_row(const AttendParams& own, const AttendParams& probed, const RuntimeState& owner,
                     int request, std::int64_t row, Layer* layer);

  bd_runtime* runtime_ = nullptr;
  std::map<const bd_layer*, Layer> layers_;
  std::map<const bd_steps*, bd_steps*> steps_;
  std::set<int> replaced_;
  double write_seconds_ = 0;
  std::uint64_t written_rows_ = 0;  // of one KV head
};

}  // namespace bitdecoding::capi
