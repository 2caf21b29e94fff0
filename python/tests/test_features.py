# SPDX-License-Identifier: Apache-2.0
"""Serving features, each in an engine of its own: they must not change what is generated."""

import pytest
from helpers import assert_same_up_to_ties, generate, layers, metric, rpc, solo

# The arithmetic with the least rounding of its own, so that texts can be compared closely.
RECIPE = {"key_shift": False, "reproducible": True, "arithmetic": "wide"}


def test_preemption_and_odd_chunks(engine, long_text):
    """Ten pages for four requests that need twelve; chunks that end inside groups."""
    with engine(
        "bitdecoding-nvfp4",
        RECIPE,
        block_size=64,
        num_gpu_blocks_override=10,
        max_num_batched_tokens=100,
        max_model_len=512,
        # BF16 slots for every tail of the four: the floor for four alone would drop some, and what
        # is then read from pages differs.
        max_num_seqs=12,
    ) as llm:
        ids = llm.get_tokenizer().encode(long_text)
        prompts = [ids[start : start + 95] for start in (0, 120, 240, 360)]
        alone = solo(llm, prompts, max_tokens=44)
        assert metric(llm, "vllm:num_preemptions") == 0
        assert llm.reset_prefix_cache()
        together = generate(llm, prompts, max_tokens=44)
        assert metric(llm, "vllm:num_preemptions") > 0
        for one, other in zip(alone, together):
            assert_same_up_to_ties(one, other)
        # One prompt over many pages and chunks, its groups cut by every chunk border.
        (chunked,) = solo(llm, [ids[:333]])
        (again,) = solo(llm, [ids[:333]])
        assert chunked.outputs[0].token_ids == again.outputs[0].token_ids
        counters = rpc(llm, "bitdecoding_counters")
        assert counters["missing_tokens"] == counters["refused_groups"] == 0
        assert counters["corrupt_scales"] == 0


def test_a_starved_pool_still_serves(engine, long_text):
    """Four requests whose tails do not fit in the floor of one: read from pages, and counted."""
    with engine(
        "bitdecoding-nvfp4",
        {**RECIPE, "shadow_pool_share": 0.0},
        max_num_seqs=4,
        max_model_len=512,
    ) as llm:
        ids = llm.get_tokenizer().encode(long_text)
        question = llm.get_tokenizer().encode(" The capital of France is")
        prompts = [ids[start : start + 220] + question for start in (0, 20, 40, 60)]
        requests = generate(llm, prompts, max_tokens=24)
        assert all(len(request.outputs[0].token_ids) == 24 for request in requests)
        counters = rpc(llm, "bitdecoding_counters")
        assert counters["missing_tokens"] > 0
        assert counters["lost_partial_groups"] == 0
        (pool,) = rpc(llm, "bitdecoding_status")["pools"]
        assert counters["used_slots"] <= pool["num_slots"] == 12


def test_skipped_layers_are_vllms_own(engine):
    with engine(
        "bitdecoding-nvfp4", RECIPE, kv_cache_dtype_skip_layers=["0", "29"], max_model_len=512
    ) as llm:
        names = {}
        for name, layer in layers(llm).items():
            names.setdefault(type(layer.impl).__name__, set()).add(name.split(".")[2])
        assert names["CPUAttentionBackendImpl"] == {"0", "29"}
        assert names["BitdecodingImpl"] == {str(i) for i in range(1, 29)}
        (request,) = generate(llm, ["The capital of France is"])
        assert "Paris" in request.outputs[0].text
        (pool,) = rpc(llm, "bitdecoding_status")["pools"]
        assert pool["num_layers"] == 28


def test_a_traced_model_calls_the_layers(engine, monkeypatch):
    """What torch.compile does, without the minutes of code generation: Dynamo traces the model, and
    the two calls of a layer stay opaque operations."""
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    with engine(
        "bitdecoding-nvfp4", RECIPE, enforce_eager=False, max_model_len=512
    ) as llm:
        config = llm.llm_engine.vllm_config.compilation_config
        assert config.mode.name == "DYNAMO_TRACE_ONCE" and config.backend == "eager"
        (request,) = generate(llm, ["The capital of France is"])
        assert "Paris" in request.outputs[0].text
        assert rpc(llm, "bitdecoding_counters")["steps"] >= 16


@pytest.mark.parametrize(
    "mode, token_bytes, dtype",
    [
        ("bitdecoding-mxfp4", 68, "float32"),
        ("nvfp4", 72, "float32"),
        ("fp8", 128, "bfloat16"),
    ],
)
def test_other_page_formats_serve(engine, mode, token_bytes, dtype):
    overrides = {"key_shift": False} if mode == "bitdecoding-mxfp4" else {}
    with engine(mode, overrides, dtype=dtype, max_model_len=512) as llm:
        assert {type(layer.impl).__name__ for layer in layers(llm).values()} == {"BitdecodingImpl"}
        layer = next(iter(layers(llm).values()))
        page = layer.kv_cache[0]
        assert page.numel() * page.element_size() == 128 * 3 * token_bytes
        (request,) = generate(llm, ["The capital of France is"], max_tokens=8)
        assert "Paris" in request.outputs[0].text
        assert rpc(llm, "bitdecoding_status")["mode"] == mode
