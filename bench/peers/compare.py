#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times this library and another system's operator in one process, in turn: one call of ours, one of the peer.

Both get the same shape, the same number of threads and shuffled pages. `bitdecoding bench ... --peer` runs this;
the last line it prints is a JSON list with one entry a peer.
"""

import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# A peer's idle threads must not spin on the cores that our threads need, nor the other way round.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("verb", choices=("decode", "write", "prefill"))
    parser.add_argument("--peer", choices=("vllm", "ggml", "all"), default="all")
    parser.add_argument("--peer-dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--peer-huge-pages", action="store_true", help="under the peers' caches, as under ours")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--isa", default="")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--context", type=int, default=32768, help="decode: all tokens; else: cached before")
    parser.add_argument("--tokens", type=int, default=512, help="tokens a sequence adds; decode: always 1")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mode", default="bitdecoding-nvfp4")
    parser.add_argument("--recipe", default="")
    parser.add_argument("--arithmetic", default="")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeat", type=int, default=7)
    return parser.parse_args()


def make_ours(args):
    """(one timed call of ours, the object that holds its memory)"""
    from ours import Ours

    prefix, tokens = (args.context - 1, 1) if args.verb == "decode" else (args.context, args.tokens)
    ours = Ours(args, prefix + tokens)
    ours.fill(prefix)
    ours.step(prefix, tokens)
    ours.write()
    if args.verb == "write":
        return ours.write, ours
    ours.attend()
    if not torch.isfinite(ours.output).all():
        sys.exit("compare.py: our output holds values that are not finite or rows that were not written.")
    return ours.attend, ours


def make_vllm(args):
    import vllm_cpu_attention as vllm

    dtype = vllm.DTYPES[args.peer_dtype]
    shape = (args.q_heads, args.kv_heads, args.head_dim, dtype, args.page_size)
    if args.verb == "write":
        return f"vllm_cpu_cache_write:{args.peer_dtype}", vllm.make_write(args.batch, args.context, args.tokens, *shape)
    tokens = 1 if args.verb == "decode" else args.tokens
    total = args.context if args.verb == "decode" else args.context + args.tokens
    vllm.check(dtype, args.page_size, 1 if args.verb == "decode" else args.page_size + 1)
    return f"vllm_cpu_attention:{args.peer_dtype}", vllm.make_attend(
        args.batch, total, tokens, *shape, huge_pages=args.peer_huge_pages)  # fmt: skip


def make_ggml(args):
    import ggml_flash_attn as ggml

    if args.verb != "decode":
        sys.exit(f"compare.py: the peer ggml is timed for decode only; use --peer vllm for {args.verb}.")
    ggml.check("f16", "token")
    return "ggml_flash_attn_ext:f16", ggml.make_decode(
        args.batch, args.context, args.q_heads, args.kv_heads, args.head_dim, "f16", args.threads,
        huge_pages=args.peer_huge_pages)  # fmt: skip


def timed(call):
    cpu, start = time.process_time_ns(), time.perf_counter_ns()
    call()
    wall = time.perf_counter_ns() - start
    return wall / 1e3, (time.process_time_ns() - cpu) / 1e3


def interleave(ours, peer, seconds, repeat):
    """Two lists of (wall, CPU) microseconds, of `repeat` or more calls in turn."""
    for call in (ours, peer, ours, peer):
        call()
    rows = ([], [])
    end = time.perf_counter() + seconds
    while len(rows[0]) < repeat or time.perf_counter() < end:
        rows[0].append(timed(ours))
        rows[1].append(timed(peer))
    return rows


def summary(rows, prefix=""):
    wall, cpu = zip(*rows)
    return {f"{prefix}us_median": round(statistics.median(wall), 2), f"{prefix}us_min": round(min(wall), 2),
            f"{prefix}us_max": round(max(wall), 2),
            f"{prefix}us_cpu_median": round(statistics.median(cpu), 2)}  # fmt: skip


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    ours, keep = make_ours(args)
    wanted = {"vllm": ["vllm"], "ggml": ["ggml"], "all": ["vllm", "ggml"] if args.verb == "decode" else ["vllm"]}
    results = []
    for name in wanted[args.peer]:
        label, peer = {"vllm": make_vllm, "ggml": make_ggml}[name](args)
        ours_rows, peer_rows = interleave(ours, peer, args.seconds, args.repeat)
        entry = {"name": label, "huge_pages": args.peer_huge_pages, **summary(peer_rows),
                 **summary(ours_rows, "ours_"), "calls": len(ours_rows)}  # fmt: skip
        entry["ratio"] = round(entry["us_median"] / entry["ours_us_median"], 3)
        entry["ratio_of_min"] = round(entry["us_min"] / entry["ours_us_min"], 3)
        entry["ratio_of_cpu"] = round(entry["us_cpu_median"] / entry["ours_us_cpu_median"], 3)
        results.append(entry)
        del peer
    del keep
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
