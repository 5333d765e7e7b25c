"""Finds the module that implements an op on a backend.

A backend is a module of the op's folder: tpu.py, gpu.py, cpu.py, reference.py. It loads on first
use, so no machine needs what another's backend imports.
"""

from __future__ import annotations

import importlib
import types

BACKENDS = ("tpu", "gpu", "cpu", "reference", "interpret")


def check(backend: str) -> None:
    """ValueError unless there is such a backend. "interpret" is tpu in Pallas' interpreter."""
    if backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r}: choose one of {', '.join(BACKENDS)}")


def module(package: str, backend: str) -> types.ModuleType:
    check(backend)
    return importlib.import_module(f"{package}.{'tpu' if backend == 'interpret' else backend}")


def choose(platform: str, package: str) -> str:
    """The fastest backend for a jax platform: "cpu", "tpu", "gpu" or "cuda"; else the reference."""
    if platform == "tpu":
        return "tpu"
    if platform in ("gpu", "cuda"):
        return "gpu"
    return "cpu" if platform == "cpu" and module(package, "cpu").available() else "reference"
