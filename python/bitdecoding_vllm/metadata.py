# SPDX-License-Identifier: Apache-2.0
"""Step metadata and its builder: the plan of a step is made once, for all layers of the group.

The plan itself (which rows are written where, which groups are also in BF16) lives in the library's
bd_steps object. Python keeps its handle and the number of tokens.
"""

import copy
from dataclasses import dataclass

from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder

from bitdecoding_vllm import library, runtime, tail
from bitdecoding_vllm.impl import BitdecodingImpl
from bitdecoding_vllm.errors import UnsupportedEngine
from bitdecoding_vllm.steps import StepsHandle

logger = init_logger("vllm.bitdecoding")

WARN_EVERY_STEPS = 256


@dataclass
class StepMetadata(AttentionMetadata):
    """What one step's layers need beside the plan in the library."""

    num_actual_tokens: int


class Steps(StepsHandle):
    def __init__(self, runtime, head_dim, page_size, num_pages, num_slots, max_requests):
        options = library.sized(
            library.StepsOptions,
            head_dim=head_dim,
            page_size=page_size,
            num_pages=num_pages,
            num_slots=num_slots,
            max_requests=max_requests,
        )
        super().__init__(runtime, runtime.lib.bd_steps_create, options)

    def build(self, common):
        """Plans the step; the tensors are on the CPU and are read during the call only."""
        query_start = common.query_start_loc_cpu
        num_tokens = int(query_start[common.num_reqs])
        self.lib.check(
            self.lib.bd_steps_build(self.handle, self.point(common, query_start, num_tokens))
        )
        return num_tokens


class BitdecodingMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds StepMetadata for layers of this library; makes vLLM's own builder for all others."""

    def __new__(cls, kv_cache_spec, layer_names, vllm_config, device):
        impls = _impls(layer_names, vllm_config)
        ours = [isinstance(impl, BitdecodingImpl) for impl in impls]
        if any(ours) and not all(ours):
            raise UnsupportedEngine(
                "vLLM put layers with and without bitdecoding pages into one group, because "
                "their pages look alike; leave out --kv-cache-dtype-skip-layers in this mode."
            )
        if all(ours) and ours:
            return super().__new__(cls)
        config = _stock_config(vllm_config, impls)
        return CPUAttentionMetadataBuilder(kv_cache_spec, layer_names, config, device)

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        impls = _impls(layer_names, vllm_config)
        self.runtime = impls[0].runtime
        max_requests = vllm_config.scheduler_config.max_num_seqs
        num_pages = vllm_config.cache_config.num_gpu_blocks
        head_dim, page_size = kv_cache_spec.head_size, kv_cache_spec.block_size
        num_kv_heads = kv_cache_spec.num_kv_heads
        pool = tail.size_pool(
            self.runtime.page_info(head_dim, page_size, max_requests),
            self.runtime.pool_share(),
            num_pages,
            num_kv_heads,
            len(layer_names),
        )
        self.runtime.pools.append(pool)
        self.steps = Steps(
            self.runtime, head_dim, page_size, num_pages, pool.num_slots, max_requests
        )
        for name, impl in zip(layer_names, impls):
            shadow = pool.tensor(num_kv_heads, head_dim)
            impl.attach(name, page_size, self.steps, shadow, vllm_config)
        self.runtime.log_start(pool, head_dim, page_size, num_pages)
        warn_of_checkpoint_scales(layer_names, vllm_config)
        self._steps_to_warning = WARN_EVERY_STEPS

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        if common_attn_metadata.causal is not True:
            raise UnsupportedEngine(
                "this step asks for attention that is not causal, which bitdecoding pages do not "
                "serve; start the model with --kv-cache-dtype auto."
            )
        num_tokens = self.steps.build(common_attn_metadata)
        self.runtime.observed(num_tokens)
        self._steps_to_warning -= 1
        if self._steps_to_warning == 0:
            self._steps_to_warning = WARN_EVERY_STEPS
            self.runtime.warn_of_losses()
        return StepMetadata(num_tokens)


def _impls(layer_names, vllm_config):
    layers = vllm_config.compilation_config.static_forward_context
    return [layers[name].impl for name in layer_names]


def warn_of_checkpoint_scales(layer_names, vllm_config):
    """A checkpoint may bring scales for a quantized cache. Pages choose their own, and say so."""
    layers = vllm_config.compilation_config.static_forward_context
    scaled = []
    for name in layer_names:
        scales = (getattr(layers[name], f"_{side}_scale_float", 1.0) for side in "kv")
        if any(scale != 1.0 for scale in scales):
            scaled.append(name)
    if scaled:
        logger.warning(
            "bitdecoding: the checkpoint has k_scale or v_scale for %d layers (%s, ...); they are "
            "not used, because pages choose the scale of every block themselves (mode fp8: 1).",
            len(scaled),
            scaled[0],
        )


def _stock_config(vllm_config, impls):
    """vLLM's builder reads the cache dtype of the whole model instead of its layers': in an engine
    of ours that would be the dtype of the other layers, so a skipped layer's builder gets its own.
    """
    dtypes = {impl.kv_cache_dtype for impl in impls}
    if runtime.current() is None or dtypes == {vllm_config.cache_config.cache_dtype}:
        return vllm_config
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.cache_dtype = dtypes.pop()
    return config
