// SPDX-License-Identifier: Apache-2.0
// Texts as prompts of token ids: long texts are cut, so that they count by their tokens.
#pragma once

#include <string>
#include <vector>

#include "calibrate/corpus.h"
#include "engine/client.h"

namespace bitdecoding::eval {

struct CalibrationPrompt {
  std::string name;  // of the text, and which part of it
  Tokens tokens;
};

// Prompts of at most `prompt_tokens` until there are `tokens` in all; the last one is cut. Parts
// that are no longer than `least` are left out: they would add nothing.
Result<std::vector<CalibrationPrompt>> make_prompts(const Client& client,
                                                    const std::vector<CalibrationText>& texts,
                                                    std::size_t tokens, std::size_t prompt_tokens,
                                                    std::size_t least);

// The cutting alone. `head` stands before every part (a beginning-of-text token).
void cut_prompts(const std::string& name, const Tokens& head, const Tokens& body,
                 std::size_t tokens, std::size_t prompt_tokens, std::size_t least,
                 std::vector<CalibrationPrompt>* prompts, std::size_t* total);

}  // namespace bitdecoding::eval
