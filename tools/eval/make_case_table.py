#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes eval/benchmarks/text/case_table.h: lower case as Python's str.lower() has it, by ranges."""

import sys


def mappings():
    """(code point, its lower case) of all whose lower case is one other code point."""
    for code in range(0x110000):
        if 0xD800 <= code < 0xE000:
            continue
        lower = chr(code).lower()
        if lower != chr(code) and len(lower) == 1:
            yield code, ord(lower)


def ranges():
    """[first, last, step, delta]: the longest runs of equal step (1 or 2) and equal delta."""
    out = []
    for code, lower in mappings():
        delta = lower - code
        if out and out[-1][3] == delta:
            first, last, step, _ = out[-1]
            if code - last <= 2 and (first == last or code - last == step):
                out[-1][1:3] = [code, code - last]
                continue
        out.append([code, code, 1, delta])
    return out


def main():
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        "// Code points whose lower case is one other code point; made by tools/eval/make_case_table.py.",
        "#pragma once",
        "",
        "namespace bitdecoding::eval {",
        "",
        "struct CaseRange {",
        "  char32_t first, last;",
        "  char32_t step;  // 2: every other code point",
        "  int delta;      // of the lower case",
        "};",
        "",
        "// clang-format off",
        "inline constexpr CaseRange kCaseRanges[] = {",
    ]
    line = "   "
    for first, last, step, delta in ranges():
        item = f" {{{first:#x}, {last:#x}, {step}, {delta}}},"
        if len(line) + len(item) > 100:
            lines.append(line)
            line = "   "
        line += item
    lines += [line, "};", "// clang-format on", "", "}  // namespace bitdecoding::eval"]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
