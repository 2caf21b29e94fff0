// SPDX-License-Identifier: Apache-2.0
// A calibration that is under way: the sums and histograms of one rank, in a safetensors file of
// F64 tensors. It is written after every prompt, so that an interrupted calibration goes on; the
// sidecar is made of it (or of those of all ranks) at the end.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "bitdecoding/calibrate.h"
#include "bitdecoding/status.h"

namespace bitdecoding {

struct CalibrationState {
  std::string path;
  int num_layers = 0;
  int head_dim = 0;
  int first_kv_head = 0;                            // of those that are held
  int num_kv_heads = 0;                             // that are held
  int total_kv_heads = 0;                           // of the model
  std::vector<int> layers;                          // that were observed, ascending
  KeySums keys;                                     // [num_layers][num_kv_heads](...)
  KeySums values;                                   // the same of V
  std::vector<ProbabilityHistogram> probabilities;  // [num_layers][kCalibratedFactors]
  std::map<std::string, std::string> metadata;      // "note": what the caller wants to know again
};

Status save_calibration_state(const CalibrationState& state, const std::string& path);
// kNotFound, kCorrupt or kInvalidArgument with what is wrong in the file.
Result<CalibrationState> load_calibration_state(const std::string& path);

// All heads, of the states of a tensor-parallel model's ranks in any order: sums stand side by
// side, histograms are added up. Of ranks that share a head the first one counts.
Result<CalibrationState> join_calibration_states(const std::vector<CalibrationState>& parts);

// ".headsA-B" for a rank that holds a part of the model's heads, else nothing.
std::string rank_suffix(int first_kv_head, int num_kv_heads, int total_kv_heads);

}  // namespace bitdecoding
