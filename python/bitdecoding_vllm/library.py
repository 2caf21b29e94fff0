# SPDX-License-Identifier: Apache-2.0
"""Loads libbitdecoding and mirrors include/bitdecoding/bitdecoding.h in ctypes.

The structs carry `struct_size`, and the ABI number is compared on loading: a library of another
version is refused with a sentence instead of being misread.
"""

import ctypes
import os
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint64,
    c_void_p,
    sizeof,
)
from pathlib import Path

ABI_VERSION = 1
FILE_NAME = "libbitdecoding.so"
ENV_LIBRARY = "BITDECODING_LIBRARY"

F32, BF16, F16 = 1, 2, 3


class LibraryError(RuntimeError):
    """The library is missing, does not load, or has another ABI."""


class BitdecodingError(RuntimeError):
    """A call into the library failed; the text is the library's own sentence."""


class RuntimeOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("recipe_json", c_char_p),
        ("recipe_file", c_char_p),
        ("origin", c_char_p),
        ("backend", c_char_p),
        ("isa", c_char_p),
        ("model", c_char_p),
        ("num_threads", c_int32),
        ("device", c_int32),
    ]


class PageInfo(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("head_bytes", c_int64),
        ("group_tokens", c_int32),
        ("groups_per_page", c_int32),
        ("slot_bytes_per_head", c_int64),
        ("min_slots", c_int32),
        ("bytes_per_token_x1000", c_int32),
    ]


class LayerOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("layer_index", c_int32),
        ("num_layers", c_int32),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("first_kv_head", c_int32),
        ("total_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("page_size", c_int32),
        ("sm_scale", c_float),
        ("softcap", c_float),
        ("window_left", c_int32),
        ("reserved", c_int32),
        ("attn_sink", c_void_p),
        ("key_outer", c_void_p),
        ("value_outer", c_void_p),
    ]


class StepsOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("head_dim", c_int32),
        ("page_size", c_int32),
        ("num_pages", c_int64),
        ("num_slots", c_int32),
        ("max_requests", c_int32),
    ]


class StepInput(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_requests", c_int32),
        ("reserved", c_int32),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_tokens", c_int64),
    ]


class Tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("stride_token", c_int64),
        ("stride_head", c_int64),
        ("dtype", c_int32),
        ("reserved", c_int32),
    ]


class Cache(Structure):
    _fields_ = [
        ("pages", c_void_p),
        ("num_pages", c_int64),
        ("stride_page", c_int64),
        ("stride_head", c_int64),
        ("shadow", c_void_p),
        ("num_slots", c_int64),
    ]


class WriteParams(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("layer", c_void_p),
        ("steps", c_void_p),
        ("cache", Cache),
        ("key", Tensor),
        ("value", Tensor),
        ("num_tokens", c_int64),
    ]


class AttendParams(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("layer", c_void_p),
        ("steps", c_void_p),
        ("cache", Cache),
        ("query", Tensor),
        ("key", Tensor),
        ("value", Tensor),
        ("output", Tensor),
        ("lse", c_void_p),
        ("num_tokens", c_int64),
    ]


