# SPDX-License-Identifier: Apache-2.0
"""Sliding windows, soft caps and learned sinks reach the library with vLLM's meaning.

Tiny random models, whose layers mix windows and full attention in one engine; vLLM's own cache is
the oracle, BF16 pages the candidate.
"""

import numpy as np
import pytest
from helpers import layers, prompt_logprobs, solo

WINDOW = 48
TOKENS = 230
VOCAB = 512


def gemma2():
    """Windowed and full layers in turn, and a soft cap low enough to bend the scores."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=WINDOW,
            attn_logit_softcapping=1.5,
            final_logit_softcapping=None,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
    )


def mistral():
    """Every layer windowed."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=64,
            sliding_window=WINDOW,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
    )


def gpt_oss():
    """Learned attention sinks, large enough to take a good part of the softmax."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM

    model = GptOssForCausalLM(
        GptOssConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=WINDOW,
            max_position_embeddings=512,
            initializer_range=0.2,
        )
    )
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.sinks, 1.0, 4.0)
    return model


@pytest.mark.parametrize("make", [gemma2, mistral, gpt_oss])
def test_windows_caps_and_sinks_are_vllms(engine, tmp_path, make):
    import torch

    torch.manual_seed(5)
    make().save_pretrained(tmp_path)
    prompt = np.random.default_rng(3).integers(0, VOCAB, TOKENS).tolist()
    scores = {}
    for mode in ("stock", "bf16"):
        # A chunk's own rows as they come, which is what vLLM's operator reads, too.
        with engine(
            mode,
            {"reproducible": False} if mode == "bf16" else None,
            model=str(tmp_path),
            skip_tokenizer_init=True,
            max_model_len=512,
            block_size=64,
            max_num_batched_tokens=40,  # windows reach over chunks and pages
            kv_cache_memory_bytes=16 << 20,
        ) as llm:
            (request,) = solo(llm, [prompt], max_tokens=8, prompt_logprobs=0, detokenize=False)
            generated = [d[t].logprob for t, d in
                         zip(request.outputs[0].token_ids, request.outputs[0].logprobs)]
            scores[mode] = np.concatenate([prompt_logprobs(request), generated[:1]])
            names = {type(layer.impl).__name__ for layer in layers(llm).values()}
            assert names == {"BitdecodingImpl" if mode == "bf16" else "CPUAttentionBackendImpl"}
    error = np.abs(scores["stock"] - scores["bf16"])
    # Rounding K and V to BF16 moves a score by 2^-9 of itself; a window that is off by one token,
    # a missing cap or sink moves log-probabilities of these models by tenths.
    assert error.mean() < 0.02
    assert np.ptp(scores["stock"]) > 1
