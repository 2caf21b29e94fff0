// SPDX-License-Identifier: Apache-2.0
// Any text: a recipe or a sentence. What is accepted prints to a recipe that reads as itself.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "bitdecoding/recipe.h"
#include "require.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using bitdecoding::require;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto recipe = bitdecoding::parse_recipe(text, "fuzz");
  if (!recipe.ok()) {
    require(recipe.status().message().rfind("fuzz: ", 0) == 0, "an error begins with the origin");
    require(recipe.status().message().size() < 2000, "an error is a sentence");
    return 0;
  }
  const std::string printed = bitdecoding::recipe_to_json(recipe.value());
  const auto again = bitdecoding::parse_recipe(printed, "fuzz");
  require(again.ok(), "a printed recipe is accepted");
  require(bitdecoding::recipe_to_json(again.value()) == printed, "and prints the same");
  require(!bitdecoding::explain_recipe(recipe.value()).empty(), "and is explained");
  return 0;
}
