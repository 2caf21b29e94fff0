# SPDX-License-Identifier: Apache-2.0
"""A calibration in steps inside a real engine: phases, saved sums, and a probe of another recipe."""

import json

import numpy as np
import pytest
from helpers import generate

PROMPT_TOKENS = 512


def rpc(llm, method, *arguments):
    (answer,) = llm.collective_rpc(method, args=arguments)
    return answer


@pytest.fixture(scope="module")
def prompts(long_text):
    half = len(long_text) // 2
    return [long_text[:half], long_text[half:]]


def calibrating(folder, **more):
    return {
        "calibrate_file": str(folder / "key_shift.safetensors"),
        "probability_tau": "calibrate",
        **more,
    }


def test_a_calibration_in_steps_saves_and_resumes(engine, prompts, tmp_path):
    from safetensors.numpy import load_file

    state = tmp_path / "state.safetensors"
    arguments = {"max_num_seqs": 1, "enable_prefix_caching": False, "max_model_len": 1024}
    with engine("bitdecoding-nvfp4", calibrating(tmp_path), **arguments) as llm:
        rpc(llm, "bitdecoding_calibrate", "off")
        generate(llm, prompts[:1], max_tokens=1)
        rpc(llm, "bitdecoding_calibrate", "keys")
        first = generate(llm, prompts[:1], max_tokens=1)
        tokens = len(first[0].prompt_token_ids)
        told = rpc(llm, "bitdecoding_calibrate", "", str(state), "one prompt")
        # The sixteen sinks are left out, and the prompt before "keys" is not counted.
        assert told["tokens"] == tokens - 16 and told["blocks"] == 0
        assert told["skipped_rows"] == 0 and told["non_finite"] is None
        once = load_file(state)
        generate(llm, prompts[1:], max_tokens=1)
        rpc(llm, "bitdecoding_calibrate", "", str(state), "two")
        twice = load_file(state)
        assert (twice["key_rows"] > once["key_rows"]).all()

        rpc(llm, "bitdecoding_calibrate", "probabilities")
        told = rpc(llm, "bitdecoding_calibrate", "", "")
        generate(llm, prompts, max_tokens=1)
        after = rpc(llm, "bitdecoding_calibrate", "", "")
        assert after["tokens"] == told["tokens"] and after["blocks"] > 0
        with pytest.raises(Exception, match="truncated or no safetensors file"):
            (tmp_path / "bad.safetensors").write_bytes(
                (tmp_path / "state.safetensors").read_bytes()[:1]
            )
            rpc(llm, "bitdecoding_resume_calibration", str(tmp_path / "bad.safetensors"))
        rpc(llm, "bitdecoding_resume_calibration", str(state))
        assert rpc(llm, "bitdecoding_calibrate", "", "")["blocks"] == 0
    assert not (tmp_path / "key_shift.safetensors").exists()
    assert np.isfinite(twice["key_sums"]).all()


def test_a_probe_answers_as_an_engine_of_its_recipe(engine, long_text):
    """In one engine with BF16 pages, a probe in all layers gives the log-probabilities of an engine
    that serves the recipe; in none, those of BF16."""
    from helpers import prompt_logprobs

    arguments = {
        "max_num_seqs": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 128,
        "max_model_len": 1024,
    }  # fmt: skip
    # The pool's floor for one request is short of a chunk's tails, old and new; with a share of the
    # cache the served engine drops none of them, as the probe does not.
    recipe = {"key_shift": False, "sink_tokens": 4, "shadow_pool_share": 0.3}

    def logprobs(llm):
        (request,) = generate(llm, [long_text], max_tokens=1, prompt_logprobs=0)
        return prompt_logprobs(request)

    with engine("bf16", **arguments) as llm:
        exact = logprobs(llm)
        rpc(llm, "bitdecoding_probe", json.dumps({"mode": "bitdecoding-nvfp4", **recipe}), "all")
        probed = logprobs(llm)
        rpc(llm, "bitdecoding_probe", json.dumps({"mode": "bitdecoding-nvfp4", **recipe}), "")
        compared = logprobs(llm)
        layers = rpc(llm, "bitdecoding_probe_report")["layers"]
        rpc(llm, "bitdecoding_probe", "")
        ended = logprobs(llm)
    with engine("bitdecoding-nvfp4", recipe, **arguments) as llm:
        served = logprobs(llm)
        assert rpc(llm, "bitdecoding_counters")["missing_tokens"] == 0
    assert np.array_equal(compared, exact) and np.array_equal(ended, exact)
    assert np.abs(served - exact).max() > 0.01
    assert np.abs(probed - served).max() < 1e-4
    assert [layer["layer"] for layer in layers] == list(range(30))
    assert all(0 < error < 0.5 for layer in layers for error in layer["output"])
