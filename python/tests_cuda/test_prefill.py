# SPDX-License-Identifier: Apache-2.0
"""What prefill makes of a chunk, a prefix and a workspace: FlashAttention and the library's two calls
are plain torch here, and the result must be attention over all tokens at once."""

import ctypes
import math
from types import SimpleNamespace

import pytest
import torch

HEADS, KV_HEADS, DIM = 4, 2, 64


def scores(query, key, scale, softcap):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    s = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    return softcap * torch.tanh(s / softcap) if softcap else s


def attend(query, key, value, scale, causal, window, softcap, sinks):
    """FlashAttention's masks: the last query sees the last key. Output and log-sum-exps."""
    s = scores(query, key, scale, softcap)
    q, k = s.shape[1:]
    at = torch.arange(q)[:, None] + k - q
    keys = torch.arange(k)[None, :]
    if causal:
        s = s.masked_fill(keys > at, -math.inf)
    if window >= 0:
        s = s.masked_fill(keys < at - window, -math.inf)
    lse = torch.logsumexp(s, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None].expand_as(lse))
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    output = torch.einsum("hqk,khd->qhd", torch.exp(s - lse[..., None]), value.double())
    return output, lse


def flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
          window_size, softcap, return_softmax_lse, out, fa_version, s_aux):
    lse = torch.empty(q.shape[1], q.shape[0])
    pairs = zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), cu_seqlens_k.tolist(),
                cu_seqlens_k[1:].tolist())
    for a, b, c, d in pairs:
        assert b - a <= max_seqlen_q and d - c <= max_seqlen_k
        out[a:b], lse[:, a:b] = attend(
            q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size[0], softcap, s_aux)
    return out, lse


def floats(address, *shape):
    data = (ctypes.c_float * math.prod(shape)).from_address(address)
    return torch.frombuffer(data, dtype=torch.float32).view(shape)


class Library:
    """bd_cuda_gather and bd_cuda_merge over float32 tensors of the host."""

    def __init__(self, key, value):
        self.past = (key, value)
        self.gathers = []
        self.merges = 0

    def bd_cuda_gather(self, address, stream):
        from bitdecoding_vllm import library

        p = library.GatherParams.from_address(address)
        self.gathers.append((p.begin, p.end))
        for view, past in zip((p.key, p.value), self.past):
            rows = p.end - p.begin
            assert (view.stride_token, view.stride_head) == (KV_HEADS * DIM, DIM)
            floats(view.data, rows, KV_HEADS, DIM).copy_(past[p.begin : p.end])
        return 0

    def bd_cuda_merge(self, address, stream):
        from bitdecoding_vllm import library

        p = library.MergeParams.from_address(address)
        self.merges += 1
        shape, lses = (p.num_tokens, p.num_heads, p.head_dim), (p.num_tokens, p.num_heads)
        a, b = floats(p.a, *shape), floats(p.b, *shape)
        la, lb = floats(p.lse_a, *lses), floats(p.lse_b, *lses)
        both = torch.logaddexp(la, lb)
        out = torch.exp(la - both)[..., None] * a + torch.exp(lb - both)[..., None] * b
        floats(p.out, *shape).copy_(out)
        floats(p.lse, *lses).copy_(both)
        return 0


@pytest.fixture
def layer(monkeypatch):
    """layer(prefix, rows, workspace, ...): the prefill of a layer, and its sequence."""
    from bitdecoding_vllm import library
    from bitdecoding_vllm.cuda import prefill

    monkeypatch.setattr(prefill, "flash_attn_varlen_func", flash)

    def make(prefix, rows, workspace, window=-1, softcap=0.0, sinks=None):
        torch.manual_seed(prefix + rows)
        query = torch.randn(rows, HEADS, DIM)
        key, value = torch.randn(2, prefix + rows, KV_HEADS, DIM)
        impl = SimpleNamespace(
            lib=Library(key, value), sinks=sinks, logits_soft_cap=softcap, window_left=window,
            scale=0.3, head_size=DIM, num_heads=HEADS, cache=library.Cache(),
            layer=SimpleNamespace(handle=1, name="layers.0"), steps=SimpleNamespace(handle=2),
            runtime=SimpleNamespace(handle=3),
        )
        space = prefill.Workspace(workspace, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
        space.rows.fill_(math.nan)
        return prefill.Prefill(impl, space), impl, query, key, value

    return make


CASES = {
    "one piece": (100, 30, 140, {}),
    "the workspace is full": (100, 30, 130, {}),
    "two pieces": (100, 30, 129, {}),
    "many pieces": (500, 30, 64, {}),
    "a piece of one token": (98, 30, 64, {}),
    "window": (500, 30, 130, {"window": 100}),
    "window longer than the prefix": (50, 30, 130, {"window": 100}),
    "window of the token alone": (50, 30, 130, {"window": 0}),
    "softcap": (200, 30, 64, {"softcap": 5.0}),
    "sinks": (200, 30, 64, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_chunk_sees_its_prefix(layer, case):
    from bitdecoding_vllm.cuda.prefill import Run

    prefix, rows, workspace, options = CASES[case]
    prefill, impl, query, key, value = layer(prefix, rows, workspace, **options)
    before = 3  # other requests' rows
    pad = lambda x: torch.cat([torch.full((before, *x.shape[1:]), math.nan), x])
    output = torch.full((before + rows, HEADS, DIM), 7.0)
    run = Run(before, before + rows, rows, torch.tensor([0, rows], dtype=torch.int32), 4, prefix)
    prefill.run(run, pad(query), pad(key[prefix:]), pad(value[prefix:]), output)
    expected, _ = attend(query, key, value, impl.scale, True, impl.window_left,
                         impl.logits_soft_cap, impl.sinks)
    # Float32 sums of a few hundred terms of order one.
    torch.testing.assert_close(output[before:], expected.float(), rtol=1e-5, atol=1e-5)
    assert (output[:before] == 7.0).all()
    seen = sorted(impl.lib.gathers)
    first = max(0, prefix - impl.window_left) if impl.window_left >= 0 else 0
    if first < prefix:
        assert seen[0][0] == first and seen[-1][1] == prefix
        assert all(a[1] == b[0] for a, b in zip(seen, seen[1:]))  # each position once
    assert impl.lib.merges == max(0, len(seen) - 1)
    # Another layer of the step finds the calls' bounds on the device.
    bounds = dict(run.ends)
    prefill.run(run, pad(query), pad(key[prefix:]), pad(value[prefix:]), output)
    assert len(bounds) == len(run.ends) > 0
    assert all(run.ends[keys] is tensor for keys, tensor in bounds.items())


def test_fresh_prompts_attend_to_themselves_alone(layer):
    from bitdecoding_vllm.cuda.prefill import Run

    prefill, impl, query, key, value = layer(0, 30, 64)
    output = torch.empty(30, HEADS, DIM)
    prefill.run(Run(0, 30, 18, torch.tensor([0, 12, 30], dtype=torch.int32), 0), query, key, value,
                output)
    for begin, end in ((0, 12), (12, 30)):
        expected, _ = attend(query[begin:end], key[begin:end], value[begin:end], impl.scale, True,
                             -1, 0.0, None)
        torch.testing.assert_close(output[begin:end], expected.float(), rtol=1e-5, atol=1e-5)
    assert impl.lib.gathers == []
