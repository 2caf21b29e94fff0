// SPDX-License-Identifier: Apache-2.0
// Lower case, white space and code points as Python has them.
#include <gtest/gtest.h>

#include "benchmarks/text/unicode.h"
#include "eval_bench_python.h"

namespace bitdecoding::eval {
namespace {

TEST(Unicode, RoundTripAndBrokenBytes) {
  const std::string text = "aé\u4e2d\U0001F600";
  EXPECT_EQ(decode_utf8(text).size(), 4U);
  EXPECT_EQ(encode_utf8(decode_utf8(text)), text);
  EXPECT_EQ(decode_utf8("a\xff"
                        "b\xe4\xb8"),
            U"a\ufffd"
            U"b\ufffd\ufffd");
  EXPECT_EQ(decode_utf8("\xed\xa0\x80").size(), 3U);  // a surrogate is no code point
  EXPECT_EQ(decode_utf8("\xc0\x80").size(), 2U);
}

TEST(Unicode, SpacesAreThoseOfPython) {
  EXPECT_EQ(strip("\u3000 a b\x1c\u2003"), "a b");
  EXPECT_EQ(encode_utf8(one_spaced(decode_utf8(" 1\t\u3000"
                                               "11 \n"))),
            "1 11");
  EXPECT_EQ(split("a,,b", ',').size(), 3U);
  EXPECT_EQ(split("", ',').size(), 1U);
}

TEST(Unicode, LowerCaseOfEveryCodePointIsPythons) {
  const auto answers = python_lines(R"(
out = []
for c in range(0x110000):
    if 0xd800 <= c < 0xe000: continue
    if chr(c).lower() != chr(c) or chr(c).isspace():
        out.append('%x %s %d' % (c, ','.join('%x' % ord(x) for x in chr(c).lower()), chr(c).isspace()))
print('\n'.join(out))
)");
  if (answers.empty()) GTEST_SKIP() << "python3 is not there";
  std::map<char32_t, std::string> expected;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    const std::u32string one(1, c);
    const std::u32string folded = lower(one);
    if (folded == one && !is_space(c)) continue;
    std::string text;
    for (const char32_t x : folded) {
      char buffer[16];
      std::snprintf(buffer, sizeof buffer, "%s%x", text.empty() ? "" : ",",
                    static_cast<unsigned>(x));
      text += buffer;
    }
    char line[64];
    std::snprintf(line, sizeof line, "%x %s %d", static_cast<unsigned>(c), text.c_str(),
                  is_space(c) ? 1 : 0);
    expected[c] = line;
  }
  ASSERT_EQ(answers.size(), expected.size());
  auto answer = answers.begin();
  for (const auto& [c, line] : expected) EXPECT_EQ(*answer++, line);
}

TEST(Unicode, SmallSigmaAtTheEndOfAWord) {
  EXPECT_EQ(lower("ΟΔΥΣΣΕΥΣ ΚΑΙ Σ"), "οδυσσευς και σ");
  EXPECT_EQ(lower("İX"), "i\u0307x");
}

}  // namespace
}  // namespace bitdecoding::eval