class CudaStepsOptions(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("steps", StepsOptions),
        ("num_q_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("max_step_tokens", c_int64),
        ("max_pages_per_request", c_int64),
        ("windows", POINTER(c_int32)),
        ("num_windows", c_int32),
        ("reserved", c_int32),
    ]


class CudaMemory(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("steps_bytes", c_int64),
        ("attend_bytes", c_int64),
    ]


class GatherParams(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("layer", c_void_p),
        ("steps", c_void_p),
        ("cache", Cache),
        ("request", c_int32),
        ("with_shadow", c_int32),
        ("begin", c_int64),
        ("end", c_int64),
        ("key", Tensor),
        ("value", Tensor),
    ]


class MergeParams(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("runtime", c_void_p),
        ("num_tokens", c_int64),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("a", c_void_p),
        ("b", c_void_p),
        ("lse_a", c_void_p),
        ("lse_b", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
    ]


class Counters(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("non_finite", c_uint64),
        ("saturated_blocks", c_uint64),
        ("flushed_blocks", c_uint64),
        ("requantized_prefix", c_uint64),
        ("corrupt_scales", c_uint64),
        ("steps", c_uint64),
        ("evicted_slots", c_uint64),
        ("refused_groups", c_uint64),
        ("missing_tokens", c_uint64),
        ("lost_partial_groups", c_uint64),
        ("used_slots", c_uint64),
    ]


COUNTER_NAMES = tuple(name for name, _ in Counters._fields_ if name != "struct_size")

_SIGNATURES = {
    "bd_version": (c_char_p, []),
    "bd_last_error": (c_char_p, []),
    "bd_runtime_create": (c_int, [POINTER(RuntimeOptions), POINTER(c_void_p)]),
    "bd_runtime_destroy": (None, [c_void_p]),
    "bd_runtime_describe": (c_char_p, [c_void_p]),
    "bd_runtime_recipe_value": (c_char_p, [c_void_p, c_char_p]),
    "bd_page_info_get": (c_int, [c_void_p, c_int32, c_int32, c_int32, POINTER(PageInfo)]),
    "bd_layer_create": (c_int, [c_void_p, POINTER(LayerOptions), POINTER(c_void_p)]),
    "bd_layer_destroy": (None, [c_void_p]),
    "bd_steps_create": (c_int, [c_void_p, POINTER(StepsOptions), POINTER(c_void_p)]),
    "bd_steps_destroy": (None, [c_void_p]),
    "bd_steps_build": (c_int, [c_void_p, c_void_p]),
    "bd_write": (c_int, [c_void_p]),
    "bd_attend": (c_int, [c_void_p]),
    "bd_cuda_memory_get": (c_int, [c_void_p, POINTER(CudaStepsOptions), POINTER(CudaMemory)]),
    "bd_cuda_steps_create": (c_int, [c_void_p, POINTER(CudaStepsOptions), POINTER(c_void_p)]),
    "bd_cuda_steps_build": (c_int, [c_void_p, c_void_p, c_int32, c_void_p]),
    "bd_cuda_steps_forget": (c_int, [c_void_p, c_int64, c_void_p]),
    "bd_cuda_write": (c_int, [c_void_p, c_void_p]),
    "bd_cuda_attend": (c_int, [c_void_p, c_void_p]),
    "bd_cuda_gather": (c_int, [c_void_p, c_void_p]),
    "bd_cuda_merge": (c_int, [c_void_p, c_void_p]),
    "bd_advise_huge_pages": (c_int, [c_void_p, c_int64, POINTER(c_int64)]),
    "bd_counters_get": (c_int, [c_void_p, POINTER(Counters)]),
    "bd_calibration_save": (c_int, [c_void_p, c_char_p, POINTER(c_uint64)]),
    "bd_calibration_phase": (c_int, [c_void_p, c_char_p]),
    "bd_calibration_state_save": (c_int, [c_void_p, c_char_p, c_char_p]),
    "bd_calibration_state_load": (c_int, [c_void_p, c_char_p]),
    "bd_calibration_describe": (c_char_p, [c_void_p]),
    "bd_probe_start": (c_int, [c_void_p, c_char_p]),
    "bd_probe_replace": (c_int, [c_void_p, POINTER(c_int32), c_int32]),
    "bd_probe_describe": (c_char_p, [c_void_p]),
}


def sized(struct_type, **fields):
    """A struct of the ABI with its `struct_size` set."""
    return struct_type(struct_size=sizeof(struct_type), **fields)


def candidates():
    """Where the library is looked for, in order. The environment variable excludes the rest."""
    named = os.environ.get(ENV_LIBRARY)
    if named:
        return [Path(named)]
    package = Path(__file__).resolve().parent
    checkout = package.parent.parent
    return [
        package / FILE_NAME,
        checkout / "build" / "release" / "lib" / FILE_NAME,
        checkout / "build" / "cuda" / "lib" / FILE_NAME,
    ]


def find():
    paths = candidates()
    for path in paths:
        if path.is_file():
            return path
    tried = ", ".join(str(path) for path in paths)
    raise LibraryError(
        f"{FILE_NAME} was not found (looked at: {tried}). Build it with 'cmake --preset release && "
        f"cmake --build --preset release', or set {ENV_LIBRARY} to its path."
    )


class Library:
    """The loaded library; calls that return a status raise BitdecodingError with its sentence."""

    def __init__(self, path):
        self.path = Path(path)
        try:
            self.cdll = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise LibraryError(
                f"{self.path} could not be loaded: {error}. It must be built for this machine; "
                f"build it anew or set {ENV_LIBRARY} to another one."
            ) from error
        self._check_abi()
        for name, (result, arguments) in _SIGNATURES.items():
            function = self._function(name)
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)
        self.version = self.bd_version().decode()

    def _function(self, name):
        try:
            return getattr(self.cdll, name)
        except AttributeError:
            raise LibraryError(
                f"{self.path} lacks the function {name}, so it is older than this plugin. Build "
                "the library and install the plugin from the same source."
            ) from None

    def _check_abi(self):
        try:
            abi_version = self.cdll.bd_abi_version
        except AttributeError:
            raise LibraryError(
                f"{self.path} has no function bd_abi_version, so it is not the bitdecoding "
                f"library. Set {ENV_LIBRARY} to the right {FILE_NAME}."
            ) from None
        abi_version.restype = c_int
        abi_version.argtypes = []
        found = abi_version()
        if found != ABI_VERSION:
            raise LibraryError(
                f"{self.path} has ABI {found}, but this plugin speaks ABI {ABI_VERSION}. Build the "
                f"library and install the plugin from the same source."
            )

    def last_error(self):
        return (self.bd_last_error() or b"").decode(errors="replace")

    def check(self, status):
        if status != 0:
            raise BitdecodingError(self.last_error() or f"the library returned status {status}")

    def create(self, function, owner, options):
        """The handle that one of the three create functions makes (owner is None for a runtime)."""
        handle = c_void_p()
        if owner is None:
            status = function(byref(options), byref(handle))
        else:
            status = function(owner, byref(options), byref(handle))
        self.check(status)
        return handle.value


_loaded = {}


def load():
    """The process's library; the same object for the same path."""
    path = find()
    if path not in _loaded:
        _loaded[path] = Library(path)
    return _loaded[path]
