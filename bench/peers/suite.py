#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the benches that docs/benchmarks.md reports and writes their rows, with the machine's load, to one file.

Usage: suite.py build/release/bin/bitdecoding docs/results/cpu-<cpu>-<date>.json [--only decode]
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

SHAPES = ((32, 8, 128), (9, 3, 64))


def shape_flags(shape):
    return ["--q-heads", str(shape[0]), "--kv-heads", str(shape[1]), "--head-dim", str(shape[2])]


def decode():
    for shape in SHAPES:
        for batch, threads, arithmetic, peer in (
            (1, 1, "int8", "all"), (1, 2, "int8", "vllm"), (4, 1, "int8", "vllm"), (4, 2, "int8", "vllm"),
            (1, 1, "wide", "none"), (4, 2, "wide", "none"),
        ):  # fmt: skip
            yield ["decode", *shape_flags(shape), "--context", "32768", "--batch", str(batch), "--threads",
                   str(threads), "--arithmetic", arithmetic, "--peer", peer]  # fmt: skip


def short():
    for batch in (1, 4):
        for context in (1024, 2048, 3072, 4096, 6144):
            yield ["decode", *shape_flags(SHAPES[1]), "--context", str(context), "--batch", str(batch),
                   "--threads", "2", "--peer", "vllm", "--peer-dtype", "fp32"]  # fmt: skip


def write():
    for shape in SHAPES:
        for context, tokens in ((0, 512), (1000, 1)):
            yield ["write", *shape_flags(shape), "--context", str(context), "--tokens", str(tokens),
                   "--peer", "vllm"]  # fmt: skip


def prefill():
    for shape in SHAPES:
        for context in (0, 4096):
            for dtype in ("fp32", "bf16"):
                yield ["prefill", *shape_flags(shape), "--context", str(context), "--tokens", "512",
                       "--threads", "2", "--peer", "vllm", "--peer-dtype", dtype]  # fmt: skip


def capacity():
    for shape in SHAPES:
        yield ["capacity", *shape_flags(shape)[2:]]


SUITES = {"decode": decode, "short": short, "write": write, "prefill": prefill, "capacity": capacity}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--only", choices=SUITES, nargs="+", default=list(SUITES))
    parser.add_argument("--seconds", default="2", help="time of each measurement")
    args = parser.parse_args()
    rows = json.loads(args.output.read_text()) if args.output.is_file() else []
    for name in args.only:
        rows = [row for row in rows if row["suite"] != name]
        for command in SUITES[name]():
            command += [] if name == "capacity" else ["--seconds", args.seconds]
            load = round(os.getloadavg()[0], 2)
            done = subprocess.run([args.program, "bench", *command, "--json"], capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"bitdecoding bench {' '.join(command)} failed: {done.stderr.strip()}")
            row = {"suite": name, "command": "bitdecoding bench " + " ".join(command), "load": load,
                   **json.loads(done.stdout)}  # fmt: skip
            rows.append(row)
            print(row["command"], row.get("us_median"), row.get("us_cpu_median"), row.get("ratio"), flush=True)
            args.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
