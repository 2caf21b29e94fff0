// SPDX-License-Identifier: Apache-2.0
// One table of the recipe's keys: parsing, printing and explaining read it, so a new key is one
// entry in recipe_fields.cc.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bitdecoding/recipe.h"

namespace bitdecoding {

struct RecipeField {
  const char* name;
  const char* accepts;  // completes "expected ..."
  const char* does;
  nlohmann::json (*get)(const Recipe& recipe);
  // False when the value's type or range is wrong; the recipe is unchanged then.
  bool (*set)(const nlohmann::json& value, Recipe* recipe);
};

// Every key but "mode", in the order they are printed.
const std::vector<RecipeField>& recipe_fields();

}  // namespace bitdecoding
