// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/ruler_niah/haystack.h"

#include <fmt/format.h>

#include <algorithm>

#include "benchmarks/ruler_niah/words.h"
#include "calibrate/said.h"

namespace bitdecoding::eval {
namespace {

// Random, with the marks of a random UUID (version 4).
std::string uuid(Choice& choice) {
  const std::uint64_t a = choice.next();
  const std::uint64_t b = choice.next();
  return fmt::format("{:08x}-{:04x}-4{:03x}-{:04x}-{:012x}", a >> 32, (a >> 16) & 0xffff, a & 0xfff,
                     0x8000 | (b >> 50), b & 0xffffffffffffULL);
}

std::string essay_sentence(Choice& choice) {
  switch (choice.below(7)) {
    case 0:
      return deed(choice);
    case 1:
      return short_deed(choice);
    case 2:
      return said(choice, "I had often wondered {}, and {} wondered with me.", of(kTopics),
                  of(kPeople));
    case 3:
      return said(choice, "From {} to {} it is {} minutes on foot, {}.", of(kPlaces), of(kPlaces),
                  between(3, 95), of(kBecause));
    case 4:
      return said(choice, "Whoever asks {} should first look at {}.", of(kTopics), of(kThings));
    case 5:
      return std::string(choice.of(kAnswers));
    default:
      return std::string(choice.of(kReflections));
  }
}

}  // namespace

std::string needle_sentence(const NiahVariant& variant, const Needle& needle) {
  return fmt::format("One of the special magic {} for {} is: {}.",
                     variant.values == NeedleKind::kNumbers ? "numbers" : "uuids", needle.key,
                     needle.value);
}

std::string needle_key(const NiahVariant& variant, Choice& choice) {
  if (variant.uuid_keys) return uuid(choice);
  const std::string_view adjective = choice.of(kKeyAdjectives);
  return said(choice, "{}-{}", adjective, of(kKeyNouns));
}

std::string needle_value(const NiahVariant& variant, Choice& choice) {
  if (variant.values == NeedleKind::kUuids) return uuid(choice);
  return std::to_string(choice.between(1000000, 9999999));
}

Haystack::Haystack(const NiahVariant& variant, std::uint64_t seed, std::vector<std::string> keys)
    : variant_(variant), choice_(seed), keys_(std::move(keys)) {}

std::string Haystack::next() {
  switch (variant_.haystack) {
    case HaystackKind::kNoise: {
      std::string out;
      for (const std::string_view sentence : kNoise) {
        out += fmt::format("{}{}", out.empty() ? "" : " ", sentence);
      }
      return out;
    }
    case HaystackKind::kEssay:
      return essay_sentence(choice_);
    case HaystackKind::kNeedles:
      break;
  }
  Needle needle;
  do {
    needle.key = needle_key(variant_, choice_);
  } while (std::find(keys_.begin(), keys_.end(), needle.key) != keys_.end());
  needle.value = needle_value(variant_, choice_);
  return needle_sentence(variant_, needle);
}

const std::vector<std::string>& Haystack::at_least(std::size_t size) {
  while (sentences_.size() < size) sentences_.push_back(next());
  return sentences_;
}

}  // namespace bitdecoding::eval
