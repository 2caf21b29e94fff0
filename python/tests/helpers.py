# SPDX-License-Identifier: Apache-2.0
"""What the engine tests say about texts: equal up to ties, and near by log-probability."""

import numpy as np

# Two runs may order two candidates differently only when both find them this close. The kernels
# agree exactly on equal K and V, but matrix products depend on the number of rows in the batch, and
# a value that crosses a rounding boundary (FP4 codes, int8 queries) moves a log-probability by some
# hundredths; a gap between two of them, tens of tokens on, was seen to move by 0.16.
TIE = 0.25


def sampling(max_tokens=16, **more):
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, logprobs=5, ignore_eos=True, **more
    )


def generate(llm, prompts, max_tokens=16, **more):
    """Completions of prompts (text or token ids), all at once, in order."""
    inputs = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]
    requests = llm.generate(inputs, sampling(max_tokens, **more), use_tqdm=False)
    assert len(requests) == len(prompts)
    return requests


def solo(llm, prompts, max_tokens=16, **more):
    """The same one after the other, each against an empty prefix cache."""
    requests = []
    for prompt in prompts:
        assert llm.reset_prefix_cache()
        requests += generate(llm, [prompt], max_tokens, **more)
    return requests


def assert_same_up_to_ties(first, second, tie=TIE):
    """Greedy texts agree until a token at which the two candidates are tied in both runs. After
    that they are texts of their own."""
    a, b = first.outputs[0], second.outputs[0]
    assert len(a.token_ids) == len(b.token_ids)
    for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)):
        if x == y:
            continue
        for logprobs in (a.logprobs[i], b.logprobs[i]):
            assert x in logprobs and y in logprobs, f"token {i}: {x} against {y} is no tie"
            gap = abs(logprobs[x].logprob - logprobs[y].logprob)
            assert gap <= tie, f"token {i}: {x} against {y} with a gap of {gap}"
        return i
    return len(a.token_ids)


def prompt_logprobs(request):
    """Log-probability of each prompt token but the first."""
    ids = request.prompt_token_ids
    return np.array([d[t].logprob for t, d in zip(ids[1:], request.prompt_logprobs[1:])])


def metric(llm, name):
    """The sum of a counter over its labels."""
    values = [m.value for m in llm.get_metrics() if m.name == name]
    assert values, f"vLLM has no metric {name}"
    return sum(values)


def rpc(llm, method, *arguments):
    """One worker's answer."""
    (answer,) = llm.collective_rpc(method, args=arguments)
    return answer


def layers(llm):
    """Attention layers by name."""
    config = llm.llm_engine.vllm_config.compilation_config
    return {name: m for name, m in config.static_forward_context.items() if hasattr(m, "impl")}
