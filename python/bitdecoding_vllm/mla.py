# SPDX-License-Identifier: Apache-2.0
"""MLA models keep one latent vector a token, not K and V: their engines are refused when a recipe
or the nvfp4 cache is asked for, and are vLLM's own otherwise."""

from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

from bitdecoding_vllm import runtime
from bitdecoding_vllm.errors import UnsupportedEngine


def _refuse_if_asked():
    if runtime.wanted(get_current_vllm_config()) is not None:
        raise UnsupportedEngine(
            "this model uses multi-head latent attention (MLA), whose cache holds one latent "
            "vector a token instead of K and V, so it cannot be kept in bitdecoding pages. Start "
            "it without a recipe and with --kv-cache-dtype auto."
        )


class GuardedCpuMla(CPUMLABackend):
    @staticmethod
    def get_impl_cls():
        _refuse_if_asked()
        return CPUMLABackend.get_impl_cls()


class GuardedAmxMla(AMXMLABackend):
    @staticmethod
    def get_impl_cls():
        _refuse_if_asked()
        return AMXMLABackend.get_impl_cls()
