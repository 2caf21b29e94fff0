# SPDX-License-Identifier: Apache-2.0
"""Selection, specs, builder and step on a faked H200."""

import pickle

import numpy as np
import pytest
import torch


def attention(config, name="model.layers.0.self_attn.attn", **arguments):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import Attention

    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            return Attention(
                32, 128, 0.09, num_kv_heads=8, cache_config=config.cache_config, prefix=name,
                **arguments,
            )
    finally:
        torch.set_default_dtype(torch.float32)


def common_metadata(starts, lengths, padded_tokens=None, pages=40):
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor(starts, dtype=torch.int32)
    lengths = torch.tensor(lengths, dtype=torch.int32)
    tokens = padded_tokens or int(starts[-1])
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
        num_reqs=len(lengths), num_actual_tokens=tokens,
        max_query_len=int((starts[1:] - starts[:-1]).max()), max_seq_len=int(lengths.max()),
        block_table_tensor=torch.zeros(len(lengths), pages, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64), seq_lens_cpu_upper_bound=lengths,
    )


def test_the_named_backend_survives_pickling(engine_config, plugin):
    config = engine_config()
    assert config.attention_config.backend is plugin.named_backend()
    copy = pickle.loads(pickle.dumps(config))
    assert copy.attention_config.backend is plugin.named_backend()


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_other_cache_dtypes_are_refused(engine_config, one_rank, fake_gpu, dtype):
    with pytest.raises(ValueError, match="kv_cache_dtype not supported"):
        attention(engine_config(kv_cache_dtype=dtype))


def test_pages_that_are_no_whole_tiles_are_refused(engine_config, one_rank, fake_gpu):
    with pytest.raises(ValueError, match="block_size not supported"):
        attention(engine_config(block_size=16))


def test_a_gpu_without_kernels_is_refused(engine_config, one_rank, fake_gpu, platform, monkeypatch):
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention import selector

    config = engine_config()
    monkeypatch.setattr(platform, "capability", DeviceCapability(10, 0))
    selector._cached_get_attn_backend.cache_clear()
    with pytest.raises(ValueError, match="compute capability not supported"):
        attention(config)
    selector._cached_get_attn_backend.cache_clear()


def test_a_cache_of_bf16_rows_is_refused_with_the_recipe_named(engine_config, one_rank, fake_gpu):
    recipe = {"mode": "bf16"}
    config = engine_config(additional_config={"bitdecoding": {"recipe": recipe}})
    with pytest.raises(RuntimeError, match="mode bf16 keeps bf16 pages"):
        attention(config)


def test_more_drafts_than_a_decode_takes_are_refused(engine_config, one_rank, fake_gpu):
    drafts = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3}
    with pytest.raises(RuntimeError, match="num_speculative_tokens is 8"):
        attention(engine_config(speculative_config=drafts))


@pytest.mark.parametrize("window", [None, 1024])
def test_a_token_takes_144_bytes(engine_config, one_rank, fake_gpu, window):
    config = engine_config(block_size=128)
    layer = attention(config, per_layer_sliding_window=window)
    spec = layer.get_kv_cache_spec(config)
    for _ in range(2):
        spec = layer.get_attn_backend().customize_spec(spec)
    assert spec.page_size_bytes == spec.block_size * 8 * 144
    assert spec.block_size == 128


def build(config, fake_gpu):
    from vllm.config import set_current_vllm_config
    layer = attention(config)
    backend = layer.get_attn_backend()
    spec = backend.customize_spec(layer.get_kv_cache_spec(config))
    with set_current_vllm_config(config):
        builder = backend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))
    layer.kv_cache = torch.zeros(50, 8, 128, 144, dtype=torch.uint8)
    return layer, builder


def test_a_decode_step_is_a_plan_a_write_and_an_attend(engine_config, one_rank, fake_gpu):
    layer, builder = build(engine_config(block_size=128), fake_gpu)
    metadata = builder.build(0, common_metadata([0, 1, 2, 2], [70, 900, 0], padded_tokens=4))
    assert metadata.prefill == []
    qkv = torch.zeros(4, 48, 128, dtype=torch.bfloat16)
    query, key, value = qkv.split([32, 8, 8], dim=1)
    output = torch.empty(4, 32, 128, dtype=torch.bfloat16)
    layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output)
    assert [name for name, _ in fake_gpu] == ["steps_build", "write", "attend"]
    assert fake_gpu[0][1][2:] == (1, 7)  # query rows of a request, stream
    step = builder.steps._input
    assert (step.num_requests, step.num_tokens, step.block_table_stride) == (3, 4, 40)
    cache = layer.impl._attend.cache
    assert (cache.num_pages, cache.stride_page, cache.stride_head) == (50, 8 * 18432, 18432)
    assert layer.impl._attend.key.stride_token == 48 * 128
    assert layer.impl._attend.num_tokens == 4


def test_profiling_reserves_the_pool_within_the_budget(engine_config, one_rank, fake_gpu):
    layer = attention(engine_config(block_size=128, gpu_memory_utilization=0.5))
    output = torch.ones(4, 32, 128)
    assert layer.impl.pool is None
    layer.impl.forward(layer, output, output, output, None, None, output)
    assert not output.any()
    pool = layer.impl.pool
    budget = int(0.5 * (141 << 30)) - (8 << 30)
    assert pool.total_bytes <= 0.03 * budget < 1.01 * pool.total_bytes
    assert layer.impl.shadow.shape == (pool.num_slots, 8, 2, 16, 128)


def test_runs_of_a_mixed_step():
    from bitdecoding_vllm.cuda.prefill import plan_prefill

    # A decode, a verify, a chunk of 8 rows, two fresh prompts, one behind a prefix, a fresh one.
    rows = [1, 4, 8, 20, 9, 30, 12]
    lengths = [500, 400, 8, 20, 9, 130, 12]
    runs = plan_prefill(
        common_metadata(np.cumsum([0, *rows]).tolist(), lengths), torch.device("cpu"))
    assert [(r.begin, r.end, r.prefix, r.request) for r in runs] == [
        (13, 42, 0, 3), (42, 72, 100, 5), (72, 84, 0, 6)]
    assert runs[0].starts.tolist() == [0, 20, 29] and runs[0].longest == 20
