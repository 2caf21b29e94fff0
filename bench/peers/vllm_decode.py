# SPDX-License-Identifier: Apache-2.0
"""Decode speed of one vLLM engine, several of which may measure in turn on one GPU.

    vllm_decode.py NAME '{"attention_backend": "FLASH_ATTN", "kv_gb": 41}' --group 3 --folder DIR

Engines of a group (--group, one process each) start at once, wait until all are ready in DIR, and then
measure one after another, so that they are compared on the same device at the same hour. Steps are
timed while all requests decode. Prompts are random tokens, so a model of dummy weights will do: its
folder needs a config.json alone. One JSON line a batch, on stdout and in DIR/results.jsonl.
"""

import argparse
import fcntl
import json
import os
import random
import sys
import time
from pathlib import Path

SETTLED = 24  # tokens of every request before steps are timed
READY_SECONDS = 150


def parse(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("arguments", type=json.loads, help="of vllm.LLM; kv_gb: GiB of the cache")
    parser.add_argument("--model", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--group", type=int, default=1)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--batches", default="1,8")
    return parser.parse_args(argv)


def engine(options):
    from vllm import LLM

    settings = {
        "model": options.model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": options.context + 1024,
        "max_num_batched_tokens": options.context + 1024,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.12,  # kv_cache_memory_bytes decides
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        "seed": 0,
        **options.arguments,
    }
    settings["kv_cache_memory_bytes"] = int(settings.pop("kv_gb") * 2**30)
    return LLM(**settings).llm_engine


def sampling(tokens):
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def warm_up(llm, prompt):
    llm.add_request("warm-up", {"prompt_token_ids": prompt}, sampling(20))
    while llm.has_unfinished_requests():
        llm.step()


def measure(llm, prompts, tokens):
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        llm.add_request(f"{len(prompts)}.{number}", {"prompt_token_ids": prompt}, sampling(tokens))
    counts, times, first, finished = {}, [], None, False
    while llm.has_unfinished_requests():
        for output in llm.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
            finished = finished or output.finished
        now = time.perf_counter()
        first = first or (counts and now - begin) or None
        if len(counts) == len(prompts) and min(counts.values()) >= SETTLED and not finished:
            times.append((now, sum(counts.values())))
    seconds, decoded = (times[-1][i] - times[0][i] for i in (0, 1))
    gaps = sorted(b[0] - a[0] for a, b in zip(times, times[1:]))
    return {
        "B": len(prompts),
        "ttft_s": round(first, 3),
        "tok_s": round(decoded / seconds, 1),
        "ms_per_step_mean": round(seconds / (decoded / len(prompts)) * 1e3, 3),
        "ms_step_median": round(gaps[len(gaps) // 2] * 1e3, 3),
        "steps": len(times),
    }


def wait_for_group(options):
    (options.folder / f"ready.{options.name}").touch()
    deadline = time.time() + READY_SECONDS
    while len(list(options.folder.glob("ready.*"))) < options.group and time.time() < deadline:
        time.sleep(0.2)


def main(argv):
    options = parse(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    llm = engine(options)
    wait_for_group(options)
    rng = random.Random(1)
    with open(options.folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number, batch in enumerate(int(b) for b in options.batches.split(",")):
            prompts = [
                [rng.randrange(1000, 150000) for _ in range(options.context)] for _ in range(batch)
            ]
            if number == 0:
                warm_up(llm, prompts[0][:2000])
            row = {"name": options.name, "ctx": options.context}
            row |= measure(llm, prompts, options.tokens)
            print(json.dumps(row), flush=True)
            with open(options.folder / "results.jsonl", "a") as results:
                results.write(json.dumps(row) + "\n")
    os._exit(0)  # an engine takes seconds to leave, and others wait for the lock


if __name__ == "__main__":
    main(sys.argv[1:])
