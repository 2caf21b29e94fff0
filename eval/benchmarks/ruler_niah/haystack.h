// SPDX-License-Identifier: Apache-2.0
// A haystack that is as long as one likes, and the needles in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "calibrate/words.h"

namespace bitdecoding::eval {

enum class HaystackKind { kNoise, kEssay, kNeedles };
enum class NeedleKind { kNumbers, kUuids };

struct NiahVariant {
  const char* name;
  HaystackKind haystack;
  bool uuid_keys;
  NeedleKind values;
  int keys;        // that are hidden, apart from a haystack of needles
  int per_key;     // values of a key
  int keys_asked;  // of the keys
};

struct Needle {
  std::string key;
  std::string value;
};

std::string needle_sentence(const NiahVariant& variant, const Needle& needle);
std::string needle_key(const NiahVariant& variant, Choice& choice);
std::string needle_value(const NiahVariant& variant, Choice& choice);

// Sentence after sentence; a longer text of the same seed begins with the shorter one.
class Haystack {
 public:
  // `keys`: of the needles, which no sentence of a haystack of needles has.
  Haystack(const NiahVariant& variant, std::uint64_t seed, std::vector<std::string> keys);
  // The first `size` sentences; they are made as needed.
  const std::vector<std::string>& at_least(std::size_t size);
  // Between two sentences.
  char separator() const { return variant_.haystack == HaystackKind::kEssay ? ' ' : '\n'; }

 private:
  std::string next();

  NiahVariant variant_;
  Choice choice_;
  std::vector<std::string> keys_;
  std::vector<std::string> sentences_;
};

}  // namespace bitdecoding::eval
