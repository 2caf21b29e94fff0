# SPDX-License-Identifier: Apache-2.0
"""One layer's attention on a GPU: writes, decodes, and hands longer requests to prefill.

A graph holds the launches with the addresses of its own buffers; the library is not called when it
is replayed.
"""

from ctypes import addressof

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from bitdecoding_vllm import library, runtime
from bitdecoding_vllm.cuda import tail
from bitdecoding_vllm.cuda.backend import PAGE_TOKENS
from bitdecoding_vllm.cuda.prefill import (
    MAX_DECODE_QUERIES,
    Prefill,
    Workspace,
    workspace_tokens,
)
from bitdecoding_vllm.errors import UnsupportedEngine
from bitdecoding_vllm.layer import (
    Argument,
    Layer,
    carried,
    check_cache_shape,
    point_cache,
    refuse_unsupported,
)


class BitdecodingCudaImpl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
                 sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
                 attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, sinks=None):
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.alibi_slopes, self.attn_type = alibi_slopes, attn_type
        self.sliding_window = sliding_window or -1
        self.window_left = self.sliding_window - 1 if self.sliding_window > 0 else -1
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.device = torch.device("cuda", torch.cuda.current_device())
        config = get_current_vllm_config()
        self.runtime = runtime.for_engine(config, self.device.index)
        self.lib = self.runtime.lib
        self.layer = self.pool = self._kv_cache = None
        page_size = config.cache_config.block_size
        if not config.cache_config.user_specified_block_size:
            page_size = PAGE_TOKENS
        carried(self.runtime, kv_cache_dtype, config.cache_config)
        refuse_unsupported(self, config, page_size)
        _refuse_long_drafts(config)
        self.runtime.page_info(head_size, page_size)
        Layer(self, "layers.0", page_size, config)  # what does not fit raises before weights load
        self._page_size, self._config = page_size, config

    def reserve(self):
        """The BF16 pool and the prefill workspace: in vLLM's profiling run, or at the latest when
        the cache is there. Sizes are the engine's; the memory is the layer's and the shape's."""
        if self.pool is not None:
            return
        config, shared = self._config, self.runtime.shared
        requests = config.scheduler_config.max_num_seqs
        shape = (self._page_size, self.num_kv_heads, self.head_size, requests)
        if ("pool", shape) not in shared:
            info = self.runtime.page_info(self.head_size, self._page_size, requests)
            shared["pool", shape] = tail.size_pool(
                info, self.runtime.pool_share(), tail.budget_of(config), self.num_kv_heads
            )
        self.pool = shared["pool", shape]
        self.shadow = self.pool.tensor(self.num_kv_heads, self.head_size, self.device)
        tokens = workspace_tokens(config.scheduler_config.max_num_batched_tokens, self.window_left)
        key = ("workspace", shape, tokens)
        if key not in shared:
            shared[key] = Workspace(
                tokens, self.num_kv_heads, self.head_size, config.model_config.dtype, self.device
            )
        self.workspace = shared[key]

    def attach(self, name, page_size, vllm_config):
        """Called by the builder: the layer's name, weights and page size are known only then."""
        self._page_size = page_size
        self.reserve()
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.detach().to("cpu", torch.float32).contiguous()
        self.layer = Layer(self, name, page_size, vllm_config, sinks)
        self.prefill = Prefill(self, self.workspace)
        self._write = library.sized(library.WriteParams, layer=self.layer.handle)
        self._attend = library.sized(library.AttendParams, layer=self.layer.handle)
        self._write_address = addressof(self._write)
        self._attend_address = addressof(self._attend)
        write, attend = self._write, self._attend
        self._write_key, self._write_value = Argument(write.key), Argument(write.value)
        self._attend_query, self._attend_output = Argument(attend.query), Argument(attend.output)
        self._attend_key, self._attend_value = Argument(attend.key), Argument(attend.value)
        self._bd_write, self._bd_attend = self.lib.bd_cuda_write, self.lib.bd_cuda_attend

    def use_steps(self, steps):
        self.steps = steps
        self._write.steps = self._attend.steps = steps.handle
        self._kv_cache = None

    def _bind(self, kv_cache):
        check_cache_shape(self, kv_cache)
        for params in (self._write, self._attend):
            point_cache(params.cache, kv_cache, self.shadow)
        self.cache = self._write.cache
        self._kv_cache = kv_cache

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "bitdecoding pages are attended without fused output quantization; start the model "
                "without it or with --kv-cache-dtype auto."
            )
        if attn_metadata is None:  # a profiling run attends to nothing, and measures memory
            self.reserve()
            return output.zero_()
        if kv_cache is not self._kv_cache:
            self._bind(kv_cache)
        stream = torch.cuda.current_stream().cuda_stream
        self._write_rows(key, value, stream)
        self._decode(query, key, value, output, stream)
        for run in attn_metadata.prefill:
            self.prefill.run(run, query, key, value, output)
        return output

    def _write_rows(self, key, value, stream):
        self._write_key.point(key)
        self._write_value.point(value)
        self._write.num_tokens = key.shape[0]
        if self._bd_write(self._write_address, stream):
            raise library.BitdecodingError(self._failed("write"))

    def _decode(self, query, key, value, output, stream):
        self._attend_query.point(query)
        self._attend_key.point(key)
        self._attend_value.point(value)
        self._attend_output.point(output)
        self._attend.num_tokens = query.shape[0]
        if self._bd_attend(self._attend_address, stream):
            raise library.BitdecodingError(self._failed("attend"))

    def _failed(self, verb):
        return f"{self.layer.name}: {verb} failed: {self.lib.last_error()}"


def _refuse_long_drafts(config):
    speculative = config.speculative_config
    drafts = getattr(speculative, "num_speculative_tokens", None) or 0
    if drafts >= MAX_DECODE_QUERIES:
        raise UnsupportedEngine(
            f"num_speculative_tokens is {drafts}, and decoding takes {MAX_DECODE_QUERIES} rows of a "
            f"request at once, its last token and {MAX_DECODE_QUERIES - 1} drafts; set it to "
            f"{MAX_DECODE_QUERIES - 1} or less."
        )
