# SPDX-License-Identifier: Apache-2.0
"""Prefill: a chunk attends to itself and to its cached prefix in vLLM's own FlashAttention.

The prefix is read back from pages into a workspace of bounded size. Its last piece lies before the
chunk's own rows there and is one causal call; pieces before that, of a prefix longer than the
workspace, are calls of their own that the library merges by their log-sum-exps.
"""

from ctypes import addressof
from dataclasses import dataclass, field

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

from bitdecoding_vllm import library
from bitdecoding_vllm.layer import DTYPES

MAX_DECODE_QUERIES = 8  # requests with more rows than these are prefilled
MIN_PREFIX_TOKENS = 16384  # of a prefix that one call attends to


@dataclass(frozen=True)
class Run:
    """Rows [begin, end) of the step: requests without a prefix, or one with a prefix."""

    begin: int
    end: int
    longest: int  # query rows of a request
    starts: torch.Tensor  # of the requests within the run, on the device
    request: int = -1
    prefix: int = 0  # cached tokens before the rows
    ends: dict = field(default_factory=dict)  # keys of a call -> [0, keys] on the device

    def end_at(self, keys):
        """The same for all layers of a kind, so it goes to the device once a step."""
        if keys not in self.ends:
            self.ends[keys] = _to_device([0, keys], self.starts.device)
        return self.ends[keys]


def plan_prefill(common, device):
    """Runs of a step's longer requests, in order."""
    if common.max_query_len <= MAX_DECODE_QUERIES:
        return []
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    lengths = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()
    groups = []  # [first request, last + 1, prefix]
    for r, length in enumerate(lengths):
        rows = starts[r + 1] - starts[r]
        if rows <= MAX_DECODE_QUERIES:
            continue
        prefix = length - rows
        if prefix == 0 and groups and groups[-1][1:] == [r, 0]:
            groups[-1][1] = r + 1
        else:
            groups.append([r, r + 1, prefix])
    return [_run(starts, *group, device) for group in groups]


def _run(starts, first, last, prefix, device):
    begin, end = starts[first], starts[last]
    own = [start - begin for start in starts[first : last + 1]]
    longest = max(b - a for a, b in zip(own, own[1:]))
    return Run(begin, end, longest, _to_device(own, device), first, prefix)


def _to_device(values, device):
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


class Workspace:
    """Rows of K and V that a prefix is read back to; shared by the engine's layers of one shape."""

    def __init__(self, num_tokens, num_kv_heads, head_dim, dtype, device):
        shape = (2, num_tokens, num_kv_heads, head_dim)
        self.num_tokens = num_tokens
        self.rows = torch.empty(shape, dtype=dtype, device=device)


def workspace_tokens(max_step_tokens, window_left):
    """A window's prefix must fit beside the longest chunk: it is never cut in pieces."""
    return max_step_tokens + max(MIN_PREFIX_TOKENS, window_left)


class Prefill:
    """The prefill of one layer."""

    def __init__(self, impl, workspace):
        self.impl = impl
        self.lib = impl.lib
        self.workspace = workspace
        self.version = get_flash_attn_version(
            head_size=impl.head_size,
            has_sinks=impl.sinks is not None,
            requires_softcap=bool(impl.logits_soft_cap),
        )
        self._gather = library.sized(library.GatherParams, layer=impl.layer.handle, with_shadow=1)
        self._merge = library.sized(
            library.MergeParams,
            runtime=impl.runtime.handle,
            num_heads=impl.num_heads,
            head_dim=impl.head_size,
        )

    def run(self, run, query, key, value, output):
        rows = slice(run.begin, run.end)
        query, key, value, output = query[rows], key[rows], value[rows], output[rows]
        if run.prefix == 0:
            self._attend(query, key, value, run.starts, run.starts, run.longest, output)
        else:
            self._behind_prefix(run, query, key, value, output)

    def _behind_prefix(self, run, query, key, value, output):
        window = self.impl.window_left
        first = max(0, run.prefix - window) if window >= 0 else 0
        rows = run.end - run.begin
        at = max(first, run.prefix - (self.workspace.num_tokens - rows))
        held = run.prefix - at
        if held:
            self._read_back(run.request, at, run.prefix)
        keys, values = self.workspace.rows[:, : held + rows]
        keys[held:] = key
        values[held:] = value
        ends = run.end_at(held + rows)
        lse = self._attend(query, keys, values, run.starts, ends, held + rows, output)
        while at > first:
            begin = max(first, at - self.workspace.num_tokens)
            keys, values = self._read_back(run.request, begin, at)
            ends = run.end_at(at - begin)
            part = torch.empty_like(output)
            part_lse = self._attend(
                query, keys, values, run.starts, ends, at - begin, part, whole=True
            )
            lse = self._join(output, lse, part, part_lse)
            at = begin

    def _read_back(self, request, begin, end):
        rows = self.workspace.rows[:, : end - begin]
        params = self._gather
        params.steps = self.impl.steps.handle
        params.cache = self.impl.cache
        params.request, params.begin, params.end = request, begin, end
        for view, tensor in zip((params.key, params.value), rows):
            view.data = tensor.data_ptr()
            view.stride_token, view.stride_head, _ = tensor.stride()
            view.dtype = DTYPES[tensor.dtype]
        self._call(self.lib.bd_cuda_gather, params, "reading the prefix back")
        return rows

    def _attend(self, query, key, value, starts, key_starts, longest_key, output, whole=False):
        """`whole`: every query sees every key. Returns the log-sum-exps, [query heads][rows]."""
        impl = self.impl
        longest = query.shape[0] if starts.shape[0] == 2 else longest_key
        _, lse, *_ = flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            max_seqlen_q=longest,
            cu_seqlens_q=starts,
            max_seqlen_k=longest_key,
            cu_seqlens_k=key_starts,
            softmax_scale=impl.scale,
            causal=not whole,
            window_size=[-1, -1] if whole or impl.window_left < 0 else [impl.window_left, 0],
            softcap=impl.logits_soft_cap,
            return_softmax_lse=True,
            out=output,
            fa_version=self.version,
            s_aux=None if whole else impl.sinks,
        )
        return lse

    def _join(self, output, lse, part, part_lse):
        """Merges `part` into output; returns the log-sum-exps of both."""
        ours, theirs = (x.transpose(0, 1).contiguous() for x in (lse, part_lse))
        params = self._merge
        params.num_tokens = output.shape[0]
        params.dtype = DTYPES[output.dtype]
        params.a = params.out = output.data_ptr()
        params.b = part.data_ptr()
        params.lse_a = params.lse = ours.data_ptr()
        params.lse_b = theirs.data_ptr()
        self._call(self.lib.bd_cuda_merge, params, "merging with the prefix")
        return ours.transpose(0, 1)

    def _call(self, function, params, doing):
        stream = torch.cuda.current_stream().cuda_stream
        if function(addressof(params), stream):
            raise library.BitdecodingError(
                f"{self.impl.layer.name}: {doing} failed: {self.lib.last_error()}"
            )
