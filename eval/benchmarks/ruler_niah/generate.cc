// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/ruler_niah/generate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "benchmarks/ruler_niah/haystack.h"
#include "io/file.h"

namespace bitdecoding::eval {
namespace {

constexpr auto kWords = false;
constexpr auto kUuidKeys = true;
constexpr NiahVariant kVariants[] = {
    {"single_1", HaystackKind::kNoise, kWords, NeedleKind::kNumbers, 1, 1, 1},
    {"single_2", HaystackKind::kEssay, kWords, NeedleKind::kNumbers, 1, 1, 1},
    {"single_3", HaystackKind::kEssay, kWords, NeedleKind::kUuids, 1, 1, 1},
    {"multikey_1", HaystackKind::kEssay, kWords, NeedleKind::kNumbers, 4, 1, 1},
    {"multikey_2", HaystackKind::kNeedles, kWords, NeedleKind::kNumbers, 1, 1, 1},
    {"multikey_3", HaystackKind::kNeedles, kUuidKeys, NeedleKind::kUuids, 1, 1, 1},
    {"multivalue", HaystackKind::kEssay, kWords, NeedleKind::kNumbers, 1, 4, 1},
    {"multiquery", HaystackKind::kEssay, kWords, NeedleKind::kNumbers, 4, 1, 4}};

// Depths are on a grid of this many steps.
constexpr int kDepthSteps = 10000;

// A needle and how deep it lies, 0..kDepthSteps.
struct HiddenNeedle {
  Needle needle;
  int depth = 0;
  bool asked = false;
};

struct RowPlan {
  NiahVariant variant;
  std::vector<HiddenNeedle> needles;
  std::string question;
  std::string answer_prefix;
  std::vector<std::string> outputs;
  int depth = 0;  // percent, mean of those asked for
};

std::string join_keys(const std::vector<std::string>& keys) {
  std::string out;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i > 0) out += i + 1 < keys.size() ? ", " : ", and ";
    out += keys[i];
  }
  return out;
}

std::string intro(const RowPlan& row) {
  const bool one = row.outputs.size() == 1;
  const bool numbers = row.variant.values == NeedleKind::kNumbers;
  const char* noun = numbers ? (one ? "number" : "numbers") : (one ? "uuid" : "uuids");
  return fmt::format(
      "{} special magic {} {} hidden within the following text. Make sure to memorize it. I will "
      "quiz you about the {} afterwards.",
      one ? "A" : "Some", noun, one ? "is" : "are", noun);
}

void ask(RowPlan& row, const std::vector<std::string>& keys) {
  const bool one = row.outputs.size() == 1;
  const bool numbers = row.variant.values == NeedleKind::kNumbers;
  const char* noun = numbers ? (one ? "number" : "numbers") : (one ? "uuid" : "uuids");
  row.question = fmt::format("What {} special magic {} for {} mentioned in the provided text?",
                             one ? "is the" : "are all the", noun, join_keys(keys));
  row.answer_prefix = fmt::format("The special magic {} for {} mentioned in the provided text {}",
                                  noun, join_keys(keys), one ? "is" : "are");
}

// Distinct keys, and what is asked. The needle asked for first lies at the row's own depth, evenly
// spread over the rows; the others anywhere.
RowPlan plan_row(const NiahVariant& variant, int index, int rows, Choice& choice) {
  RowPlan row{variant, {}, "", "", {}, 0};
  std::vector<std::string> keys;
  while (keys.size() < static_cast<std::size_t>(variant.keys)) {
    std::string key = needle_key(variant, choice);
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(std::move(key));
  }
  long depth_sum = 0;
  for (int k = 0; k < variant.keys; ++k) {
    for (int v = 0; v < variant.per_key; ++v) {
      HiddenNeedle hidden;
      hidden.needle = {keys[static_cast<std::size_t>(k)], needle_value(variant, choice)};
      hidden.depth = row.needles.empty() ? (2 * index + 1) * kDepthSteps / (2 * rows)
                                         : choice.below(kDepthSteps + 1);
      hidden.asked = k < variant.keys_asked;
      if (hidden.asked) {
        row.outputs.push_back(hidden.needle.value);
        depth_sum += hidden.depth;
      }
      row.needles.push_back(std::move(hidden));
    }
  }
  const auto asked = static_cast<long>(row.outputs.size());
  row.depth = static_cast<int>((depth_sum * 100 / asked + kDepthSteps / 2) / kDepthSteps);
  keys.resize(static_cast<std::size_t>(variant.keys_asked));
  ask(row, keys);
  return row;
}

// The prompt with `size` sentences of hay; a needle lies behind depth * size of them.
std::string prompt(const RowPlan& row, Haystack& haystack, std::size_t size) {
  const std::vector<std::string>& hay = haystack.at_least(size);
  std::vector<const HiddenNeedle*> order;
  for (const HiddenNeedle& needle : row.needles) order.push_back(&needle);
  std::stable_sort(order.begin(), order.end(),
                   [](const auto* a, const auto* b) { return a->depth < b->depth; });
  std::string out = intro(row);
  std::size_t needle = 0;
  char before = '\n';
  for (std::size_t i = 0; i <= size; ++i) {
    for (; needle < order.size() &&
           static_cast<std::size_t>(order[needle]->depth) * size / kDepthSteps <= i;
         ++needle) {
      out += before + needle_sentence(row.variant, order[needle]->needle);
      before = haystack.separator();
    }
    if (i == size) break;
    out += before + hay[i];
    before = haystack.separator();
  }
  return out + '\n' + row.question;
}

