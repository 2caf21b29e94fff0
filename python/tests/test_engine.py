# SPDX-License-Identifier: Apache-2.0
"""Real engines on a small model: what the cache costs in accuracy, what it saves in memory, and
that serving features do not change texts.

Four engines run one after the other: vLLM's own cache, BF16 pages (which also calibrate the key
means), and FP4 pages with those means.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import (
    assert_same_up_to_ties,
    generate,
    layers,
    metric,
    prompt_logprobs,
    rpc,
    solo,
)

from bitdecoding_vllm import capture

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "The three primary colors are",
]
# Chunks of this many tokens read the tokens before them from pages, as decoding does.
CHUNK = 128
CAPACITY_BYTES = 512 << 20


def captured(path):
    """The rows of a capture, by position; the file holds one request."""
    header = json.loads(path.with_name(path.name + ".json").read_text())
    assert header["format"] == "bitdecoding-logits" and header["version"] == 1
    record = capture.record_type(header["vocab_size"], header["dtype"])
    assert record.itemsize == header["record_bytes"]
    rows = np.fromfile(path, dtype=record)
    assert set(rows["request"]) == {0}
    assert list(rows["position"]) == list(range(len(rows)))
    return SimpleNamespace(header=header, token=rows["token"], logits=rows["logits"])


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def kl_divergence(reference, other):
    """KL(reference || other) of each row, in nats."""
    assert np.array_equal(reference.token, other.token)
    p, q = log_softmax(reference.logits), log_softmax(other.logits)
    return (np.exp(p) * (p - q)).sum(axis=-1)


def capacity(llm):
    return llm.llm_engine.vllm_config.cache_config.num_gpu_blocks * 128


def observe(llm, text, path):
    """The same work in every engine: short texts, and the logits of a long prompt."""
    rpc(llm, "bitdecoding_capture_logits", str(path))
    long = generate(llm, [text], max_tokens=1, prompt_logprobs=0)[0]
    rows = rpc(llm, "bitdecoding_capture_logits")
    assert rows == len(long.prompt_token_ids) - 1
    return SimpleNamespace(
        texts=generate(llm, PROMPTS),
        long=long,
        capture=captured(path),
        capacity=capacity(llm),
        classes={type(layer.impl).__name__ for layer in layers(llm).values()},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


def common(**more):
    return {
        "max_num_batched_tokens": CHUNK,
        "kv_cache_memory_bytes": CAPACITY_BYTES,
        "max_num_seqs": 4,
        **more,
    }


@pytest.fixture(scope="module")
def stock(engine, folder, long_text):
    with engine("stock", **common()) as llm:
        with pytest.raises(Exception, match="keeps vLLM's own KV cache"):
            rpc(llm, "bitdecoding_counters")
        return observe(llm, long_text, folder / "stock.logits")


@pytest.fixture(scope="module")
def bf16(engine, folder, long_text):
    sidecar = folder / "key_shift.safetensors"
    with engine("bf16", {"calibrate_file": str(sidecar)}, **common()) as llm:
        seen = observe(llm, long_text, folder / "bf16.logits")
        saved = rpc(llm, "bitdecoding_save_calibration")
        assert saved["path"] == str(sidecar)
        seen.sidecar, seen.calibrated_tokens = sidecar, saved["tokens"]
        seen.counters = rpc(llm, "bitdecoding_counters")
    return seen


@pytest.fixture(scope="module")
def fp4_engine(engine, bf16):
    recipe = {"key_shift_file": str(bf16.sidecar), "reproducible": True}
    with engine("bitdecoding-nvfp4", recipe, **common()) as llm:
        yield llm


@pytest.fixture(scope="module")
def fp4(fp4_engine, folder, long_text):
    return observe(fp4_engine, long_text, folder / "fp4.logits")


def test_without_a_recipe_layers_are_vllms_own(stock):
    assert stock.classes == {"CPUAttentionBackendImpl"}
    assert stock.capture.header["mode"] == "stock"


def test_captured_logits_are_those_that_vllm_scores(stock):
    logprobs = log_softmax(stock.capture.logits)
    ours = logprobs[np.arange(len(logprobs)), stock.capture.token]
    assert np.abs(ours - prompt_logprobs(stock.long)).max() < 1e-3


def test_bf16_pages_are_near_vllms_own_cache(stock, bf16):
    assert bf16.classes == {"BitdecodingImpl"}
    divergence = kl_divergence(stock.capture, bf16.capture)
    # K and V are rounded to 8 bits of mantissa in one engine and kept in FP32 in the other; the
    # model's logits move by some thousandths, whose squares halved are the divergence.
    assert divergence.mean() < 1e-4
    for ours, theirs in zip(bf16.texts, stock.texts):
        assert_same_up_to_ties(ours, theirs)


def test_calibration_writes_the_key_means_of_every_layer(bf16):
    from safetensors.numpy import load_file

    means = load_file(bf16.sidecar)["key_shift"]
    assert means.shape == (30, 3, 64)
    assert np.isfinite(means).all()
    # Keys have channels far from zero, which is why their means are subtracted at all.
    assert (np.abs(means).max(axis=(1, 2)) > 0.5).all()
    long_tokens = len(bf16.long.prompt_token_ids)
    assert bf16.calibrated_tokens >= long_tokens + 4 * 15


def test_fp4_pages_are_near_bf16_pages(bf16, fp4):
    assert fp4.classes == {"BitdecodingImpl"}
    assert fp4.capture.header["mode"] == "bitdecoding-nvfp4"
    divergence = kl_divergence(bf16.capture, fp4.capture)[CHUNK:]
    # The lower bound says that FP4 was read at all: with the cache in BF16 it is under 1e-4.
    assert 2e-4 < divergence.mean() < 0.05


def test_fp4_pages_answer_like_bf16(bf16, fp4):
    for ours, theirs in zip(fp4.texts, bf16.texts):
        assert_same_up_to_ties(ours, theirs)
    assert "Paris" in fp4.texts[0].outputs[0].text


def test_capacity_counts_the_bf16_pool(bf16, fp4, fp4_engine):
    (pool,) = rpc(fp4_engine, "bitdecoding_status")["pools"]
    assert pool["num_layers"] == 30 and pool["bytes"] > 0
    with_pool = fp4.capacity * CAPACITY_BYTES / (CAPACITY_BYTES + pool["bytes"])
    assert with_pool >= 3.4 * bf16.capacity


def test_status_says_what_runs(fp4_engine):
    status = rpc(fp4_engine, "bitdecoding_status")
    assert status["mode"] == "bitdecoding-nvfp4"
    assert status["library"]["backend"] == "cpu"
    assert status["library"]["sidecar"]["layers"] == 30


def test_a_prefix_hit_reads_like_a_cold_prefill(fp4_engine, long_text):
    (cold,) = solo(fp4_engine, [long_text])
    (hit,) = generate(fp4_engine, [long_text])
    assert cold.num_cached_tokens == 0
    assert hit.num_cached_tokens >= 512
    assert_same_up_to_ties(cold, hit)


def test_requests_at_once_are_as_if_alone(fp4_engine, long_text):
    # Lengths on both sides of chunk, page and group borders.
    ids = fp4_engine.get_tokenizer().encode(long_text)
    prompts = [ids[:61], ids[100:235], ids[200:456], ids[300:327]]
    alone = solo(fp4_engine, prompts)
    assert fp4_engine.reset_prefix_cache()
    together = generate(fp4_engine, prompts)
    for one, other in zip(alone, together):
        assert_same_up_to_ties(one, other)


def test_samples_of_one_prompt_share_its_pages(fp4_engine, long_text):
    ids = fp4_engine.get_tokenizer().encode(long_text)[:150]
    (alone,) = solo(fp4_engine, [ids])
    assert fp4_engine.reset_prefix_cache()
    for request in generate(fp4_engine, [ids] * 4):
        assert_same_up_to_ties(alone, request)


def test_counters_tell_of_steps_and_of_no_fault(fp4_engine, bf16, fp4):
    counters = rpc(fp4_engine, "bitdecoding_counters")
    assert counters["steps"] > 0 and counters["used_slots"] > 0
    assert counters["non_finite"] == 0 and counters["corrupt_scales"] == 0
    assert counters["lost_partial_groups"] == 0
    assert bf16.counters["steps"] > 0 and bf16.counters["used_slots"] == 0
    assert metric(fp4_engine, "vllm:num_preemptions") == 0
