# SPDX-License-Identifier: Apache-2.0
"""Engine set-up: the arguments and environment that start vLLM in one KV mode.

Modes differ in the cache alone, so everything else is the same for all of them. As a program it
prints the choice as JSON, for launchers in other languages:
    python -m bitdecoding_vllm.engine bitdecoding-nvfp4 [--recipe '{"key_shift": false}']
"""

import argparse
import json
import sys

from bitdecoding_vllm import recipe

PAGE_TOKENS = 128

# Mode -> its --kv-cache-dtype. `stock` is vLLM's own cache in the model's dtype.
MODES = {
    "stock": "auto",
    "bf16": recipe.CARRIERS["bf16"][0],
    "fp8": recipe.CARRIERS["fp8_e4m3"][0],
    "nvfp4": recipe.CARRIERS["nvfp4_rows"][0],
    "bitdecoding-nvfp4": recipe.CARRIERS["nvfp4"][0],
    "bitdecoding-mxfp4": recipe.CARRIERS["mxfp4"][0],
}
NOT_ON_CPU = ("turboquant-4bit-nc", "turboquant-4bit-nc-all-layers")

WORKER_EXTENSION = "bitdecoding_vllm.worker.WorkerExtension"


class ModeError(ValueError):
    """No such mode, or none that this machine serves."""


def cache_dtype(mode):
    if mode in MODES:
        return MODES[mode]
    if mode in NOT_ON_CPU:
        raise ModeError(
            f"mode '{mode}' is vLLM's TurboQuant, which its CPU build does not have; on CPU there "
            f"are: {', '.join(MODES)}."
        )
    raise ModeError(f"unknown mode '{mode}'; there are: {', '.join(MODES)}.")


def mode_recipe(mode, overrides=None):
    """The recipe object of a mode, or None for vLLM's own cache."""
    cache_dtype(mode)
    if mode == "stock":
        if overrides:
            raise ModeError("mode 'stock' has no recipe, so nothing of it can be changed.")
        return None
    return {"mode": mode, **(overrides or {})}


def engine_args(mode, model, overrides=None, **more):
    """Keyword arguments of vllm.LLM (and, with dashes, of vllm serve); `more` wins."""
    arguments = {
        "model": model,
        "kv_cache_dtype": cache_dtype(mode),
        "block_size": PAGE_TOKENS,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    chosen = mode_recipe(mode, overrides)
    if chosen is not None:
        arguments["additional_config"] = {recipe.CONFIG_KEY: {"recipe": chosen}}
    arguments.update(more)
    return arguments


def serve_flags(arguments):
    """The same as command-line words after `vllm serve`."""
    words = [str(arguments["model"])]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if name == "model" or value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        else:
            words += [flag, json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m bitdecoding_vllm.engine")
    parser.add_argument("mode", help=", ".join(MODES))
    parser.add_argument("--model", default="MODEL")
    parser.add_argument("--recipe", default="{}", help="JSON object: changes to the mode's recipe")
    options = parser.parse_args(argv)
    try:
        overrides = json.loads(options.recipe)
        arguments = engine_args(options.mode, options.model, overrides)
    except (ModeError, json.JSONDecodeError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"arguments": arguments, "serve": serve_flags(arguments)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
