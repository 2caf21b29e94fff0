# SPDX-License-Identifier: Apache-2.0
"""vLLM attention backend with an NVFP4 KV cache: a thin adapter over the bitdecoding C ABI.

Nothing is imported here: vLLM only logs a failed plugin import and then runs its own code, so
everything that can fail happens inside plugin.register(), which may raise.
"""

__version__ = "0.1.0"
