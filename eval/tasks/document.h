// SPDX-License-Identifier: Apache-2.0
// The one long text that all tasks share: real text with eight facts hidden in it.
//
// Every prompt is a beginning of the same token list, with a question behind it. So a server
// prefills each token once, and every task after the first reads earlier tokens from the cache.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bitdecoding/status.h"
#include "engine/client.h"

namespace bitdecoding::eval {

// Kept free behind a beginning of the document, for a question and the template's end.
inline constexpr std::size_t kTailTokens = 64;

struct Needle {
  std::string place;          // "lighthouse"
  std::string code;           // five digits
  std::size_t end_token = 0;  // how long a prompt's document must be to hold it
};

struct Document {
  Tokens head;  // the chat template up to the user's text
  Tokens body;  // the user's text
  Tokens end;   // the chat template behind it, up to where the assistant begins to speak
  std::vector<Needle> needles;
  std::string source;

  // head + the first tokens of body, `tokens` in all; fewer only where the document ends.
  Tokens prefix(std::size_t tokens) const;
};

// The sentence that hides a needle, and the question that asks for it.
std::string needle_sentence(const Needle& needle);
std::string needle_question(const Needle& needle);
// Contains the code as a number of its own: 48213 is not found in 148213.
bool needle_found(const Needle& needle, const std::string& answer);

// Eight places with codes that depend on the seed alone.
std::vector<Needle> make_needles(unsigned seed);

// `text` with the needles' sentences between its paragraphs, the first after about `first_at`
// characters, the others spread evenly up to `last_at`. `ends` gets the offset behind each.
std::string hide_needles(const std::string& text, const std::vector<Needle>& needles,
                         std::size_t first_at, std::size_t last_at, std::vector<std::size_t>* ends);

// A question behind a document prefix, up to where the assistant begins to speak.
Result<Tokens> question_tail(const Client& client, const Document& document,
                             const std::string& question);

// Reads `path` and hides the needles in the first `needle_tokens` tokens, the first of them in the
// first `first_needle_tokens`.
Result<Document> make_document(const Client& client, const std::string& path, unsigned seed,
                               std::size_t first_needle_tokens, std::size_t needle_tokens);

}  // namespace bitdecoding::eval
