# SPDX-License-Identifier: Apache-2.0
"""The peers of the CUDA decode bench, on the same shapes: cuDNN through torch's SDPA (contiguous), and
FlashAttention 3 in BF16 and FP8 (paged) from the shared object in vLLM's wheel.

    python3 cuda_attention.py [--fa3 PATH/_vllm_fa3_C.abi3.so] [--repeat N] SHAPE...

A shape is BATCHxCONTEXTxQHEADSxKVHEADSxHEAD_DIMxQLEN. CUDA-graph replays between events, each over
several layers' caches beyond L2, median. Prints one JSON object a line.
"""

import argparse
import json

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PAGE = 128


def time_graph(enqueue, layers, repeat):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(layers):
            enqueue(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(layers):
            enqueue(layer)
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / layers)
    times.sort()
    return times[len(times) // 2], times[0]


def put(peer, shape, result):
    print(json.dumps({"bench": "decode", "peer": peer, "name": shape,
                      "us_median": round(result[0], 2), "us_min": round(result[1], 2)}), flush=True)


def sdpa(shape, batch, context, heads, kv_heads, dim, qlen, repeat):
    size = batch * context * kv_heads * dim * 4
    layers = max(1, min(32, (400 << 20) // size))
    kv = [torch.randn(2, batch, kv_heads, context, dim, device="cuda", dtype=torch.bfloat16)
          for _ in range(layers)]
    # Query heads of one KV head become query rows: what a decode kernel does with grouped heads.
    q = torch.randn(batch, kv_heads, heads // kv_heads * qlen, dim, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        put("cudnn_bf16", shape, time_graph(
            lambda i: torch.nn.functional.scaled_dot_product_attention(q, kv[i][0], kv[i][1]), layers, repeat))


def fa3(shape, batch, context, heads, kv_heads, dim, qlen, repeat, fp8):
    ops = torch.ops._vllm_fa3_C
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    size = batch * context * kv_heads * dim * (2 if fp8 else 4)
    layers = max(1, min(32, (400 << 20) // size))
    pages = (context + PAGE - 1) // PAGE
    kv = []
    for _ in range(layers):
        k = torch.randn(batch * pages, PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16).to(dtype)
        v = torch.randn(batch * pages, PAGE, kv_heads, dim, device="cuda", dtype=torch.bfloat16).to(dtype)
        kv.append((k, v))
    q = torch.randn(batch * qlen, heads, dim, device="cuda", dtype=torch.bfloat16).to(dtype)
    table = torch.randperm(batch * pages, device="cuda").to(torch.int32).view(batch, pages)
    starts = torch.arange(0, batch * qlen + 1, qlen, device="cuda", dtype=torch.int32)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    scale = torch.ones(batch, kv_heads, device="cuda") if fp8 else None
    out = torch.empty(batch * qlen, heads, dim, device="cuda", dtype=torch.bfloat16)
    best = None
    for splits in (0, 1, 2, 4, 8, 16, 32):
        meta = ops.get_scheduler_metadata(batch, qlen, context, heads, kv_heads, dim, dim, dtype, lengths, starts,
                                          None, None, None, None, PAGE, 0, True, -1, -1, False, splits, None, 0)

        def run(i, splits=splits, meta=meta):
            ops.fwd(q, kv[i][0], kv[i][1], None, None, None, out, starts, None, None, None, lengths, qlen, context,
                    table, None, None, None, None, None, scale, scale, scale, dim ** -0.5, True, -1, -1, 0.0,
                    True, meta, splits, None, 0, None, 1, 0, None)

        result = time_graph(run, layers, repeat)
        best = result if best is None or result[0] < best[0] else best
    put("fa3_fp8" if fp8 else "fa3_bf16", shape, best)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fa3")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("shapes", nargs="+")
    args = parser.parse_args()
    if args.fa3:
        torch.ops.load_library(args.fa3)
    for shape in args.shapes:
        numbers = [int(x) for x in shape.split("x")]
        runs = [lambda: sdpa(shape, *numbers, args.repeat)]
        if args.fa3:
            runs.append(lambda: fa3(shape, *numbers, args.repeat, False))
            runs.append(lambda: fa3(shape, *numbers, args.repeat, True))
        for run in runs:
            try:
                run()
            except Exception as error:  # one peer's refusal should not hide the others' figures
                print(json.dumps({"name": shape, "error": str(error)[:300]}), flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
