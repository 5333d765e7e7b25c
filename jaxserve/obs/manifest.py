"""The manifest of a run: what must be the same for a run to come out the same.

Versions, the model and its tokenizer by content, settings and hardware. It heads every decision log
and answers at /version.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Mapping

from jaxserve.config import EngineConfig, SchedulerConfig

_PACKAGES = (
    "jaxserve",
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "tokenizers",
    "sentencepiece",
    "llguidance",
)
_ISA_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512vbmi",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
)
_FILES = {"model", "tokenizer", "chat_template", "decision_log", "compile_cache"}  # settings


def manifest(
    config: EngineConfig,
    scheduling: SchedulerConfig,
    *,
    model: str,
    weights: Mapping,
    tokenizer: str,
    devices: Mapping,
) -> dict:
    """Plain values, for JSON.

    model: its name. weights: their type, size and sample hash: sha256 over the model's config and,
    for each tensor, its name, shape, type and a sample of its bytes, which tells apart whatever
    training or quantising made different without reading it all. tokenizer: sha256 of what it does
    (Tokenizer.fingerprint). devices: the accelerators' platform, kind and count.
    """
    return {
        "versions": versions(),
        "model": model,
        "weights": dict(weights),
        "tokenizer": {"sha256_of_table": tokenizer},
        "hardware": machine() | dict(devices),
        "config": dataclasses.asdict(config),
        "scheduling": dataclasses.asdict(scheduling),
    }


def for_clients(manifest: Mapping) -> dict:
    """The manifest without the names of files, which are the operator's alone."""
    shown = dict(manifest)
    if "config" in shown:
        shown["config"] = {k: v for k, v in shown["config"].items() if k not in _FILES}
    return shown


def versions() -> dict[str, str]:
    """Of Python and of the packages that decide what a run computes."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict:
    """Processor, cores that this process may use, memory, system."""
    info = _cpuinfo()
    flags = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.processor()),
        "isa": [flag for flag in _ISA_FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpuinfo() -> dict[str, str]:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().split("\n\n")[0].splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}
