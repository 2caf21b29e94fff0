# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: the two verbs of the C ABI behind vLLM's two calls.

do_kv_cache_update writes, forward attends. Each layer keeps one parameter struct a verb and
refreshes only what changes from call to call, because a step makes two calls a layer.
"""

from ctypes import addressof, c_int64

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from bitdecoding_vllm import capture, library, runtime
from bitdecoding_vllm.layer import (
    Argument,
    Layer,
    carried,
    check_cache_shape,
    point_cache,
    refuse_unsupported,
)


class BitdecodingImpl(CPUAttentionBackendImpl):
    """A layer whose cache is in bitdecoding pages. Other layers become vLLM's own class."""

    def __new__(cls, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                kv_cache_dtype, *arguments, **options):
        config = get_current_vllm_config()
        capture.start_from_environment(config)
        wanted = runtime.for_engine(config)
        if wanted is not None and carried(wanted, kv_cache_dtype, config.cache_config):
            instance = super().__new__(cls)
            instance.runtime = wanted  # what refers to a runtime keeps it alive
            return instance
        return CPUAttentionBackendImpl(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, *arguments, **options,
        )

    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                 kv_cache_dtype, *arguments, **options):
        super().__init__(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
            kv_cache_dtype, *arguments, **options,
        )
        self.lib = self.runtime.lib
        self.layer = None
        self._kv_cache = None
        config = get_current_vllm_config()
        page_size = config.cache_config.block_size
        refuse_unsupported(self, config, page_size)
        # Before weights load: a head size or a sidecar that does not fit raises here. The layer
        # itself is made when its name and learned sinks are known. (A calibrating runtime would
        # count this one.)
        self.runtime.page_info(head_size, page_size)
        if not self.runtime.calibrate_file:
            Layer(self, "layers.0", page_size, config)

    def attach(self, name, page_size, steps, shadow, vllm_config):
        """Called by the builder: the layer's name, weights and group are known only then."""
        sinks = self.sinks
        if sinks is not None:
            sinks = sinks.detach().to(torch.float32).contiguous()
        self.layer = Layer(self, name, page_size, vllm_config, sinks)
        self.steps = steps
        self.shadow = shadow
        handles = {"layer": self.layer.handle, "steps": steps.handle}
        self._write = library.sized(library.WriteParams, **handles)
        self._attend = library.sized(library.AttendParams, **handles)
        self._write_address = addressof(self._write)
        self._attend_address = addressof(self._attend)
        write, attend = self._write, self._attend
        self._write_key, self._write_value = Argument(write.key), Argument(write.value)
        self._attend_query, self._attend_output = Argument(attend.query), Argument(attend.output)
        self._attend_key, self._attend_value = Argument(attend.key), Argument(attend.value)
        self._bd_write = self.lib.bd_write
        self._bd_attend = self.lib.bd_attend

    def _bind(self, kv_cache):
        """Takes the strides from the tensor: a padded group has a longer page than its bytes."""
        check_cache_shape(self, kv_cache)
        for params in (self._write, self._attend):
            point_cache(params.cache, kv_cache, self.shadow)
        self._advise_huge_pages(kv_cache)
        self._kv_cache = kv_cache

    def _advise_huge_pages(self, kv_cache):
        """The whole storage, which the layers share; asking again costs nothing."""
        storage = kv_cache.untyped_storage()
        advised = c_int64()
        self.lib.check(
            self.lib.bd_advise_huge_pages(storage.data_ptr(), storage.nbytes(), advised)
        )

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if get_forward_context().attn_metadata is None:  # a warm-up run writes nothing
            return
        if kv_cache is not self._kv_cache:
            self._bind(kv_cache)
        self._write_key.point(key)
        self._write_value.point(value)
        self._write.num_tokens = key.shape[0]
        if self._bd_write(self._write_address):
            raise library.BitdecodingError(self._failed("write"))

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output,
                output_scale=None, output_block_scale=None):
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "bitdecoding pages are attended without fused output quantization; start the model "
                "without it or with --kv-cache-dtype auto."
            )
        if attn_metadata is None:  # a warm-up run attends to nothing
            return output.zero_()
        if kv_cache is not self._kv_cache:
            self._bind(kv_cache)
        self._attend_query.point(query)
        self._attend_key.point(key)
        self._attend_value.point(value)
        self._attend_output.point(output)
        self._attend.num_tokens = query.shape[0]
        if self._bd_attend(self._attend_address):
            raise library.BitdecodingError(self._failed("attend"))
        return output

    def _failed(self, verb):
        return f"{self.layer.name}: {verb} failed: {self.lib.last_error()}"
