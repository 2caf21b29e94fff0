#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the rows of a results file as the Markdown tables of docs/benchmarks.md: table.py docs/results/FILE.json"""

import json
import sys


def ms(us):
    return f"{us / 1e3:.2f}" if us >= 1e4 else f"{us / 1e3:.3f}"


def table(title, head, rows):
    if not rows:
        return
    print(f"\n### {title}\n")
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


def shape(row):
    return f"{row['q_heads']}/{row['kv_heads']} D{row['head_dim']}"


def ratios(row, name):
    for peer in row.get("peers", ()):
        if peer["name"].startswith(name):
            return f"{ms(peer['us_median'])} ({ms(peer['us_min'])})", (
                f"{peer['ratio']:.1f} / {peer['ratio_of_min']:.1f} / {peer['ratio_of_cpu']:.1f}")  # fmt: skip
    return "", ""


def decode_cells(row):
    return [shape(row), row["batch"], row["threads"], row["arithmetic"],
            f"{ms(row['us_median'])} ({ms(row['us_min'])})", ms(row["us_cpu_median"]),
            f"{row['cpu_read_gbps']:.2f} of {row['cpu_ceiling_gbps']:.1f}",
            *ratios(row, "vllm"), *ratios(row, "ggml"), f"{row['relative_error']:.1e}"]  # fmt: skip


def main():
    rows = json.load(open(sys.argv[1]))
    suite = {}
    for row in rows:
        suite.setdefault(row["suite"], []).append(row)
    # Ratios: of the medians / of the minima / of the CPU times.
    table("Decode at 32,768 tokens", ["heads", "batch", "threads", "arithmetic", "ms median (min)", "CPU ms",
          "GB/s by CPU time", "vLLM BF16 ms", "ratio", "ggml F16 ms", "ratio", "relative error"],
          [decode_cells(r) for r in suite.get("decode", ())])  # fmt: skip
    table("Short contexts, beside vLLM in FP32", ["heads", "batch", "context", "ms median (min)", "CPU ms",
          "plan us", "write us", "vLLM FP32 ms", "ratio"],
          [[shape(r), r["batch"], r["context"], f"{ms(r['us_median'])} ({ms(r['us_min'])})",
            ms(r["us_cpu_median"]), r["us_plan_median"], r["us_write_median"], *ratios(r, "vllm")]
           for r in suite.get("short", ())])  # fmt: skip
    table("Writes", ["heads", "tokens", "threads", "ms median (min)", "M elements/s, median (best)",
          "vLLM BF16 copy ms", "ratio"],
          [[shape(r), r["tokens"], r["threads"], f"{ms(r['us_median'])} ({ms(r['us_min'])})",
            f"{r['melements_per_s']:.0f} ({r['melements_per_s_best']:.0f})", *ratios(r, "vllm")]
           for r in suite.get("write", ())])  # fmt: skip
    table("Prefill, a chunk of 512 tokens", ["heads", "cached before", "threads", "peer's type",
          "ms median (min)", "GFLOP/s", "vLLM ms", "ratio", "relative error"],
          [[shape(r), r["context"], r["threads"], r["peer"]["name"].split(":")[1],
            f"{ms(r['us_median'])} ({ms(r['us_min'])})", r["gflops"], *ratios(r, "vllm"),
            f"{r['relative_error']:.1e}"] for r in suite.get("prefill", ())])  # fmt: skip
    modes = ("bf16", "fp8", "nvfp4", "bitdecoding-nvfp4", "bitdecoding-mxfp4")
    table("Capacity: tokens a GiB (times bf16)", ["KV heads, head_dim", *modes],
          [[f"{r['kv_heads']}, {r['head_dim']}",
            *(f"{r[m]['tokens_per_gib']:.0f} ({r[m]['times_bf16']})" for m in modes)]
           for r in suite.get("capacity", ())])  # fmt: skip


if __name__ == "__main__":
    main()
