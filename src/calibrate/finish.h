// SPDX-License-Identifier: Apache-2.0
// From what was observed to the sidecar.
#pragma once

#include "io/calibration_state.h"
#include "io/key_shift.h"

namespace bitdecoding {

// Key means, and tau for each of kCalibratedFactors over all layers and for each layer. Metadata:
//   tokens, skipped_rows, outlier_channels   of the key means
//   probability_taus                         {"c": tau, ...}, where probabilities were observed
//   probability_layer_taus                   {"c": [tau of each layer], ...}
//   probability_detail                       {"c": {errors, lost mass}, ...}
//   probability_blocks                       blocks observed
// An error names the layer and head that saw too few tokens.
Result<KeyShift> finish_calibration(const CalibrationState& state);

// How far the means of `before` are from those of `after`, in units of each channel's standard
// deviation in `after`: the root of the mean square over all channels of all observed layers.
double key_mean_distance(const CalibrationState& before, const CalibrationState& after);
// The largest such distance of one channel.
double largest_key_mean_distance(const CalibrationState& before, const CalibrationState& after);

}  // namespace bitdecoding
