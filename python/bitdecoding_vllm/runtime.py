# SPDX-License-Identifier: Apache-2.0
"""The process-wide part: one bd_runtime a recipe, its counters, calibration and the start line.

A runtime lives as long as a layer or a step object refers to it, so an engine that goes away takes
its own with it, and two engines with the same recipe share one. One that calibrates lives until
its process exits, when it writes its means.
"""

import json
import os
import weakref
from ctypes import byref, c_int32, c_uint64
from multiprocessing import util

from vllm.logger import init_logger

from bitdecoding_vllm import library, recipe, threads

ENV_BACKEND = "BITDECODING_BACKEND"
ENV_ISA = "BITDECODING_ISA"
ENV_THREADS = "BITDECODING_NUM_THREADS"

# Losses of BF16 rows are told when they appear and then each time they have grown tenfold.
LOSSES = {
    "evicted_slots": "live BF16 groups were dropped for want of slots",
    "refused_groups": "groups got no BF16 slot",
    "missing_tokens": "tokens were read in the page format instead of BF16",
    "lost_partial_groups": "groups were continued without their BF16 rows",
    "non_finite": "values of K or V were NaN or infinite and were stored as 0",
    "corrupt_scales": "invalid scale bytes were met in pages",
}
LOSS_HINT = "raise the recipe's shadow_pool_share or lower --max-num-seqs"

CALIBRATION_TOKENS = 4096  # between two saves while serving

logger = init_logger("vllm.bitdecoding")


def _text(value):
    return value.encode() if value else None


def _options(source, num_threads, model=None, device=None):
    """`device` is the ordinal of a GPU, or None on a CPU."""
    return library.sized(
        library.RuntimeOptions,
        recipe_json=_text(source.text),
        recipe_file=_text(source.file),
        origin=_text(source.origin),
        backend=_text(os.environ.get(ENV_BACKEND) if device is None else "cuda"),
        isa=_text(os.environ.get(ENV_ISA) if device is None else None),
        model=_text(model),
        num_threads=num_threads,
        device=device or 0,
    )


def validate(source):
    """Raises the library's sentence when the recipe, its sidecar or the backend does not hold."""
    lib = library.load()
    handle = lib.create(lib.bd_runtime_create, None, _options(source, 1))
    lib.bd_runtime_destroy(handle)


