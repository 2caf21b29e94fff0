// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/lcb/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <vector>

#include "benchmarks/text/unicode.h"

namespace bitdecoding::eval {
namespace {

// 0.digits * 10^point; a zero has no digits. Infinity has one digit that no number has.
struct Decimal {
  bool negative = false;
  std::string digits;
  std::int64_t point = 0;
  bool nan = false;
  bool operator==(const Decimal& o) const {
    if (nan || o.nan || digits != o.digits) return false;
    return digits.empty() || (negative == o.negative && point == o.point);
  }
};

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }

// The exponent behind "e"; nothing when it is none, or too large for Python's decimals.
std::optional<std::int64_t> exponent(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || !std::all_of(text.begin(), text.end(), is_digit)) return std::nullopt;
  text.remove_prefix(std::min(text.find_first_not_of('0'), text.size()));
  if (text.size() > 17) return std::nullopt;
  const std::int64_t value = text.empty() ? 0 : std::stoll(std::string(text));
  return negative ? -value : value;
}

std::optional<Decimal> special(std::string_view text, bool negative) {
  if (text == "inf" || text == "infinity") return Decimal{negative, "i", 0, false};
  for (const std::string_view name : {"nan", "snan"}) {
    if (!text.starts_with(name)) continue;
    const std::string_view rest = text.substr(name.size());
    if (std::all_of(rest.begin(), rest.end(), is_digit)) return Decimal{negative, "", 0, true};
  }
  return std::nullopt;
}

// As Python's Decimal(text) reads it.
std::optional<Decimal> decimal(std::string_view word) {
  std::string text;
  for (const char c : word) {
    if (c != '_') text.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
  }
  std::string_view rest = text;
  Decimal out;
  out.negative = rest.starts_with('-');
  if (out.negative || rest.starts_with('+')) rest.remove_prefix(1);
  if (auto value = special(rest, out.negative)) return value;
  const std::size_t e = rest.find('e');
  std::int64_t power = 0;
  if (e != std::string_view::npos) {
    const auto read = exponent(rest.substr(e + 1));
    if (!read) return std::nullopt;
    power = *read;
    rest = rest.substr(0, e);
  }
  const std::size_t point = rest.find('.');
  std::string digits(rest.substr(0, point));
  out.point = static_cast<std::int64_t>(digits.size()) + power;
  if (point != std::string_view::npos) digits += rest.substr(point + 1);
  if (digits.empty() || !std::all_of(digits.begin(), digits.end(), is_digit)) return std::nullopt;
  const std::size_t first = std::min(digits.find_first_not_of('0'), digits.size());
  out.point -= static_cast<std::int64_t>(first);
  digits.erase(0, first);
  digits.erase(digits.find_last_not_of('0') + 1);
  out.digits = std::move(digits);
  return out;
}

std::optional<std::vector<Decimal>> decimals(std::u32string_view line) {
  std::vector<Decimal> out;
  for (const std::u32string_view word : words(line)) {
    const auto value = decimal(encode_utf8(word));
    if (!value) return std::nullopt;
    out.push_back(*value);
  }
  return out;
}

std::vector<std::u32string_view> stripped_lines(std::u32string_view text) {
  std::vector<std::u32string_view> lines = split(strip(text), U'\n');
  for (std::u32string_view& line : lines) line = strip(line);
  return lines;
}

bool same_line(std::u32string_view given, std::u32string_view expected) {
  if (given == expected) return true;
  const auto a = decimals(given);
  const auto b = decimals(expected);
  return a && b && *a == *b;
}

// Builds from JSON text what lcb_case.py writes, with whole numbers of any size.
class Tagger : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return add({{"n", 0}}); }
  bool boolean(bool value) override { return add({{"b", value}}); }
  bool number_integer(number_integer_t value) override {
    return add({{"i", std::to_string(value)}});
  }
  bool number_unsigned(number_unsigned_t value) override {
    return add({{"i", std::to_string(value)}});
  }
  bool number_float(number_float_t, const string_t& text) override {
    const bool whole = text.find_first_of(".eE") == std::string::npos;
    return add({{whole ? "i" : "f", text}});
  }
  bool string(string_t& value) override { return add({{"s", value}}); }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open("d"); }
  bool end_object() override { return close(); }
  bool start_array(std::size_t) override { return open("l"); }
  bool end_array() override { return close(); }
  bool key(string_t& value) override {
    keys_.push_back({{"s", value}});
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::json::exception&) override {
    return false;
  }

  nlohmann::json result;

 private:
  bool add(nlohmann::json value) {
    if (open_.empty()) {
      result = std::move(value);
    } else if (open_.back().contains("d")) {
      open_.back()["d"].push_back(nlohmann::json::array({keys_.back(), std::move(value)}));
      keys_.pop_back();
    } else {
      open_.back()["l"].push_back(std::move(value));
    }
    return true;
  }
  bool open(const char* kind) {
    open_.push_back({{kind, nlohmann::json::array()}});
    return true;
  }
  bool close() {
    nlohmann::json value = std::move(open_.back());
    open_.pop_back();
    return add(std::move(value));
  }

  std::vector<nlohmann::json> open_;
  std::vector<nlohmann::json> keys_;
};

