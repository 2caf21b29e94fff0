// SPDX-License-Identifier: Apache-2.0
// Where a model's calibration lies, and whether it is that model's.
#pragma once

#include <string>

#include "bitdecoding/recipe.h"
#include "bitdecoding/status.h"
#include "io/key_shift.h"

namespace bitdecoding::cli {

// The calibration that lies in a model's folder; empty without one.
std::string saved_calibration(const std::string& model);

// A calibration that says what it was made for must have been made for this model and, where the
// recipe takes its tau, for this recipe.
Status check_calibration(const std::string& model, const Recipe& recipe, const KeyShift& sidecar);

// `named`, else the saved one, read and checked; kNotFound with the command that makes one.
Result<std::string> calibration_path(const std::string& named, const std::string& model);

}  // namespace bitdecoding::cli