class Runtime:
    """One recipe on one backend, used by all layers of an engine."""

    def __init__(self, source, note, model, device=None):
        self.lib = library.load()
        self.handle = None
        self.shared = {}  # what the engine's layers have in common, by name
        with threads.all_worker_cpus() as num_threads:
            count = threads.requested(ENV_THREADS, num_threads)
            options = _options(source, count, model, device)
            self.handle = self.lib.create(self.lib.bd_runtime_create, None, options)
        self.note = note
        self.described = json.loads(self.lib.bd_runtime_describe(self.handle).decode())
        self.mode = self.value("mode")
        self.format = self.value("format")
        if self.format not in recipe.CARRIERS:
            raise library.LibraryError(
                f"the library's page format '{self.format}' is unknown to this plugin, which "
                f"knows {', '.join(recipe.CARRIERS)}. Install both from the same source."
            )
        self.carriers = recipe.CARRIERS[self.format]
        self.calibrate_file = self.value("calibrate_file") or ""
        self.pools = []
        self._told = {}
        self._unsaved_tokens = 0
        for warning in self.described.get("warnings", ()):
            logger.warning("bitdecoding: %s", warning)

    def __del__(self):
        handle, self.handle = getattr(self, "handle", None), None
        if handle:
            self.lib.bd_runtime_destroy(handle)

    def value(self, key):
        text = self.lib.bd_runtime_recipe_value(self.handle, key.encode())
        return None if text is None else text.decode()

    def page_info(self, head_dim, page_size, max_requests=1):
        info = library.sized(library.PageInfo)
        self.lib.check(
            self.lib.bd_page_info_get(self.handle, head_dim, page_size, max_requests, byref(info))
        )
        return info

    def token_bytes(self, head_dim, page_size):
        """Page bytes of one token and KV head. vLLM sizes pages by this number times tokens."""
        head_bytes = self.page_info(head_dim, page_size).head_bytes
        if head_bytes % page_size:
            raise library.BitdecodingError(
                f"a page of {page_size} tokens of head_dim {head_dim} takes {head_bytes} bytes a "
                "KV head, which is no whole number of bytes a token, so vLLM cannot size it."
            )
        return head_bytes // page_size

    def pool_share(self):
        """The share of the cache's bytes that BF16 tokens of cached pages may take."""
        if int(self.value("sink_tokens")) == 0 and int(self.value("tail_tokens")) == 0:
            return 0.0
        return float(self.value("shadow_pool_share"))

    def counters(self):
        counters = library.sized(library.Counters)
        self.lib.check(self.lib.bd_counters_get(self.handle, byref(counters)))
        return {name: getattr(counters, name) for name in library.COUNTER_NAMES}

    def warn_of_losses(self):
        counters = self.counters()
        for name, words in LOSSES.items():
            count = counters[name]
            if count and count >= 10 * self._told.get(name, 0):
                self._told[name] = count
                hint = f" ({LOSS_HINT})" if name in ("evicted_slots", "refused_groups") else ""
                logger.warning("bitdecoding: %d %s so far%s", count, words, hint)

    def observed(self, num_tokens):
        """Counts the tokens a calibrating engine has written since its last save."""
        if not self.calibrate_file:
            return
        self._unsaved_tokens += num_tokens
        if self._unsaved_tokens >= CALIBRATION_TOKENS:
            self.try_to_save_calibration()

    def save_calibration(self, path=None):
        """Writes the key means and returns (path, tokens). With tensor parallelism the library adds
        the rank's heads to the name."""
        path = path or self.calibrate_file
        tokens = c_uint64()
        self.lib.check(
            self.lib.bd_calibration_save(self.handle, os.fsencode(path), byref(tokens))
        )
        self._unsaved_tokens = 0
        return path, tokens.value

    def set_calibration_phase(self, phase):
        """Whoever sets phases saves by itself, too."""
        self.lib.check(self.lib.bd_calibration_phase(self.handle, phase.encode()))
        self.calibrate_file = ""
        self._unsaved_tokens = 0

    def save_calibration_state(self, path, note):
        self.lib.check(
            self.lib.bd_calibration_state_save(self.handle, os.fsencode(path), note.encode())
        )

    def load_calibration_state(self, path):
        self.lib.check(self.lib.bd_calibration_state_load(self.handle, os.fsencode(path)))

    def describe_calibration(self):
        return json.loads(self.lib.bd_calibration_describe(self.handle).decode())

    def start_probe(self, recipe_json, layers):
        """`layers` are replaced by the probe's; none of them: it compares."""
        self.lib.check(self.lib.bd_probe_start(self.handle, recipe_json.encode()))
        if recipe_json:
            array = (c_int32 * len(layers))(*layers)
            self.lib.check(self.lib.bd_probe_replace(self.handle, array, len(layers)))

    def describe_probe(self):
        return json.loads(self.lib.bd_probe_describe(self.handle).decode())

    def try_to_save_calibration(self):
        """A full disk is no reason to stop serving; the next save may work."""
        if not self._unsaved_tokens:
            return
        try:
            path, tokens = self.save_calibration()
            logger.info("Key means of %d tokens saved to %s", tokens, path)
        except library.BitdecodingError as error:
            self._unsaved_tokens = 0
            logger.warning("The key means were not saved: %s", error)

    def log_start(self, pool, head_dim, page_size, num_pages):
        """One line that says what runs; its numbers are for one group of layers."""
        thousandths = self.page_info(head_dim, page_size).bytes_per_token_x1000
        sidecar = self.described.get("sidecar")
        outer = self.described.get("outer_scales")
        chosen = self.described["recipe"]
        logger.info(
            "bitdecoding %s: mode %s, pages %s, backend %s, ISA %s, %s threads, %g bytes a token "
            "and KV head, capacity %d tokens in pages of %d, BF16 pool %d slots of %d tokens = %d "
            "bytes in %d layers, key means %s, value means %s, outer scales %s, %s",
            self.lib.version,
            self.mode,
            self.format,
            self.described.get("backend"),
            self.described.get("isa"),
            self.described.get("threads"),
            thousandths / 1000,
            (num_pages - 1) * page_size,  # vLLM keeps page 0 for itself
            page_size,
            pool.num_slots,
            pool.group_tokens,
            pool.total_bytes,
            pool.num_layers,
            sidecar["path"] if sidecar and chosen["key_shift"] else "off",
            "on" if sidecar and sidecar["value_means"] and chosen["value_shift"] else "off",
            outer["path"] if outer else "off",
            self.note,
        )


