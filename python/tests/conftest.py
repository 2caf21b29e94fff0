# SPDX-License-Identifier: Apache-2.0
"""Shared pieces: the small model, and one engine at a time inside this process.

One process and no OpenMP binding keep an engine's start at some seconds; each file starts its
engines once (module scope) because that is most of a test's time.
"""

import contextlib
import gc
import os
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
for variable in ("BITDECODING_RECIPE", "BITDECODING_LOGITS_CAPTURE"):
    os.environ.pop(variable, None)

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "out" / "models" / "SmolLM2-135M-Instruct"

CACHE_BYTES = 64 << 20
MAX_LENGTH = 1024


def pytest_collection_modifyitems(items):
    """Speculation goes last; its file says why."""
    items.sort(key=lambda item: item.path.name == "test_speculation.py")


@pytest.fixture(scope="session")
def model():
    path = Path(os.environ.get("BITDECODING_TEST_MODEL", MODEL))
    if not (path / "config.json").is_file():
        pytest.fail(f"there is no model at {path}; run tools/setup/model.sh first")
    return str(path)


@pytest.fixture(scope="session")
def engine(model):
    """engine(mode, overrides, **LLM arguments) as a context: an LLM that is gone afterwards."""

    @contextlib.contextmanager
    def start(mode, overrides=None, **arguments):
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        from bitdecoding_vllm.engine import engine_args

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "max_model_len": MAX_LENGTH,
            "max_num_seqs": 4,
            "disable_log_stats": False,
            "seed": 0,
            **arguments,
        }
        served = settings.pop("model", model)
        llm = LLM(**engine_args(mode, served, overrides, **settings))
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
            gc.collect()

    return start


@pytest.fixture(scope="session")
def long_text():
    """English that the model knows how to continue, some 700 tokens of it."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return " ".join(text.split())[:3200]
