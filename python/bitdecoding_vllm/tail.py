# SPDX-License-Identifier: Apache-2.0
"""The tail control plane: how many BF16 slots there are, and the tensors that hold them.

Which groups are in BF16 is decided in the library, once a step. Here the pool is sized: at least
what max_num_seqs running requests need, and above that up to the recipe's share of the cache's
bytes, for the sinks and tails of cached pages. A recipe without both needs no more than the floor:
a cached page has no incomplete group.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pool:
    """Sizes of the BF16 slots of one group of layers."""

    num_slots: int
    group_tokens: int
    slot_bytes: int  # of one layer
    num_layers: int

    @property
    def total_bytes(self):
        return self.num_slots * self.slot_bytes * self.num_layers

    def tensor(self, num_kv_heads, head_dim, device=None):
        """One layer's slots. Memory is touched when a slot is first used, not before."""
        shape = (self.num_slots, num_kv_heads, 2, self.group_tokens, head_dim)
        return torch.empty(shape, dtype=torch.bfloat16, device=device)


def size_pool(info, share, num_pages, num_kv_heads, num_layers):
    """The pool of a group of layers whose pages are described by `info`."""
    slot_bytes = info.slot_bytes_per_head * num_kv_heads
    page_bytes = info.head_bytes * num_kv_heads
    affordable = int(share * num_pages * page_bytes) // slot_bytes
    every_group = num_pages * info.groups_per_page
    num_slots = min(max(info.min_slots, affordable), every_group)
    return Pool(num_slots, info.group_tokens, slot_bytes, num_layers)
