# SPDX-License-Identifier: Apache-2.0
"""Runs a solution on one test, inside the sandbox: /case/code.py, and for a function its name in
/case/name and its arguments, one JSON value a line, on standard input. What the function returns is
written to standard output as eval/benchmarks/lcb/compare.h says; what it prints is not.

The names that solutions may expect to be there are those that lcb_runner imports for them."""

import io
import json
import os
import sys

PRELUDE = "".join(
    f"from {name} import *\n"
    for name in ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random",
                 "statistics", "itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing")
) + "import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics\n" \
    "import itertools, functools, operator, io, sys, json\n"


def tagged(value, top=True):
    """Equal in Python is equal there: a tuple is only a list when it is what was returned."""
    if value is None:
        return {"n": 0}
    if isinstance(value, bool):
        return {"b": value}
    if isinstance(value, int):
        return {"i": str(int(value))}
    if isinstance(value, float):
        return {"f": repr(float(value))}
    if isinstance(value, str):
        return {"s": value}
    if isinstance(value, list) or (top and isinstance(value, tuple)):
        return {"l": [tagged(item, False) for item in value]}
    if isinstance(value, dict):
        return {"d": [[tagged(k, False), tagged(v, False)] for k, v in value.items()]}
    return {"x": type(value).__name__}


def main():
    sys.setrecursionlimit(50000)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    with open("/case/code.py", encoding="utf-8") as file:
        code = file.read()
    name = None
    if os.path.exists("/case/name"):
        with open("/case/name", encoding="utf-8") as file:
            name = file.read()
    scope = {"__name__": "__main__" if name is None else "solution"}
    exec(PRELUDE, scope)
    if name is None:
        exec(compile(code, "code.py", "exec"), scope)
        return
    arguments = [json.loads(line) for line in sys.stdin.read().split("\n")]
    out = os.dup(1)
    os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
    sys.stdout = io.StringIO()
    exec(compile(code, "code.py", "exec"), scope)
    owner = scope["Solution"]() if "class Solution" in code else None
    function = scope[name] if owner is None else getattr(owner, name)
    result = json.dumps(tagged(function(*arguments)))
    with os.fdopen(out, "w") as file:
        file.write(result)


main()
