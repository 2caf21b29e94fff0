# SPDX-License-Identifier: Apache-2.0
"""Engines that cannot be served stop with a sentence, before weights load.

The model's folder holds no weights: an engine that gets as far as loading them fails with another
error, so each of these texts proves that the refusal came first.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hollow(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hollow") / "SmolLM2-135M-Instruct"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return str(folder)


def refusal(engine, mode, overrides=None, **arguments):
    with pytest.raises(Exception) as caught:
        with engine(mode, overrides, **arguments):
            pass
    return str(caught.value)


def test_an_engine_that_is_served_gets_to_the_weights(engine, hollow):
    text = refusal(engine, "bitdecoding-nvfp4", {"key_shift": False}, model=hollow)
    assert "Cannot find any model weights" in text


def test_nvfp4_without_a_recipe_says_both_ways_out(engine, hollow):
    text = refusal(engine, "stock", model=hollow, kv_cache_dtype="nvfp4")
    assert "calibrate_file" in text and '"key_shift": false' in text


def test_a_broken_recipe(engine, hollow):
    text = refusal(engine, "bitdecoding-nvfp4", {"key_shfit": False}, model=hollow)
    assert "key_shfit" in text and "additional_config" in text


def test_a_cache_dtype_of_another_mode(engine, hollow):
    text = refusal(engine, "fp8", model=hollow, kv_cache_dtype="auto")
    assert "need --kv-cache-dtype fp8_e4m3" in text and "'auto'" in text


def test_pages_that_are_no_whole_tiles(engine, hollow):
    text = refusal(engine, "bitdecoding-nvfp4", {"key_shift": False}, model=hollow, block_size=32)
    assert "--block-size is 32" in text and "multiple of 64" in text


def test_a_sidecar_of_another_model(engine, hollow, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "key_shift.safetensors"
    means = np.random.default_rng(1).normal(size=(32, 8, 128)).astype(np.float32)
    save_file({"key_shift": means}, path)
    text = refusal(engine, "bitdecoding-nvfp4", {"key_shift_file": str(path)}, model=hollow)
    assert "32" in text and "30" in text


def test_outer_scales_of_another_model(engine, hollow, tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "outer.safetensors"
    save_file({"value_outer": np.full((32, 3), -3, np.int8)}, path)
    recipe = {"key_shift": False, "outer_scale_file": str(path)}
    text = refusal(engine, "bitdecoding-nvfp4", recipe, model=hollow)
    assert "outer scales of 32 layers and 3 KV heads" in text and "30 layers" in text


def test_a_missing_sidecar(engine, hollow, tmp_path):
    path = str(tmp_path / "none.safetensors")
    assert path in refusal(engine, "bitdecoding-nvfp4", {"key_shift_file": path}, model=hollow)


def test_a_drafter_with_layers_of_its_own(engine, hollow, model):
    drafter = {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
    text = refusal(
        engine, "bitdecoding-nvfp4", {"key_shift": False}, model=hollow, speculative_config=drafter
    )
    assert "speculative method 'draft_model'" in text


def head_size_80():
    from transformers import LlamaConfig

    return LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=128, hidden_size=160, intermediate_size=64,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=80,
    )


def alibi():
    from transformers import BloomConfig

    return BloomConfig(
        architectures=["BloomForCausalLM"], vocab_size=128, hidden_size=128, n_layer=1, n_head=2,
    )


def latent_attention():
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        architectures=["DeepseekV2ForCausalLM"], vocab_size=128, hidden_size=128,
        intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=64, q_lora_rank=None,
        qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, first_k_dense_replace=1,
        n_routed_experts=2, max_position_embeddings=512,
    )


@pytest.mark.parametrize(
    "config, mode, words",
    [
        (head_size_80, "nvfp4", "head_dim"),
        (alibi, "nvfp4", "ALiBi"),
        # With the cache dtype nvfp4 vLLM refuses such models itself.
        (latent_attention, "bf16", "multi-head latent attention"),
    ],
)
def test_models_that_pages_cannot_hold(engine, tmp_path, config, mode, words):
    config().save_pretrained(tmp_path)
    text = refusal(
        engine,
        mode,
        model=str(tmp_path),
        skip_tokenizer_init=True,
        max_model_len=256,
    )
    assert words in text


def test_a_broken_recipe_in_the_environment_stops_the_first_process(hollow):
    """register() runs before anything is built, so the sentence is the last thing printed."""
    environment = {
        **os.environ,
        "BITDECODING_RECIPE": '{"mode": "bitdecoding-nvfp5"}',
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]),
    }
    program = "import sys; from vllm import LLM; LLM(sys.argv[1], kv_cache_dtype='nvfp4')"
    done = subprocess.run(
        [sys.executable, "-c", program, hollow],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "bitdecoding-nvfp5" in done.stderr.splitlines()[-1]
    assert "Initializing a V1 LLM engine" not in done.stdout + done.stderr