struct Tagged {
  std::string tag;
  const nlohmann::json* value = nullptr;
};

Tagged tagged(const nlohmann::json& json) {
  if (!json.is_object() || json.size() != 1) return {};
  return {json.begin().key(), &json.begin().value()};
}

// A whole number's digits without needless zeros; empty for what is no whole number.
std::string whole(const Tagged& number) {
  if (number.tag == "b") return number.value->get<bool>() ? "1" : "0";
  const std::string text = number.value->get<std::string>();
  if (number.tag == "i") return text == "-0" ? "0" : text;
  const double value = std::strtod(text.c_str(), nullptr);
  if (!std::isfinite(value) || value != std::floor(value)) return "";
  return fmt::format("{:.0f}", value == 0 ? 0.0 : value);
}

bool is_number(const std::string& tag) { return tag == "i" || tag == "f" || tag == "b"; }

bool same_number(const Tagged& a, const Tagged& b) {
  if (a.tag == "f" && b.tag == "f") {
    return std::strtod(a.value->get<std::string>().c_str(), nullptr) ==
           std::strtod(b.value->get<std::string>().c_str(), nullptr);
  }
  const std::string left = whole(a);
  return !left.empty() && left == whole(b);
}

bool same_tagged(const nlohmann::json& given, const nlohmann::json& wanted);

bool same_list(const nlohmann::json& a, const nlohmann::json& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), same_tagged);
}

bool same_dict(const nlohmann::json& a, const nlohmann::json& b) {
  if (a.size() != b.size()) return false;
  return std::all_of(a.begin(), a.end(), [&](const nlohmann::json& item) {
    return std::any_of(b.begin(), b.end(), [&](const nlohmann::json& other) {
      return item.is_array() && item.size() == 2 && same_tagged(item[0], other[0]) &&
             same_tagged(item[1], other[1]);
    });
  });
}

bool same_tagged(const nlohmann::json& given, const nlohmann::json& wanted) {
  const Tagged a = tagged(given);
  const Tagged b = tagged(wanted);
  if (is_number(a.tag) && is_number(b.tag)) return same_number(a, b);
  if (a.tag != b.tag || a.tag.empty() || a.tag == "x") return false;
  if (a.tag == "l") return same_list(*a.value, *b.value);
  if (a.tag == "d") return same_dict(*a.value, *b.value);
  return *a.value == *b.value;
}

}  // namespace

std::string extract_code(std::string_view reply) {
  const std::vector<std::string_view> lines = split(reply, '\n');
  std::vector<std::size_t> fences;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (lines[i].find("```") != std::string_view::npos) fences.push_back(i);
  }
  if (fences.size() < 2) return "";
  std::string out;
  for (std::size_t i = fences[fences.size() - 2] + 1; i < fences.back(); ++i) {
    if (i > fences[fences.size() - 2] + 1) out += '\n';
    out += lines[i];
  }
  return out;
}

bool same_output(std::string_view given, std::string_view expected) {
  const std::u32string a = decode_utf8(given);
  const std::u32string b = decode_utf8(expected);
  const auto left = stripped_lines(a);
  const auto right = stripped_lines(b);
  return left.size() == right.size() &&
         std::equal(left.begin(), left.end(), right.begin(), same_line);
}

Result<bool> same_value(const nlohmann::json& given, const std::string& expected) {
  Tagger tagger;
  if (!nlohmann::json::sax_parse(expected, &tagger)) {
    return Status(StatusCode::kCorrupt, "The expected output of a test is not JSON.");
  }
  try {
    return same_tagged(given, tagger.result);
  } catch (const nlohmann::json::exception&) {
    return false;  // written by the program under test in the tool's place
  }
}

}  // namespace bitdecoding::eval
