#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times ggml's CPU flash attention (ggml_flash_attn_ext, the op llama.cpp decodes with), through ctypes.

The libraries come from the package libggml-python: built for AVX2, FMA and F16C. One query token a sequence,
no mask. The cache lies as in llama.cpp: one row of all KV heads a token (--layout token), or each head's
tokens together (--layout head). Threads live in ggml's own pool, made once, outside the timed call.
"""

import argparse
import ctypes as c
import importlib.util
import json
import mmap
import pathlib
import statistics
import sys
import time

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
# Relative error allowed against float64 over the unquantized inputs: f16 rounds q, k, v and the running sum;
# q8_0 and q4_0 lose what their formats lose. A wrong layout is off by about 1.
LIMITS = {"f32": 1e-5, "f16": 5e-3, "bf16": 2e-2, "q8_0": 2e-2, "q4_0": 2e-1}


class InitParams(c.Structure):
    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


class Plan(c.Structure):  # ggml_cplan
    _fields_ = [("work_size", c.c_size_t), ("work_data", c.c_void_p), ("n_threads", c.c_int),
                ("threadpool", c.c_void_p), ("abort_callback", c.c_void_p), ("abort_callback_data", c.c_void_p),
                ("use_ref", c.c_bool)]  # fmt: skip


class PoolParams(c.Structure):  # ggml_threadpool_params, 512 = GGML_MAX_N_THREADS
    _fields_ = [("cpumask", c.c_bool * 512), ("n_threads", c.c_int), ("prio", c.c_int), ("poll", c.c_uint32),
                ("strict_cpu", c.c_bool), ("paused", c.c_bool)]  # fmt: skip


def load():
    """(ggml-base, ggml-cpu) with the types of the few functions used."""
    spec = importlib.util.find_spec("libggml")
    if spec is None:
        sys.exit("ggml_flash_attn.py: the package libggml-python is not installed; run tools/setup/venv.sh.")
    folder = pathlib.Path(spec.origin).parent / "lib64"
    base, cpu = c.CDLL(str(folder / "libggml-base.so"), c.RTLD_GLOBAL), c.CDLL(str(folder / "libggml-cpu.so"))
    p, i64, size, f = c.c_void_p, c.c_int64, c.c_size_t, c.c_float
    for library, name, result, *arguments in (
        (base, "ggml_init", p, InitParams), (base, "ggml_free", None, p), (base, "ggml_get_data", p, p),
        (base, "ggml_new_tensor_4d", p, p, c.c_int, i64, i64, i64, i64), (base, "ggml_new_graph", p, p),
        (base, "ggml_view_4d", p, p, p, i64, i64, i64, i64, size, size, size, size),
        (base, "ggml_flash_attn_ext", p, p, p, p, p, p, f, f, f), (base, "ggml_row_size", size, c.c_int, i64),
        (base, "ggml_build_forward_expand", None, p, p),
        (base, "ggml_quantize_chunk", size, c.c_int, p, p, i64, i64, i64, p),
        (base, "ggml_threadpool_params_default", PoolParams, c.c_int), (cpu, "ggml_cpu_init", None),
        (cpu, "ggml_threadpool_new", p, c.POINTER(PoolParams)), (cpu, "ggml_threadpool_free", None, p),
        (cpu, "ggml_graph_plan", Plan, p, c.c_int, p), (cpu, "ggml_graph_compute", c.c_int, p, c.POINTER(Plan)),
    ):  # fmt: skip
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_cpu_init()
    return base, cpu


def huge_memory(size):
    """`size` bytes aligned to 2 MiB, for which the kernel is asked for huge pages before they are touched."""
    memory = np.empty(size + (2 << 20), np.uint8)
    memory = memory[-memory.ctypes.data % (2 << 20) :][:size]
    madvise = c.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [c.c_void_p, c.c_size_t, c.c_int]
    if madvise(memory.ctypes.data, size // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE) != 0:
        raise OSError(c.get_errno(), "madvise(MADV_HUGEPAGE) failed; the kernel may be without huge pages")
    return memory


class Decode:
    """One decode call; `run` computes it, `output` holds [batch, q_heads, head_dim]. `close` frees the memory."""

    def __init__(self, batch, context, q_heads, kv_heads, head_dim, dtype="f16", threads=1, layout="token", seed=0,
                 huge_pages=False):  # fmt: skip
        self.base, self.cpu = base, cpu = load()
        kind, rng = TYPES[dtype], np.random.default_rng(seed)
        row, width = base.ggml_row_size(kind, head_dim), kv_heads * head_dim
        size = 2 * batch * context * kv_heads * row + (64 << 20)
        # ggml takes the caller's memory; without it, ggml asks malloc and gets small pages.
        self.memory = huge_memory(size) if huge_pages else None
        self.ctx = base.ggml_init(InitParams(size, self.memory.ctypes.data if huge_pages else None, False))
        query = rng.standard_normal((batch, q_heads, head_dim), dtype=np.float32)
        # ggml names the fastest dimension first.
        q = base.ggml_new_tensor_4d(self.ctx, TYPES["f32"], head_dim, 1, q_heads, batch)
        c.memmove(base.ggml_get_data(q), query.ctypes.data, query.nbytes)
        self.inputs, views = [query], []
        for _ in range(2):
            store = base.ggml_new_tensor_4d(self.ctx, kind, width, context, batch, 1)
            start, keep = base.ggml_get_data(store), []
            for sequence in range(batch):
                rows = rng.standard_normal((context, kv_heads, head_dim), dtype=np.float32)
                laid = rows if layout == "token" else np.ascontiguousarray(rows.swapaxes(0, 1))
                base.ggml_quantize_chunk(kind, laid.ctypes.data, start + sequence * context * kv_heads * row, 0,
                                         context * kv_heads, head_dim, None)  # fmt: skip
                if batch * context <= 4096:  # kept for check() only
                    keep.append(rows)
            self.inputs.append(keep)
            token, head = (kv_heads * row, row) if layout == "token" else (row, context * row)
            views.append(base.ggml_view_4d(self.ctx, store, head_dim, context, kv_heads, batch, token, head,
                                           context * kv_heads * row, 0))  # fmt: skip
        out = base.ggml_flash_attn_ext(self.ctx, q, *views, None, head_dim**-0.5, 0.0, 0.0)
        self.graph = base.ggml_new_graph(self.ctx)
        base.ggml_build_forward_expand(self.graph, out)
        self.pool = cpu.ggml_threadpool_new(c.byref(base.ggml_threadpool_params_default(threads)))
        self.plan = cpu.ggml_graph_plan(self.graph, threads, self.pool)
        self.work = np.empty(self.plan.work_size + 64, np.uint8)
        self.plan.work_data = self.work.ctypes.data
        # The result has the heads before the token: [head_dim, q_heads, 1, batch].
        memory = (c.c_float * query.size).from_address(base.ggml_get_data(out))
        self.output = np.frombuffer(memory, np.float32).reshape(query.shape)
        self.kv_bytes = 2 * batch * context * kv_heads * row

    def run(self):
        status = self.cpu.ggml_graph_compute(self.graph, c.byref(self.plan))
        if status != 0:
            raise RuntimeError(f"ggml_graph_compute returned {status}; 0 was expected.")

    def close(self):
        self.cpu.ggml_threadpool_free(self.pool)
        self.base.ggml_free(self.ctx)


def make_decode(batch, context, q_heads, kv_heads, head_dim, dtype="f16", threads=1, layout="token",
                huge_pages=False):  # fmt: skip
    """A function of no arguments that runs ggml's attention once and returns its output."""
    decode = Decode(batch, context, q_heads, kv_heads, head_dim, dtype, threads, layout, huge_pages=huge_pages)

    def once():
        decode.run()
        return decode.output

    return once


