// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/text/unicode.h"

#include <algorithm>
#include <iterator>

#include "benchmarks/text/case_table.h"

namespace bitdecoding::eval {
namespace {

constexpr char32_t kReplacement = 0xfffd;
constexpr char32_t kCapitalSigma = 0x3a3;
constexpr char32_t kSmallSigma = 0x3c3;
constexpr char32_t kFinalSigma = 0x3c2;

// The length of the sequence that `lead` begins; 0 when it begins none.
int sequence_length(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead < 0xe0) return 2;
  if (lead >= 0xe0 && lead < 0xf0) return 3;
  return lead >= 0xf0 && lead < 0xf5 ? 4 : 0;
}

bool is_code_point(char32_t c, int length) {
  constexpr char32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  return c >= kLeast[length] && c < 0x110000 && (c < 0xd800 || c >= 0xe000);
}

// The code point at `at`, which moves behind it.
char32_t next_code_point(std::string_view text, std::size_t& at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  const int length = sequence_length(lead);
  if (length == 0 || at + static_cast<std::size_t>(length) > text.size()) return ++at, kReplacement;
  if (length == 1) return text[at++];
  char32_t c = lead & (0x7fU >> length);
  for (int i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(text[at + static_cast<std::size_t>(i)]);
    if ((byte & 0xc0U) != 0x80) return ++at, kReplacement;
    c = (c << 6) | (byte & 0x3fU);
  }
  if (!is_code_point(c, length)) return ++at, kReplacement;
  at += static_cast<std::size_t>(length);
  return c;
}

const CaseRange* case_range(char32_t c) {
  const auto* after = std::upper_bound(std::begin(kCaseRanges), std::end(kCaseRanges), c,
                                       [](char32_t x, const CaseRange& r) { return x < r.first; });
  if (after == std::begin(kCaseRanges)) return nullptr;
  const CaseRange* range = after - 1;
  return c <= range->last && (c - range->first) % range->step == 0 ? range : nullptr;
}

// Whether a letter of Greek or Latin stands there: enough to tell the end of a Greek word, which
// is where a small sigma has another form.
bool is_greek_or_latin_letter(char32_t c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= 0xc0 && c < 0x250) ||
         (c >= 0x386 && c < 0x400 && c != 0x387) || (c >= 0x1f00 && c < 0x2000);
}

char32_t small_sigma(std::u32string_view text, std::size_t at) {
  const bool before = at > 0 && is_greek_or_latin_letter(text[at - 1]);
  const bool after = at + 1 < text.size() && is_greek_or_latin_letter(text[at + 1]);
  return before && !after ? kFinalSigma : kSmallSigma;
}

template <class View>
std::vector<View> split_at(View text, typename View::value_type separator) {
  std::vector<View> out;
  std::size_t begin = 0;
  for (std::size_t end = text.find(separator); end != View::npos;
       end = text.find(separator, begin)) {
    out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  out.push_back(text.substr(begin));
  return out;
}

}  // namespace

std::u32string decode_utf8(std::string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) out.push_back(next_code_point(text, at));
  return out;
}

std::string encode_utf8(std::u32string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : text) {
    if (c < 0x80) {
      out.push_back(static_cast<char>(c));
    } else if (c < 0x800) {
      out.push_back(static_cast<char>(0xc0 | (c >> 6)));
      out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    } else if (c < 0x10000) {
      out.push_back(static_cast<char>(0xe0 | (c >> 12)));
      out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3f)));
      out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    } else {
      out.push_back(static_cast<char>(0xf0 | (c >> 18)));
      out.push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3f)));
      out.push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3f)));
      out.push_back(static_cast<char>(0x80 | (c & 0x3f)));
    }
  }
  return out;
}

std::string valid_utf8(std::string_view text) { return encode_utf8(decode_utf8(text)); }

bool is_space(char32_t c) {
  return (c >= 0x9 && c <= 0xd) || (c >= 0x1c && c <= 0x20) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

std::u32string lower(std::u32string_view text) {
  std::u32string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char32_t c = text[i];
    if (c < 0x80) {
      out.push_back(c >= 'A' && c <= 'Z' ? c + 32 : c);
    } else if (c == 0x130) {
      out += U"i\u0307";  // the one letter whose lower case is two code points
    } else if (c == kCapitalSigma) {
      out.push_back(small_sigma(text, i));
    } else {
      const CaseRange* range = case_range(c);
      out.push_back(range == nullptr ? c
                                     : static_cast<char32_t>(static_cast<int>(c) + range->delta));
    }
  }
  return out;
}

std::string lower(std::string_view text) { return encode_utf8(lower(decode_utf8(text))); }

std::u32string_view strip(std::u32string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

std::string strip(std::string_view text) { return encode_utf8(strip(decode_utf8(text))); }

std::vector<std::u32string_view> words(std::u32string_view text) {
  std::vector<std::u32string_view> out;
  for (std::size_t at = 0; at < text.size();) {
    std::size_t end = at;
    while (end < text.size() && !is_space(text[end])) ++end;
    if (end > at) out.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return out;
}

std::u32string one_spaced(std::u32string_view text) {
  std::u32string out;
  for (const std::u32string_view word : words(text)) {
    if (!out.empty()) out.push_back(U' ');
    out += word;
  }
  return out;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  return split_at(text, separator);
}

std::vector<std::u32string_view> split(std::u32string_view text, char32_t separator) {
  return split_at(text, separator);
}

}  // namespace bitdecoding::eval