_runtimes = weakref.WeakValueDictionary()
_current = None


def wanted(vllm_config):
    """(source, note) when this engine asks for the library's cache, by a recipe or by nvfp4."""
    source, note = recipe.resolve(vllm_config.additional_config)
    if source is None and vllm_config.cache_config.cache_dtype == recipe.DEFAULT_CARRIER:
        source = recipe.RecipeSource(
            "the default recipe (no BITDECODING_RECIPE is set)", text=recipe.DEFAULT_RECIPE
        )
        note = "default recipe"
    return None if source is None else (source, note)


def for_engine(vllm_config, device=None):
    """The engine's runtime, or None when the engine keeps to vLLM's own caches. `device` is the
    ordinal of its GPU, or None on a CPU."""
    global _current
    asked = wanted(vllm_config)
    if asked is None:
        _current = None
        return None
    source, note = asked
    model = model_name(vllm_config.model_config.model)
    settings = [os.environ.get(name) for name in (ENV_BACKEND, ENV_ISA, ENV_THREADS)]
    # Two engines on one GPU are in turn, not at once, and each has its own pools.
    key = (source, model, device, *settings)
    runtime = _runtimes.get(key)
    if runtime is None:
        runtime = _create(source, note, model, device)
        _runtimes[key] = runtime
        if runtime.calibrate_file:
            # vLLM frees the layers, and with them the runtime, before the worker exits; a forked
            # worker exits without atexit. This holds the runtime and runs in both kinds of worker.
            util.Finalize(None, runtime.try_to_save_calibration, exitpriority=100)
    _current = weakref.ref(runtime)
    return runtime


def model_name(model):
    """The last part of a path or of owner/name: a sidecar must not depend on where a model lies."""
    return os.path.basename(model.rstrip("/"))


def _create(source, note, model, device):
    try:
        return Runtime(source, note, model, device)
    except library.BitdecodingError as error:
        if note != "default recipe":
            raise
        raise recipe.RecipeError(
            f"--kv-cache-dtype nvfp4 without a recipe means the mode bitdecoding-nvfp4, whose key "
            f"means come from a calibration of this model ({error}). Either calibrate first: serve "
            f'once with {recipe.ENV_RECIPE}=\'{{"mode": "bitdecoding-nvfp4", '
            f'"calibrate_file": "key_shift.safetensors"}}\', then name the file in the recipe as '
            f'"key_shift_file". Or do without: {recipe.ENV_RECIPE}=\'{{"mode": '
            f'"bitdecoding-nvfp4", "key_shift": false}}\'.'
        ) from error


def current():
    """The runtime of the engine whose layers were built last, for hooks that get no config."""
    return _current() if _current is not None else None


def current_mode():
    runtime = current()
    return "stock" if runtime is None else runtime.mode
