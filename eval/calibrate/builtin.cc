// SPDX-License-Identifier: Apache-2.0
// The built-in calibration texts. Key means need many tokens in many contexts, not wit.
#include <fmt/format.h>

#include <cctype>

#include "calibrate/corpus.h"
#include "calibrate/said.h"

namespace bitdecoding::eval {
namespace {

constexpr int kTexts = 64;
constexpr std::size_t kTextBytes = 9000;

std::string sentence(Choice& choice) {
  switch (choice.below(6)) {
    case 0:
      return deed(choice);
    case 1:
      return short_deed(choice);
    case 2:
      return said(choice, "At {} they found {} and {}; {} had {} both.", of(kPlaces), of(kThings),
                  of(kThings), of(kPeople), of(kDid));
    case 3:
      return said(choice, "\"{}\" said {}, and went back to {}.", of(kReflections), of(kPeople),
                  of(kPlaces));
    case 4:
      return said(choice, "It took {} {} days to reach {} from {}.", of(kPeople), between(2, 19),
                  of(kPlaces), of(kPlaces));
    default:
      return std::string(choice.of(kReflections));
  }
}

std::string prose(Choice& choice) {
  std::string out =
      said(choice, "Chapter {}. {} and {}\n\n", between(1, 40), of(kPeople), of(kThings));
  while (out.size() < kTextBytes) {
    const int sentences = choice.between(3, 8);
    for (int i = 0; i < sentences; ++i) out += sentence(choice) + (i + 1 < sentences ? " " : "");
    out += "\n\n";
  }
  return out;
}

std::string capital(std::string_view word) {
  std::string out(word);
  out[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(out[0])));
  return out;
}

std::string cpp_function(Choice& choice) {
  const std::string noun(choice.of(kNouns));
  const std::string other(choice.of(kNouns));
  const std::string verb(choice.of(kVerbs));
  return said(choice,
              "// {} every {} whose {} is older than {} ms; returns how many there were.\n"
              "std::size_t {}_{}s(std::vector<{}>& {}s, const {}Options& options) {{\n"
              "  std::size_t count = 0;\n"
              "  for (auto& {} : {}s) {{\n"
              "    if ({}.{}_at + options.limit_ms > now_ms() || {}.size() < {}) continue;\n"
              "    {}.{}({:#x}U, /*retries=*/{});\n"
              "    ++count;\n"
              "  }}\n"
              "  return count;\n}}\n\n",
              capital(verb), noun, other, between(10, 9000), verb, noun, capital(noun), noun,
              capital(verb), noun, noun, noun, other, noun, between(1, 64), noun, of(kVerbs),
              below(65536), between(1, 9));
}

std::string python_class(Choice& choice) {
  const std::string noun(choice.of(kNouns));
  const std::string verb(choice.of(kVerbs));
  return said(
      choice,
      "class {}{}:\n"
      "    \"\"\"Keeps the last {} {}s and can {} them again.\"\"\"\n\n"
      "    def __init__(self, limit={}, name=\"{}\"):\n"
      "        self.limit, self.name = limit, name\n"
      "        self._{}s = {{}}\n\n"
      "    def {}(self, key, *values):\n"
      "        found = [v for v in values if v is not None and v % {} == {}]\n"
      "        if len(found) > self.limit:\n"
      "            raise ValueError(f\"too many {}s: {{len(found)}} of {{self.limit}}\")\n"
      "        self._{}s.setdefault(key, []).extend(found)\n"
      "        return sum(found) / max(1, len(found))\n\n",
      capital(noun), [](Choice& c) { return capital(c.of(kNouns)); }, between(2, 500), noun, verb,
      between(4, 4096), of(kNouns), noun, verb, between(2, 9), below(2), noun, noun);
}

std::string query_and_config(Choice& choice) {
  const std::string noun(choice.of(kNouns));
  return said(
      choice,
      "SELECT {0}_id, COUNT(*) AS n, AVG({1}) AS mean_{1}\n  FROM {0}s JOIN {2}s USING ({0}_id)\n"
      " WHERE {1} BETWEEN {3} AND {4} GROUP BY {0}_id HAVING n > {5} ORDER BY n DESC;\n\n"
      "{{\"{0}\": {{\"{1}\": [{3}, {4}, {5}], \"enabled\": {6}, \"path\": "
      "\"/var/lib/{2}/{0}.db\"}}}}\n\n",
      noun, of(kVerbs), of(kNouns), between(1, 99), between(100, 9999), between(2, 12),
      [](Choice& c) { return c.below(2) == 0 ? "true" : "false"; });
}

std::string code(Choice& choice) {
  std::string out = said(choice, "#include \"{}/{}.h\"\n\n", of(kNouns), of(kVerbs));
  while (out.size() < kTextBytes) {
    const int kind = choice.below(5);
    out += kind < 2 ? cpp_function(choice)
                    : (kind < 4 ? python_class(choice) : query_and_config(choice));
  }
  return out;
}

nlohmann::json dialogue(Choice& choice) {
  nlohmann::json messages = nlohmann::json::array();
  std::size_t bytes = 0;
  const auto say = [&](const char* role, const std::string& content) {
    bytes += content.size();
    messages.push_back({{"role", role}, {"content", content}});
  };
  while (bytes < kTextBytes) {
    say("user", choice.below(3) == 0
                    ? said(choice, "And how does that change {}? {} told me about it at {}.",
                           of(kTopics), of(kPeople), of(kPlaces))
                    : said(choice, "Can you explain {} to me? {}", of(kTopics), of(kReflections)));
    std::string answer;
    const int points = choice.between(3, 6);
    for (int i = 0; i < points; ++i) {
      answer += choice.below(2) == 0 ? said(choice, "{}. {} ", i + 1, of(kAnswers))
                                     : said(choice, "{} ", of(kAnswers));
    }
    say("assistant", answer + sentence(choice));
  }
  return messages;
}

std::string numbers(Choice& choice) {
  std::string out;
  while (out.size() < kTextBytes) {
    const std::string noun(choice.of(kNouns));
    out += said(choice, "date,{},{}_count,ratio,remark\n", noun, of(kVerbs));
    int total = 0;
    const int rows = choice.between(8, 20);
    for (int i = 0; i < rows; ++i) {
      const int value = choice.between(3, 99999);
      total += value;
      out += said(
          choice, "{}-{:02}-{:02},{},{},{:.4f},{}\n", between(1987, 2031), between(1, 12),
          between(1, 28), value, between(0, 400), [](Choice& c) { return c.below(1000000) / 1e6; },
          of(kNouns));
    }
    const int a = choice.between(12, 987);
    const int b = choice.between(12, 987);
    out += fmt::format("total,{},,,\n\n{} x {} = {}; {} + {} = {}; {} / {} = {:.3f}\n", total, a, b,
                       a * b, a, b, a + b, a, b, static_cast<double>(a) / b);
    out += said(
        choice, "[{:02}:{:02}:{:02}.{:03}] {} {} at {:.2f} degC, {:.1e} Pa, {:#06x}\n\n", below(24),
        below(60), below(60), below(1000), noun, of(kDid),
        [](Choice& c) { return c.below(9000) / 100.0 - 20.0; },
        [](Choice& c) { return c.between(1, 999) * 1e3; }, below(65536));
  }
  return out;
}

}  // namespace

std::vector<CalibrationText> builtin_corpus() {
  std::vector<CalibrationText> texts;
  for (int i = 0; i < kTexts; ++i) {
    Choice choice(0x6b65795f73686966ULL + static_cast<std::uint64_t>(i));
    const int turn = i / 4;
    CalibrationText text;
    switch (i % 4) {
      case 0:
        text.name = fmt::format("builtin prose {}", turn);
        text.text = prose(choice);
        break;
      case 1:
        text.name = fmt::format("builtin code {}", turn);
        text.text = code(choice);
        break;
      case 2:
        text.name = fmt::format("builtin dialogue {}", turn);
        text.messages = dialogue(choice);
        break;
      default:
        text.name = fmt::format("builtin numbers {}", turn);
        text.text = numbers(choice);
        break;
    }
    texts.push_back(std::move(text));
  }
  return texts;
}

}  // namespace bitdecoding::eval
