// SPDX-License-Identifier: Apache-2.0
// What a calibration belongs to: a model, by fields of its config.json and by its weight files, and
// the elements of the recipe. Kept in the sidecar's metadata, so that a sidecar is never used for
// something else in silence.
#pragma once

#include <map>
#include <string>

#include "bitdecoding/recipe.h"
#include "bitdecoding/status.h"
#include "io/key_shift.h"

namespace bitdecoding {

using Identity = std::map<std::string, std::string>;

inline constexpr const char* kCalibrationVersion = "2";
// The folder of a model in which its calibration lies, and the sidecar in it.
inline constexpr const char* kCalibrationFolder = "calibration";
inline constexpr const char* kCalibrationFile = "key_shift.safetensors";

// "model.FIELD" for each field of config.json that decides K, and "model.weights": names, sizes
// and a hash of 64 blocks spread over each weight file (hashing all of a large model would take
// longer than starting it). kNotFound without a config.json or without weights.
Result<Identity> model_identity(const std::string& folder);

// "recipe.KEY" for each key that decides what was observed.
Identity recipe_identity(const Recipe& recipe);

// FNV-1a, 16 hexadecimal digits: the same on every machine.
std::string content_hash(std::string_view bytes);

// kInvalidArgument naming the first field of `wanted` that the sidecar has otherwise. A sidecar
// without a calibration's version was made elsewhere and says nothing of itself: it passes.
Status check_identity(const KeyShift& sidecar, const Identity& wanted);

}  // namespace bitdecoding
