# SPDX-License-Identifier: Apache-2.0
"""The attention backend that stands in CPU_ATTN's place.

Layers whose cache this library keeps get its implementation; every other layer gets vLLM's own
classes, unchanged. The two are told apart by the layer's cache dtype and the engine's recipe.
"""

from dataclasses import replace

from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_quant_mode

from bitdecoding_vllm import runtime
from bitdecoding_vllm.impl import BitdecodingImpl
from bitdecoding_vllm.metadata import BitdecodingMetadataBuilder

TILE_TOKENS = 64  # pages are whole tiles


def _is_ours(spec):
    """Whether pages of this spec are the library's.

    A BF16 page of the library is as large as vLLM's own BF16 page, so it does no harm that the two
    specs look alike; whose layer it is, its implementation decides.
    """
    current = runtime.current()
    return (
        current is not None
        and type(spec) in (FullAttentionSpec, SlidingWindowSpec)
        and spec.kv_quant_mode == get_kv_quant_mode(current.carriers[0])
        and (current.format != "bf16" or spec.dtype.itemsize == 2)
    )


class BitdecodingBackend(CPUAttentionBackend):
    supported_kv_cache_dtypes = [
        *CPUAttentionBackend.supported_kv_cache_dtypes,
        "bfloat16",
        "nvfp4",
    ]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        if kv_cache_spec is not None and _is_ours(kv_cache_spec):
            return [MultipleOf(TILE_TOKENS)]
        return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)

    @classmethod
    def customize_spec(cls, spec):
        """Idempotent. vLLM also calls it with a block of one token, hence the tile for the size."""
        if not _is_ours(spec):
            return spec
        token_bytes = runtime.current().token_bytes(spec.head_size, TILE_TOKENS)
        return replace(spec, state_content_bytes=token_bytes)

    @staticmethod
    def get_impl_cls():
        return BitdecodingImpl

    @staticmethod
    def get_builder_cls():
        return BitdecodingMetadataBuilder
