// SPDX-License-Identifier: Apache-2.0
// Text as Python sees it: code points, its lower case, its white space. The scorers to equal are
// Python programs, so "lower", "strip" and "split" here mean what they mean there.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace bitdecoding::eval {

// Bytes that are not UTF-8 become U+FFFD, one for each.
std::u32string decode_utf8(std::string_view text);
std::string encode_utf8(std::u32string_view text);
// The same text with U+FFFD for what is no UTF-8: of programs and servers, on its way into JSON.
std::string valid_utf8(std::string_view text);

bool is_space(char32_t c);
std::u32string lower(std::u32string_view text);
std::string lower(std::string_view text);
std::u32string_view strip(std::u32string_view text);
std::string strip(std::string_view text);
// At runs of white space; no empty words.
std::vector<std::u32string_view> words(std::u32string_view text);
// Words with one space between them: Python's " ".join(text.split()).
std::u32string one_spaced(std::u32string_view text);
// At every `separator`; "" gives one empty piece.
std::vector<std::string_view> split(std::string_view text, char separator);
std::vector<std::u32string_view> split(std::u32string_view text, char32_t separator);

}  // namespace bitdecoding::eval
