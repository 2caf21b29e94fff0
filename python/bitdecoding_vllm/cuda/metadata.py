# SPDX-License-Identifier: Apache-2.0
"""Step metadata on a GPU. The plan is one kernel over vLLM's own device buffers: lengths, block
table and slot mapping are never copied to the host, and a replayed graph finds the new plan where it
found the old one."""

from ctypes import c_int32
from dataclasses import dataclass, field

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
)

from bitdecoding_vllm import library
from bitdecoding_vllm.errors import UnsupportedEngine
from bitdecoding_vllm.cuda.prefill import MAX_DECODE_QUERIES, plan_prefill
from bitdecoding_vllm.steps import StepsHandle


@dataclass
class StepMetadata(AttentionMetadata):
    num_actual_tokens: int
    prefill: list = field(default_factory=list)  # of prefill.Run


class Steps(StepsHandle):
    def __init__(self, runtime, options):
        super().__init__(runtime, runtime.lib.bd_cuda_steps_create, options)

    def build(self, common):
        step = self.point(common, common.query_start_loc, common.num_actual_tokens)
        stream = torch.cuda.current_stream().cuda_stream
        self.lib.check(
            self.lib.bd_cuda_steps_build(self.handle, step, common.max_query_len, stream)
        )


class BitdecodingCudaMetadataBuilder(AttentionMetadataBuilder):
    """Graphs of whole decode steps, also of several tokens a request; others are piecewise."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(MAX_DECODE_QUERIES)
        layers = vllm_config.compilation_config.static_forward_context
        self._layers = [layers[name] for name in layer_names]
        self._impls = [layer.impl for layer in self._layers]
        self.runtime = self._impls[0].runtime
        self.steps = None
        for name, impl in zip(layer_names, self._impls):
            impl.attach(name, kv_cache_spec.block_size, vllm_config)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        if common_attn_metadata.causal is not True:
            raise UnsupportedEngine(
                "this step asks for attention that is not causal, which bitdecoding pages do not "
                "serve; start the model with --kv-cache-dtype auto."
            )
        if self.steps is None:
            self._make_steps(common_attn_metadata.block_table_tensor.stride(0))
        self.steps.build(common_attn_metadata)
        return StepMetadata(
            common_attn_metadata.num_actual_tokens, plan_prefill(common_attn_metadata, self.device)
        )

    def _make_steps(self, max_pages):
        """At the first step: vLLM makes builders before it knows how many pages there are."""
        impl, spec = self._impls[0], self.kv_cache_spec
        num_pages = self._layers[0].kv_cache.shape[0]
        pool = impl.pool
        scheduler = self.vllm_config.scheduler_config
        windows = sorted({impl.window_left for impl in self._impls})
        options = library.sized(
            library.CudaStepsOptions,
            steps=library.sized(
                library.StepsOptions,
                head_dim=spec.head_size,
                page_size=spec.block_size,
                num_pages=num_pages,
                num_slots=pool.num_slots,
                max_requests=scheduler.max_num_seqs,
            ),
            num_q_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            max_step_tokens=scheduler.max_num_batched_tokens,
            max_pages_per_request=max_pages,
            windows=(c_int32 * len(windows))(*windows),
            num_windows=len(windows),
        )
        self.steps = Steps(self.runtime, options)
        for impl in self._impls:
            impl.use_steps(self.steps)
        if all(pool is not known for known in self.runtime.pools):
            self.runtime.pools.append(pool)
        self.runtime.log_start(pool, spec.head_size, spec.block_size, num_pages)
