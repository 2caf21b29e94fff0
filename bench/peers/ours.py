# SPDX-License-Identifier: Apache-2.0
"""One layer of this library through its C ABI, as the vLLM plugin calls it: for timing beside other operators."""

import atexit
import ctypes
import json
import os
import pathlib
import struct
import sys
import tempfile

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
from bitdecoding_vllm import library  # noqa: E402

DTYPES = {"f32": (torch.float32, library.F32), "bf16": (torch.bfloat16, library.BF16)}
FILL_TOKENS = 4096  # of all sequences in one step


def _sidecar(path, means):
    """Key means of one layer as safetensors: a length, a JSON header, the values."""
    data = means.to(torch.float32).numpy().tobytes()
    header = {"__metadata__": {"version": "1"},
              "key_shift": {"dtype": "F32", "shape": [1, *means.shape], "data_offsets": [0, len(data)]}}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _recipe(args, means):
    """The recipe as the command line asks for it, with made-up key means if it subtracts any."""
    recipe = json.loads(pathlib.Path(args.recipe).read_text()) if args.recipe else {"mode": args.mode}
    if args.arithmetic:
        recipe["arithmetic"] = args.arithmetic
    shifted = recipe.get("key_shift", recipe["mode"].startswith("bitdecoding"))
    if shifted:
        handle, name = tempfile.mkstemp(suffix=".safetensors")
        os.close(handle)
        atexit.register(os.unlink, name)
        _sidecar(pathlib.Path(name), means)
        recipe["key_shift_file"] = name
    return recipe, shifted


class Ours:
    """`write` and `attend` run the step that `step` planned; `plan` plans the same step again."""

    def __init__(self, args, capacity):
        gen = torch.Generator().manual_seed(1)
        self.gen, self.args, self.lib = gen, args, library.load()
        self.dtype, self.dtype_code = DTYPES[args.dtype]
        self.means = torch.randn((args.kv_heads, args.head_dim), generator=gen)
        recipe, shifted = _recipe(args, self.means)
        if not shifted:
            self.means.zero_()
        self.runtime = self.lib.create(self.lib.bd_runtime_create, None, library.sized(
            library.RuntimeOptions, recipe_json=json.dumps(recipe).encode(), origin=b"bench/peers",
            backend=args.backend.encode(), isa=args.isa.encode() if args.isa else None,
            num_threads=args.threads))  # fmt: skip
        self.layer = self.lib.create(self.lib.bd_layer_create, self.runtime, library.sized(
            library.LayerOptions, num_layers=1, num_q_heads=args.q_heads, num_kv_heads=args.kv_heads,
            total_kv_heads=args.kv_heads, head_dim=args.head_dim, page_size=args.page_size,
            sm_scale=args.head_dim**-0.5, window_left=-1))  # fmt: skip
        self._make_cache(capacity)

    def _make_cache(self, capacity):
        args = self.args
        info = library.sized(library.PageInfo)
        self.lib.check(self.lib.bd_page_info_get(self.runtime, args.head_dim, args.page_size, args.batch,
                                                 ctypes.byref(info)))  # fmt: skip
        per_sequence = -(-capacity // args.page_size)
        num_pages, num_slots = per_sequence * args.batch, 4 * info.min_slots
        self.pages = torch.empty((num_pages, args.kv_heads, info.head_bytes), dtype=torch.uint8)
        self.lib.check(self.lib.bd_advise_huge_pages(self.pages.data_ptr(), self.pages.nbytes,
                                                     ctypes.byref(ctypes.c_int64())))  # fmt: skip
        self.pages.zero_()
        shadow = (num_slots, args.kv_heads, 2, info.group_tokens, args.head_dim)
        self.shadow = torch.zeros(shadow, dtype=torch.bfloat16)
        self.table = torch.randperm(num_pages, generator=self.gen).to(torch.int32).view(args.batch, per_sequence)
        self.steps = self.lib.create(self.lib.bd_steps_create, self.runtime, library.sized(
            library.StepsOptions, head_dim=args.head_dim, page_size=args.page_size, num_pages=num_pages,
            num_slots=num_slots, max_requests=args.batch))  # fmt: skip
        self.cache = library.Cache(self.pages.data_ptr(), num_pages, self.pages.stride(0), self.pages.stride(1),
                                   self.shadow.data_ptr(), num_slots)  # fmt: skip

    def _rows(self, tokens, heads, means=None):
        rows = torch.randn((tokens, heads, self.args.head_dim), generator=self.gen)
        return (rows if means is None else rows + means).to(self.dtype)

    def _tensor(self, rows):
        return library.Tensor(rows.data_ptr(), rows.stride(0), rows.stride(1), self.dtype_code)

    def fill(self, tokens):
        """Writes positions [0, tokens) of every sequence."""
        chunk = max(FILL_TOKENS // self.args.batch, 64)
        for first in range(0, tokens, chunk):
            self.step(first, min(chunk, tokens - first))
            self.write()

    def step(self, first, count):
        """Plans `count` tokens a sequence from position `first` on, and makes their rows."""
        args, batch = self.args, self.args.batch
        positions = torch.arange(first, first + count)
        slots = self.table[:, positions // args.page_size].to(torch.int64) * args.page_size
        self.slots = (slots + positions % args.page_size).flatten()
        self.query_start = torch.arange(batch + 1, dtype=torch.int32) * count
        self.seq_lens = torch.full((batch,), first + count, dtype=torch.int32)
        self.input = library.sized(
            library.StepInput, num_requests=batch, block_table=self.table.data_ptr(),
            block_table_stride=self.table.stride(0), query_start=self.query_start.data_ptr(),
            seq_lens=self.seq_lens.data_ptr(), slot_mapping=self.slots.data_ptr(),
            num_tokens=batch * count)  # fmt: skip
        self.plan()
        tokens = batch * count
        self.query = self._rows(tokens, args.q_heads)
        self.key, self.value = self._rows(tokens, args.kv_heads, self.means), self._rows(tokens, args.kv_heads)
        self.output = torch.full_like(self.query, float("nan"))
        common = dict(layer=self.layer, steps=self.steps, cache=self.cache, key=self._tensor(self.key),
                      value=self._tensor(self.value), num_tokens=tokens)  # fmt: skip
        self.write_params = library.sized(library.WriteParams, **common)
        self.attend_params = library.sized(library.AttendParams, query=self._tensor(self.query),
                                           output=self._tensor(self.output), **common)  # fmt: skip
        self._write_at = ctypes.addressof(self.write_params)
        self._attend_at = ctypes.addressof(self.attend_params)

    def plan(self):
        self.lib.check(self.lib.bd_steps_build(self.steps, ctypes.addressof(self.input)))

    def write(self):
        self.lib.check(self.lib.bd_write(self._write_at))

    def attend(self):
        self.lib.check(self.lib.bd_attend(self._attend_at))
