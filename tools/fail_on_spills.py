#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a compiler and fails when a decode kernel of the CUDA backend spills registers.

    tools/fail_on_spills.py COMPILER ARGUMENT...

The build puts this before nvcc (BITDECODING_CUDA_FAIL_ON_SPILLS). ptxas must be asked for its warnings with
-warn-spills. The compiler's words and its exit code are passed on; a spill turns 0 into 1 and removes the object that
the compiler was told to write.
"""

import os
import re
import subprocess
import sys

SPILL = re.compile(r"Registers are spilled to local memory in function '(\S+)', (.*)")
# DecodeTraits<format, head_dim, column_blocks, ...> in a mangled name.
TRAITS = re.compile(r"decode_kernel.*DecodeTraitsIL\w+?E\d+ELi(\d+)ELi(\d+)E")


def spills(words):
    """(head_dim, column blocks, what ptxas said) of each decode kernel that spills."""
    for name, what in SPILL.findall(words):
        traits = TRAITS.search(name)
        if traits:
            yield int(traits.group(1)), int(traits.group(2)), what


def main(command):
    if not command:
        print(__doc__.splitlines()[2].strip(), file=sys.stderr)
        return 2
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    found = list(spills(done.stderr))
    for head_dim, columns, what in found:
        print(f"error: the decode kernel for head_dim {head_dim} and {columns} column blocks spills: {what}. Give it "
              "fewer live values or fewer warps, or build with -DBITDECODING_CUDA_FAIL_ON_SPILLS=OFF.", file=sys.stderr)
    if done.returncode != 0 or not found:
        return done.returncode
    if "-o" in command:
        output = command[command.index("-o") + 1]
        if os.path.exists(output):
            os.remove(output)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
