# SPDX-License-Identifier: Apache-2.0
"""Where a recipe comes from, what each mode asks of vLLM, and the small rules of the plugin."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from bitdecoding_vllm import engine, impl, layer, library, recipe, runtime, tail, threads
from bitdecoding_vllm.errors import UnsupportedEngine

JSON = '{"mode": "bitdecoding-nvfp4", "key_shift": false}'


def config(value):
    return {"bitdecoding": {"recipe": value}}


def test_another_vllm_is_refused_with_a_recipe(monkeypatch):
    import vllm

    from bitdecoding_vllm import plugin

    overridden = []
    monkeypatch.setattr(plugin, "_override_backends", lambda: overridden.append(True))
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    monkeypatch.delenv(plugin.ENV_ANY_VLLM, raising=False)
    monkeypatch.setenv(recipe.ENV_RECIPE, JSON)
    with pytest.raises(UnsupportedEngine, match="this is vLLM 0.33.1 .* supports 0.32.x"):
        plugin.register()
    monkeypatch.delenv(recipe.ENV_RECIPE)
    plugin.register()  # stays off
    assert not overridden
    monkeypatch.setenv(plugin.ENV_ANY_VLLM, "1")
    plugin.register()
    assert overridden


def test_no_recipe(monkeypatch):
    monkeypatch.delenv(recipe.ENV_RECIPE, raising=False)
    assert recipe.resolve({}) == (None, None)
    assert recipe.resolve({"another plugin": {"recipe": 3}}) == (None, None)


def test_environment_wins_and_says_so(monkeypatch):
    monkeypatch.setenv(recipe.ENV_RECIPE, JSON)
    source, note = recipe.resolve(config({"mode": "bf16"}))
    assert source.text == JSON and source.file is None
    assert note == (
        'recipe from BITDECODING_RECIPE; it wins over additional_config["bitdecoding"]["recipe"]'
    )
    monkeypatch.setenv(recipe.ENV_RECIPE, "  ")
    source, note = recipe.resolve(config({"mode": "bf16"}))
    assert json.loads(source.text) == {"mode": "bf16"}
    assert "wins" not in note


def test_path_text_and_object_are_the_same_recipe(tmp_path, monkeypatch):
    monkeypatch.delenv(recipe.ENV_RECIPE, raising=False)
    file = tmp_path / "recipe.json"
    file.write_text(JSON)
    by_path, _ = recipe.resolve(config(str(file)))
    assert by_path.file == str(file) and str(file) in by_path.origin
    by_text, _ = recipe.resolve(config(JSON))
    by_object, _ = recipe.resolve(config(json.loads(JSON)))
    assert json.loads(by_text.text) == json.loads(by_object.text)


@pytest.mark.parametrize(
    "additional, words",
    [
        (config("no/such/recipe.json"), "no such file"),
        (config(7), "is int"),
        ({"bitdecoding": {"recepi": JSON}}, "unknown key 'recepi'"),
        ({"bitdecoding": JSON}, "must be an object"),
    ],
)
def test_what_names_no_recipe_is_refused(additional, words, monkeypatch):
    monkeypatch.delenv(recipe.ENV_RECIPE, raising=False)
    with pytest.raises(recipe.RecipeError, match=words):
        recipe.resolve(additional)


@pytest.mark.parametrize("mode", [m for m in engine.MODES if m != "stock"])
def test_modes_hold_in_the_library_and_name_its_cache_dtype(mode):
    """The table of the launcher and the library's presets say the same."""
    overrides = {"key_shift": False} if mode.startswith("bitdecoding") else {}
    source = recipe.from_value(engine.mode_recipe(mode, overrides), "test")
    made = runtime.Runtime(source, "test", "model")
    assert made.mode == mode
    assert engine.MODES[mode] == made.carriers[0]


def test_unknown_and_foreign_modes_are_refused():
    with pytest.raises(engine.ModeError, match="unknown mode 'nvfp3'"):
        engine.engine_args("nvfp3", "model")
    with pytest.raises(engine.ModeError, match="TurboQuant"):
        engine.engine_args("turboquant-4bit-nc", "model")
    with pytest.raises(engine.ModeError, match="no recipe"):
        engine.engine_args("stock", "model", {"hadamard": False})


def test_serve_flags_are_what_the_arguments_say():
    arguments = engine.engine_args("bf16", "m", block_size=64, enforce_eager=True, seed=None)
    words = engine.serve_flags(arguments)
    assert words[0] == "m"
    assert words[words.index("--block-size") + 1] == "64"
    assert "--enforce-eager" in words and "--seed" not in words
    given = json.loads(words[words.index("--additional-config") + 1])
    assert given == {"bitdecoding": {"recipe": {"mode": "bf16"}}}


def test_an_unknown_recipe_key_stops_registration(monkeypatch):
    monkeypatch.setenv(recipe.ENV_RECIPE, '{"mode": "bitdecoding-nvfp4", "hadamrd": true}')
    from bitdecoding_vllm import plugin

    with pytest.raises(library.BitdecodingError, match="hadamrd"):
        plugin.register()