struct Fitted {
  std::string prompt;
  std::size_t tokens = 0;
  std::size_t size = 0;
};

// The longest prompt found that has at most `length` tokens. Starts at `guess` sentences and goes
// by tokens a sentence: three or four counts, since the count is close to linear in the size. Ends
// when less than two sentences, or half a percent, are left.
Result<Fitted> fit(const RowPlan& row, Haystack& haystack, std::size_t length, std::size_t guess,
                   const CountTokens& count) {
  Fitted best;
  std::size_t too_big = SIZE_MAX;
  Result<std::size_t> bare = count(prompt(row, haystack, 0));
  if (!bare.ok()) return bare.status();
  if (bare.value() > length) {
    return Status(StatusCode::kInvalidArgument,
                  fmt::format("A prompt of {} with no text around its needles has {} tokens, more "
                              "than the {} asked for. Ask for a greater length.",
                              row.variant.name, bare.value(), length));
  }
  best = {prompt(row, haystack, 0), bare.value(), 0};
  std::size_t size = std::max<std::size_t>(guess, 1);
  while (size > best.size && size < too_big) {
    std::string text = prompt(row, haystack, size);
    const Result<std::size_t> tokens = count(text);
    if (!tokens.ok()) return tokens.status();
    const double each =
        std::max(1.0, (static_cast<double>(tokens.value()) - static_cast<double>(bare.value())) /
                          static_cast<double>(size));
    if (tokens.value() > length) {
      too_big = size;
    } else {
      best = {std::move(text), tokens.value(), size};
      const auto left = static_cast<double>(length - best.tokens);
      if (left < std::max(2 * each, 0.005 * static_cast<double>(length))) break;
    }
    // A sentence less than what would fill it, so that the next prompt fits.
    const double room = (static_cast<double>(length) - static_cast<double>(bare.value())) / each;
    size = static_cast<std::size_t>(std::max(0.0, room - 0.5));
    if (size <= best.size) size = best.size + 1;
    if (size >= too_big) size = best.size + (too_big - best.size) / 2;
  }
  return best;
}

nlohmann::json row_json(const RowPlan& row, const Fitted& fitted, const NiahPlan& plan, int index) {
  return {{"index", index},
          {"variant", row.variant.name},
          {"input", fitted.prompt},
          {"answer_prefix", row.answer_prefix},
          {"outputs", row.outputs},
          {"length", plan.length},
          {"prompt_tokens", fitted.tokens},
          {"depth", row.depth},
          {"seed", plan.seed}};
}

std::uint64_t mix(std::uint64_t a, std::uint64_t b) { return Choice(a ^ (b << 32)).next(); }

Status generate_variant(const NiahVariant& variant, std::uint64_t number, const NiahPlan& plan,
                        const CountTokens& count, std::vector<nlohmann::json>& rows) {
  const std::uint64_t seed = mix(plan.seed, number + 1);
  std::size_t guess =
      plan.length / 24;  // tokens of a sentence, roughly; rows learn from each other
  for (int index = 0; index < plan.rows; ++index) {
    Choice choice(mix(seed, static_cast<std::uint64_t>(index) + 1));
    const RowPlan row = plan_row(variant, index, plan.rows, choice);
    std::vector<std::string> keys;
    for (const HiddenNeedle& hidden : row.needles) keys.push_back(hidden.needle.key);
    Haystack haystack(variant, plan.one_haystack ? seed : choice.next(), std::move(keys));
    Result<Fitted> fitted = fit(row, haystack, plan.length, guess, count);
    if (!fitted.ok()) return fitted.status();
    guess = fitted.value().size;
    rows.push_back(row_json(row, fitted.value(), plan, index));
  }
  return {};
}

}  // namespace

const std::vector<std::string>& niah_variants() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> out;
    for (const NiahVariant& variant : kVariants) out.emplace_back(variant.name);
    return out;
  }();
  return names;
}

Result<std::vector<nlohmann::json>> generate_niah(const NiahPlan& plan, const CountTokens& count) {
  if (plan.rows < 1 || plan.rows > kDepthSteps) {
    return Status(
        StatusCode::kInvalidArgument,
        fmt::format("{} rows a variant were asked for; give 1 to {}.", plan.rows, kDepthSteps));
  }
  std::vector<nlohmann::json> rows;
  for (const std::string& name : plan.variants.empty() ? niah_variants() : plan.variants) {
    const auto* variant = std::find_if(std::begin(kVariants), std::end(kVariants),
                                       [&](const NiahVariant& it) { return name == it.name; });
    if (variant == std::end(kVariants)) {
      return Status(StatusCode::kInvalidArgument,
                    fmt::format("There is no variant '{}'; there are {}.", name,
                                fmt::join(niah_variants(), ", ")));
    }
    const auto number = static_cast<std::uint64_t>(variant - std::begin(kVariants));
    Status status = generate_variant(*variant, number, plan, count, rows);
    if (!status.ok()) return status;
  }
  return rows;
}

Status write_niah(const NiahPlan& plan, const CountTokens& count, const std::string& path) {
  Result<std::vector<nlohmann::json>> rows = generate_niah(plan, count);
  if (!rows.ok()) return rows.status();
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  std::string text;
  for (const nlohmann::json& row : rows.value()) text += row.dump() + "\n";
  return write_file_atomic(path, text);
}

}  // namespace bitdecoding::eval
