# SPDX-License-Identifier: Apache-2.0
"""One layer's attention: the two verbs of the C ABI behind vLLM's two calls.

do_kv_cache_update writes, forward attends. Each layer keeps one parameter struct a verb and
refreshes only what changes from call to call, because a step makes two calls a layer.
"""

from ctypes import addressof, c_int64

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from bitdecoding_vllm import capture, library, runtime
from bitdecoding_vllm.errors import UnsupportedEngine

DTYPES = {torch.float32: library.F32, torch.bfloat16: library.BF16, torch.float16: library.F16}
TILE_TOKENS = 64

# Drafters without a model: they have no attention layers that would share pages with the target's.
MODEL_FREE_DRAFTERS = ("ngram", "ngram_gpu", "suffix")


class BitdecodingImpl(CPUAttentionBackendImpl):
    """A layer whose cache is in bitdecoding pages. Other layers become vLLM's own class."""

    def __new__(cls, num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                kv_cache_dtype, *arguments, **options):
        config = get_current_vllm_config()
        capture.start_from_environment(config)
        wanted = runtime.for_engine(config)
        if wanted is not None and _carried(wanted, kv_cache_dtype, config.cache_config):
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
        _refuse_unsupported(self, config)
        # Before weights load: a head size or a sidecar that does not fit raises here. The layer
        # itself is made when its name and learned sinks are known. (A calibrating runtime would
        # count this one.)
        page_size = config.cache_config.block_size
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
        item = kv_cache.element_size()
        token_bytes = self.runtime.token_bytes(self.head_size, self.layer.page_size)
        num_pages, num_heads, page_size, content = kv_cache.shape
        expected = (self.num_kv_heads, self.layer.page_size, token_bytes)
        if (num_heads, page_size, content * item) != expected or kv_cache.stride(2) != content:
            raise UnsupportedEngine(
                f"vLLM's cache tensor {tuple(kv_cache.shape)} of {kv_cache.dtype} with strides "
                f"{kv_cache.stride()} does not hold (pages, {expected[0]} KV heads, {expected[1]} "
                f"tokens, {expected[2]} bytes) with each head of a page in one piece."
            )
        for params in (self._write, self._attend):
            cache = params.cache
            cache.pages = kv_cache.data_ptr()
            cache.num_pages = num_pages
            cache.stride_page = kv_cache.stride(0) * item
            cache.stride_head = kv_cache.stride(1) * item
            cache.shadow = self.shadow.data_ptr() if self.shadow.numel() else None
            cache.num_slots = self.shadow.shape[0]
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


class Argument:
    """One tensor of a parameter struct. From step to step only its address changes as a rule, and
    each field that is set costs as much as the comparison of all strides."""

    __slots__ = ("view", "strides", "dtype")

    def __init__(self, view):
        self.view = view
        self.strides = self.dtype = None

    def point(self, tensor):
        if tensor.stride() != self.strides or tensor.dtype is not self.dtype:
            self._describe(tensor)
        self.view.data = tensor.data_ptr()

    def _describe(self, tensor):
        strides = tensor.stride()
        if strides[2] != 1:
            raise UnsupportedEngine(
                f"a tensor of shape {tuple(tensor.shape)} has strides {strides}, but the elements "
                "of a head must lie side by side."
            )
        self.view.stride_token, self.view.stride_head, _ = strides
        self.view.dtype = DTYPES[tensor.dtype]
        self.strides, self.dtype = strides, tensor.dtype


class Layer:
    """Owns a bd_layer. `sinks` are learned logits in float32, one a query head, or None."""

    def __init__(self, impl, name, page_size, vllm_config, sinks=None):
        self.runtime = impl.runtime
        self.lib = impl.lib
        self.name = name
        self.page_size = page_size
        self.handle = None
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        total_kv_heads = _total_kv_heads(model, parallel, impl.num_kv_heads)
        rank = get_tensor_model_parallel_rank()
        options = library.sized(
            library.LayerOptions,
            layer_index=extract_layer_index(name),
            num_layers=model.get_total_num_hidden_layers(),
            num_q_heads=impl.num_heads,
            num_kv_heads=impl.num_kv_heads,
            first_kv_head=first_kv_head(rank, parallel.tensor_parallel_size, total_kv_heads),
            total_kv_heads=total_kv_heads,
            head_dim=impl.head_size,
            page_size=page_size,
            sm_scale=impl.scale,
            softcap=impl.logits_soft_cap,
            window_left=impl.sliding_window - 1 if impl.sliding_window > 0 else -1,
            attn_sink=None if sinks is None else sinks.data_ptr(),
        )
        self.handle = self.lib.create(self.lib.bd_layer_create, self.runtime.handle, options)

    def __del__(self):
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            self.lib.bd_layer_destroy(handle)


def first_kv_head(rank, num_ranks, total_kv_heads):
    """Ranks beyond the number of KV heads hold replicas: neighbours share a head."""
    return rank * total_kv_heads // num_ranks


def _total_kv_heads(model, parallel, own):
    """The model's KV heads. Models whose layers differ say so by a rank holding another share."""
    total = model.get_total_num_kv_heads()
    ranks = parallel.tensor_parallel_size
    return total if own == max(1, total // ranks) else own * ranks


def _carried(wanted, kv_cache_dtype, cache_config):
    """Whether a layer of this cache dtype is the library's; raises when the engine's dtype and its
    recipe do not belong together."""
    if cache_config.cache_dtype not in wanted.carriers:
        raise UnsupportedEngine(
            f"the recipe's mode {wanted.mode} keeps {wanted.format} pages, which need "
            f"--kv-cache-dtype {wanted.carriers[0]}, but this engine has "
            f"'{cache_config.cache_dtype}' ({wanted.note})."
        )
    return kv_cache_dtype == cache_config.cache_dtype


def _refuse_unsupported(impl, config):
    """Raises for what pages of this library cannot serve; head sizes are the library's to check."""
    way_out = "Start the model with --kv-cache-dtype auto and without a recipe."
    attn_type = getattr(impl, "attn_type", AttentionType.DECODER)
    page_size = config.cache_config.block_size
    speculative = config.speculative_config
    reason = None
    if attn_type != AttentionType.DECODER:
        reason = (
            f"it has {AttentionType(attn_type).value} attention, and only a decoder's causal "
            "self-attention has a KV cache that grows token by token"
        )
    elif impl.alibi_slopes is not None:
        reason = "it uses ALiBi position biases, which the attention over FP4 pages does not add"
    elif impl.kv_sharing_target_layer_name is not None:
        reason = (
            f"a layer reads the KV cache of another ({impl.kv_sharing_target_layer_name}) instead "
            "of its own"
        )
    elif config.model_config.dtype not in DTYPES:
        reason = f"its dtype is {config.model_config.dtype}; float32, bfloat16 and float16 are read"
    elif speculative is not None and speculative.method not in MODEL_FREE_DRAFTERS:
        reason = (
            f"its speculative method '{speculative.method}' has attention layers of its own; "
            f"drafters without a model are served ({', '.join(MODEL_FREE_DRAFTERS)})"
        )
    elif page_size % TILE_TOKENS:
        reason = f"--block-size is {page_size}, but pages are whole tiles of {TILE_TOKENS} tokens"
        way_out = f"Use --block-size 128 or another multiple of {TILE_TOKENS}."
    if reason:
        raise UnsupportedEngine(
            f"This model cannot be served from bitdecoding pages: {reason}. {way_out}"
        )
