#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cuts Chinese text into words with jieba: a JSON list of texts a line in, a list of the same
texts with a space between their words out. The first line out is "ready", or what is wrong."""

import json
import logging
import sys


def main():
    try:
        import jieba
    except ImportError as error:
        print(str(error), flush=True)
        return 1
    jieba.setLogLevel(logging.CRITICAL)
    jieba.initialize()
    print("ready", flush=True)
    for line in sys.stdin:
        texts = [" ".join(jieba.cut(text, cut_all=False)) for text in json.loads(line)]
        print(json.dumps(texts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
