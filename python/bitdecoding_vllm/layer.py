# SPDX-License-Identifier: Apache-2.0
"""One layer of the library, whichever device it is on: its bd_layer, the tensors that its parameter
structs point to, and which layers cannot be served."""

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionType

from bitdecoding_vllm import library
from bitdecoding_vllm.errors import UnsupportedEngine

DTYPES = {torch.float32: library.F32, torch.bfloat16: library.BF16, torch.float16: library.F16}
TILE_TOKENS = 64

# Drafters without a model: they have no attention layers that would share pages with the target's.
MODEL_FREE_DRAFTERS = ("ngram", "ngram_gpu", "suffix")


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


def carried(wanted, kv_cache_dtype, cache_config):
    """Whether a layer of this cache dtype is the library's; raises when the engine's dtype and its
    recipe do not belong together."""
    if cache_config.cache_dtype not in wanted.carriers:
        raise UnsupportedEngine(
            f"the recipe's mode {wanted.mode} keeps {wanted.format} pages, which need "
            f"--kv-cache-dtype {wanted.carriers[0]}, but this engine has "
            f"'{cache_config.cache_dtype}' ({wanted.note})."
        )
    return kv_cache_dtype == cache_config.cache_dtype


def refuse_unsupported(impl, config, page_size):
    """Raises for what pages of this library cannot serve; head sizes are the library's to check."""
    way_out = "Start the model with --kv-cache-dtype auto and without a recipe."
    attn_type = getattr(impl, "attn_type", AttentionType.DECODER)
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


def check_cache_shape(impl, kv_cache):
    """Raises unless vLLM's cache tensor holds the library's pages."""
    token_bytes = impl.runtime.token_bytes(impl.head_size, impl.layer.page_size)
    _, num_heads, page_size, content = kv_cache.shape
    expected = (impl.num_kv_heads, impl.layer.page_size, token_bytes)
    found = (num_heads, page_size, content * kv_cache.element_size())
    if found != expected or kv_cache.stride(2) != content:
        raise UnsupportedEngine(
            f"vLLM's cache tensor {tuple(kv_cache.shape)} of {kv_cache.dtype} with strides "
            f"{kv_cache.stride()} does not hold (pages, {expected[0]} KV heads, {expected[1]} "
            f"tokens, {expected[2]} bytes) with each head of a page in one piece."
        )


def point_cache(cache, kv_cache, shadow):
    """Takes the strides from the tensor: a padded group has a longer page than its bytes."""
    item = kv_cache.element_size()
    cache.pages = kv_cache.data_ptr()
    cache.num_pages = kv_cache.shape[0]
    cache.stride_page = kv_cache.stride(0) * item
    cache.stride_head = kv_cache.stride(1) * item
    cache.shadow = shadow.data_ptr() if shadow.numel() else None
    cache.num_slots = shadow.shape[0]
