# SPDX-License-Identifier: Apache-2.0
"""The BF16 pool on a GPU: sized while vLLM profiles its memory, so that the pool is inside the
profile. How many pages there will be is not known then; what they may take at the most is."""

from dataclasses import dataclass

import torch

from bitdecoding_vllm.tail import Pool


@dataclass(frozen=True)
class Budget:
    """Bytes that pages and pool may take on this GPU, in `num_layers` layers."""

    num_bytes: int
    num_layers: int


def budget_of(vllm_config):
    cache, model = vllm_config.cache_config, vllm_config.model_config
    num_layers = model.get_num_layers(vllm_config.parallel_config)
    num_bytes = cache.kv_cache_memory_bytes
    if not num_bytes:
        _, total = torch.cuda.mem_get_info()
        num_bytes = int(cache.gpu_memory_utilization * total) - torch.cuda.memory_allocated()
    return Budget(max(num_bytes, 0), num_layers)


def size_pool(info, share, budget, num_kv_heads):
    """As the CPU side's, with the pages of a layer that the budget could pay for."""
    slot_bytes = info.slot_bytes_per_head * num_kv_heads
    layer_bytes = budget.num_bytes // budget.num_layers
    affordable = int(share * layer_bytes) // slot_bytes
    every_group = layer_bytes // (info.head_bytes * num_kv_heads) * info.groups_per_page
    num_slots = max(info.min_slots, min(affordable, every_group))
    return Pool(num_slots, info.group_tokens, slot_bytes, budget.num_layers)
