# SPDX-License-Identifier: Apache-2.0
"""Drafts that are checked and partly thrown away must not change what is generated.

vLLM's n-gram drafter imports numba, after which vLLM 0.32 cannot start another engine in the
process (it reads the attributes of every loaded module and trips over one of numba's): conftest.py
puts this file last.
"""

from helpers import assert_same_up_to_ties, generate, metric, rpc

RECIPE = {"key_shift": False, "reproducible": True, "arithmetic": "wide"}


def test_ngram_speculation(engine):
    text = "one two three four five six seven eight nine ten. " * 6
    arguments = {"max_model_len": 512, "max_num_batched_tokens": 128}
    with engine("bitdecoding-nvfp4", RECIPE, **arguments) as llm:
        (plain,) = generate(llm, [text], max_tokens=32)
    drafter = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    with engine("bitdecoding-nvfp4", RECIPE, speculative_config=drafter, **arguments) as llm:
        (drafted,) = generate(llm, [text], max_tokens=32)
        assert metric(llm, "vllm:spec_decode_num_drafts") > 0
        assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
        assert rpc(llm, "bitdecoding_counters")["lost_partial_groups"] == 0
    assert_same_up_to_ties(plain, drafted)