def check(dtype, layout):
    """The timed op against attention in float64: a wrong set-up must not pass as a time."""
    decode = Decode(2, 512, 6, 2, 64, dtype, 2, layout, seed=1)
    decode.run()
    query, key, value = (np.asarray(x, np.float64) for x in decode.inputs)
    key, value = (np.repeat(x, 3, axis=2) for x in (key, value))
    scores = np.einsum("bhd,bthd->bht", query, key) / 8
    p = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bht,bthd->bhd", p / p.sum(-1, keepdims=True), value)
    error = np.linalg.norm(decode.output - wanted) / np.linalg.norm(wanted)
    decode.close()
    if not error <= LIMITS[dtype]:
        sys.exit(f"ggml's op gives a relative error of {error:.2e} with {dtype}; at most {LIMITS[dtype]} was expected.")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=TYPES, nargs="+", default=["f16"], help="type of the cache")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--layout", choices=("token", "head"), default="token")
    parser.add_argument("--huge-pages", action="store_true", help="huge pages under the cache")
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each measurement")
    args = parser.parse_args()
    for dtype in args.dtype:
        check(dtype, args.layout)
        for threads in args.threads:
            decode = Decode(args.batch, args.context, args.q_heads, args.kv_heads, args.head_dim, dtype, threads,
                            args.layout, huge_pages=args.huge_pages)  # fmt: skip
            times = []
            end = time.perf_counter() + args.seconds
            while len(times) < 9 or time.perf_counter() < end:
                start = time.perf_counter_ns()
                decode.run()
                times.append((time.perf_counter_ns() - start) / 1e3)
            times = times[2:]
            row = {"peer": "ggml_flash_attn_ext", "dtype": dtype, "threads": threads, "batch": args.batch,
                   "context": args.context, "q_heads": args.q_heads, "kv_heads": args.kv_heads,
                   "head_dim": args.head_dim, "layout": args.layout, "huge_pages": args.huge_pages,
                   "us_median": round(statistics.median(times), 1),
                   "us_min": round(min(times), 1), "us_max": round(max(times), 1), "calls": len(times),
                   "kv_bytes": decode.kv_bytes}  # fmt: skip
            row["gb_per_s"] = round(row["kv_bytes"] / row["us_median"] / 1e3, 2)
            decode.close()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