def test_scales_of_a_checkpoint_are_not_dropped_in_silence(monkeypatch):
    from bitdecoding_vllm import metadata

    plain = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)
    scaled = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=0.25)
    layers = {"layers.0.attn": plain, "layers.1.attn": scaled, "layers.2.attn": SimpleNamespace()}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    lines = []
    monkeypatch.setattr(metadata.logger, "warning", lambda text, *args: lines.append(text % args))
    metadata.warn_of_checkpoint_scales(["layers.0.attn", "layers.2.attn"], config)
    assert lines == []
    metadata.warn_of_checkpoint_scales(list(layers), config)
    assert "v_scale for 1 layers (layers.1.attn" in lines[0]


def test_a_cache_tensor_of_another_shape_is_refused():
    layer = object.__new__(impl.BitdecodingImpl)
    layer.runtime = SimpleNamespace(token_bytes=lambda head_size, page_size: 72)
    layer.layer = SimpleNamespace(page_size=128)
    layer.head_size, layer.num_kv_heads = 64, 3
    pages = torch.zeros(5, 3, 128, 72, dtype=torch.uint8)
    for wrong in (pages[:, :2], pages[:, :, :64], pages[..., :70], pages.transpose(1, 2)):
        with pytest.raises(UnsupportedEngine, match="does not hold .pages, 3 KV heads, 128"):
            layer._bind(wrong)


def test_key_heads_of_tensor_parallel_ranks():
    def heads(ranks, total):
        return [layer.first_kv_head(rank, ranks, total) for rank in range(ranks)]

    assert heads(1, 3) == [0]
    assert heads(4, 8) == [0, 2, 4, 6]
    assert heads(8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]  # replicas: neighbours share a head
    assert heads(2, 1) == [0, 0]


def test_pool_floor_share_and_cap():
    info = library.PageInfo(
        head_bytes=9216, group_tokens=16, groups_per_page=8, slot_bytes_per_head=4096, min_slots=12
    )
    floor = tail.size_pool(info, 0.03, 100, 3, 30)
    assert floor.num_slots == 12
    shared = tail.size_pool(info, 0.03, 1000, 3, 30)
    assert shared.num_slots == int(0.03 * 1000 * 9216 * 3) // (4096 * 3)
    assert shared.total_bytes == shared.num_slots * 4096 * 3 * 30
    assert tail.size_pool(info, 0.5, 1, 3, 30).num_slots == 8  # every group of the only page


@pytest.mark.parametrize(
    "environment, cpus",
    [
        ({"GOMP_CPU_AFFINITY": "1 3 5-7"}, {1, 3, 5, 6, 7}),
        ({"KMP_AFFINITY": "granularity=fine,explicit,proclist=[0,2,4]"}, {0, 2, 4}),
        ({"OMP_PLACES": "{0,1}"}, {0, 1}),
        ({"OMP_PLACES": "cores"}, set()),
        ({}, set()),
    ],
)
def test_cpus_of_a_worker(environment, cpus):
    assert threads.openmp_cpus(environment) == cpus


def test_the_mask_is_restored():
    before = os.sched_getaffinity(0)
    with threads.all_worker_cpus() as number:
        assert number == len(os.sched_getaffinity(0))
    assert os.sched_getaffinity(0) == before


def thread_masks():
    """The CPUs that each thread of this process may use, by thread."""
    tasks = [int(name) for name in os.listdir("/proc/self/task")]
    return {task: os.sched_getaffinity(task) for task in tasks}


def test_threads_of_a_pinned_worker_use_all_its_cpus(monkeypatch):
    """OpenMP pins a worker's main thread to its first CPU; the library's threads must not inherit
    that."""
    own = os.sched_getaffinity(0)
    if len(own) < 2:
        pytest.skip("needs two CPUs")
    worker = set(sorted(own)[:2])
    monkeypatch.setenv("GOMP_CPU_AFFINITY", " ".join(map(str, sorted(worker))))
    source = recipe.from_value({"mode": "bf16"}, "test")
    os.sched_setaffinity(0, {min(worker)})
    try:
        before = thread_masks()
        made = runtime.Runtime(source, "test", "model")
        masks = [mask for task, mask in thread_masks().items() if task not in before]
    finally:
        os.sched_setaffinity(0, own)
    assert made.described["threads"] == 2
    assert masks == [worker]  # the calling thread is the other one


def test_thread_count_from_the_environment(monkeypatch):
    monkeypatch.setenv("BITDECODING_NUM_THREADS", "3")
    assert threads.requested("BITDECODING_NUM_THREADS", 8) == 3
    monkeypatch.setenv("BITDECODING_NUM_THREADS", "many")
    with pytest.raises(threads.ThreadsError, match="'many'"):
        threads.requested("BITDECODING_NUM_THREADS", 8)
