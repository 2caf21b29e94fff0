# SPDX-License-Identifier: Apache-2.0
"""The attention backend BITDECODING: layers whose pages the library keeps on a GPU.

vLLM takes it for the layers that --attention-backend gives it, and asks it what it serves.
"""

from dataclasses import replace

from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.fa_utils import flash_attn_supports_sinks
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec

from bitdecoding_vllm import plugin, recipe, runtime
from bitdecoding_vllm.errors import UnsupportedEngine
from bitdecoding_vllm.layer import TILE_TOKENS

HEAD_SIZES = (64, 96, 128, 192, 256)
PAGE_TOKENS = 128


class BitdecodingCudaBackend(AttentionBackend):
    supported_kv_cache_dtypes = [recipe.DEFAULT_CARRIER]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name():
        return plugin.BACKEND_NAME

    @staticmethod
    def get_impl_cls():
        from bitdecoding_vllm.cuda.impl import BitdecodingCudaImpl

        return BitdecodingCudaImpl

    @staticmethod
    def get_builder_cls():
        from bitdecoding_vllm.cuda.metadata import BitdecodingCudaMetadataBuilder

        return BitdecodingCudaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(TILE_TOKENS)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size):
        return max(default_block_size, PAGE_TOKENS)

    @classmethod
    def get_supported_head_sizes(cls):
        return list(HEAD_SIZES)

    @classmethod
    def supported_kv_cache_layouts(cls):
        """Each head of a page in one piece."""
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    @classmethod
    def customize_spec(cls, spec):
        """Idempotent. vLLM also calls it with a block of one token, hence the tile for the size."""
        if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
            raise UnsupportedEngine(
                f"a layer's cache is described by {type(spec).__name__}, and bitdecoding pages "
                "hold those of full attention and of sliding windows; start the model with "
                "--kv-cache-dtype auto and another --attention-backend."
            )
        token_bytes = runtime.current().token_bytes(spec.head_size, TILE_TOKENS)
        return replace(spec, state_content_bytes=token_bytes)

    @classmethod
    def supports_compute_capability(cls, capability):
        return capability.major == 8 or (capability.major, capability.minor) == (9, 0)

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def supports_sink(cls):
        return flash_attn_supports_sinks()

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_kv_connector(cls):
        """A page that comes from elsewhere would be read with BF16 rows of what it held before."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls):
        return False
