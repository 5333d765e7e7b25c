"""Finds a family by its checkpoint's model_type: the module of that name beside this one.

A family's module exports read_config, param_specs, forward and logits, the names its tensors have
in safetensors and GGUF files (HF_NAMES, GGUF_NAMES), and how those files store them
(GGUF_ARCHITECTURES, GGUF_PERMUTED, NORM_OFFSET, and HF_FUSED and GGUF_FUSED where one tensor holds
several parameters).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import types

# Multimodal checkpoints whose text decoder is a family of its own.
TEXT_PART_OF = {"gemma3": "gemma3_text"}


@functools.cache
def known() -> tuple[str, ...]:
    """Every model_type there is a family for."""
    return tuple(name for name in _modules() if hasattr(_import(name), "param_specs"))


def find(model_type: str | None) -> types.ModuleType:
    """The family of a model_type; ValueError naming it when there is none."""
    if not model_type or not isinstance(model_type, str):
        raise ValueError("the config has no model_type")
    name = TEXT_PART_OF.get(model_type, model_type)
    if name not in _modules() or not hasattr(_import(name), "param_specs"):
        raise ValueError(f"model_type {model_type!r} is not supported; known: {', '.join(known())}")
    return _import(name)


def find_gguf(architecture: str | None) -> types.ModuleType:
    """The family of a GGUF file's general.architecture."""
    for name in known():
        if architecture in _import(name).GGUF_ARCHITECTURES:
            return _import(name)
    raise ValueError(f"GGUF architecture {architecture!r} is not supported")


def _modules() -> list[str]:
    package = importlib.import_module("jaxserve.models")
    return [module.name for module in pkgutil.iter_modules(package.__path__)]


def _import(name: str) -> types.ModuleType:
    return importlib.import_module(f"jaxserve.models.{name}")
