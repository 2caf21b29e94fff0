# SPDX-License-Identifier: Apache-2.0
"""Which recipe this process uses, and where it came from.

The environment variable BITDECODING_RECIPE wins over additional_config {"bitdecoding": {"recipe":
...}}; both take a path or the JSON itself. What a recipe means is the library's business: it parses
and checks it. Here are only its source, and the vLLM cache dtype that carries each page format.
"""

import json
import os
from dataclasses import dataclass

ENV_RECIPE = "BITDECODING_RECIPE"
CONFIG_KEY = "bitdecoding"

# Page format of the recipe -> values of --kv-cache-dtype that carry it, the one to name first.
CARRIERS = {
    "bf16": ("bfloat16",),
    "fp8_e4m3": ("fp8_e4m3", "fp8"),
    "nvfp4_rows": ("nvfp4",),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("nvfp4",),
}

# The cache dtype that means this library even when no recipe is given.
DEFAULT_CARRIER = "nvfp4"
DEFAULT_RECIPE = '{"mode": "bitdecoding-nvfp4"}'


class RecipeError(ValueError):
    """No recipe can be had from where one was announced."""


@dataclass(frozen=True)
class RecipeSource:
    """One of `text` and `file` is set. `origin` begins the library's error messages."""

    origin: str
    text: str | None = None
    file: str | None = None


def from_value(value, origin):
    """A path, JSON text or a JSON object becomes a RecipeSource."""
    if isinstance(value, dict):
        return RecipeSource(origin, text=json.dumps(value, sort_keys=True))
    if not isinstance(value, str):
        raise RecipeError(
            f"{origin}: a recipe is a path, JSON text or a JSON object, but this is "
            f"{type(value).__name__}."
        )
    value = value.strip()
    if value.startswith("{"):
        return RecipeSource(origin, text=value)
    path = os.path.abspath(os.path.expanduser(value))
    if not os.path.isfile(path):
        raise RecipeError(
            f"{origin} names the recipe file '{value}', but there is no such file (looked at "
            f"{path}). Give the path of a recipe, or the JSON object itself."
        )
    return RecipeSource(f"{origin} ({path})", file=path)


def from_environment():
    value = os.environ.get(ENV_RECIPE, "").strip()
    return from_value(value, ENV_RECIPE) if value else None


def from_config(additional_config):
    """The recipe in a vLLM config's additional_config, or None when it names none."""
    section = additional_config.get(CONFIG_KEY) if isinstance(additional_config, dict) else None
    if section is None:
        return None
    origin = f'additional_config["{CONFIG_KEY}"]'
    if not isinstance(section, dict):
        raise RecipeError(
            f'{origin} must be an object such as {{"recipe": "path"}}, but it is '
            f"{type(section).__name__}."
        )
    unknown = sorted(set(section) - {"recipe"})
    if unknown:
        raise RecipeError(f"{origin} has the unknown key '{unknown[0]}'; it accepts: recipe.")
    return from_value(section["recipe"], f'{origin}["recipe"]') if "recipe" in section else None


def resolve(additional_config):
    """The recipe that wins and a sentence for the log, or (None, None) when there is none."""
    environment = from_environment()
    config = from_config(additional_config)
    if environment is not None:
        note = f"recipe from {environment.origin}"
        if config is not None:
            note += f"; it wins over {config.origin}"
        return environment, note
    if config is not None:
        return config, f"recipe from {config.origin}"
    return None, None
