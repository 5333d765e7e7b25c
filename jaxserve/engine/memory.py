"""How much KV fits: pages from bytes, and the table that start-up prints."""

from __future__ import annotations

import dataclasses
import os

import jax

from jaxserve.config import EngineConfig

_CPU_KV_DEFAULT = 1 << 30  # a laptop's memory belongs to its owner: more only by --kv_memory_gib
_DEVICE_KV_SHARE = 0.9  # of an accelerator's memory that weights leave free; the rest is workspace


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """Bytes of weights, of the KV pool, and free after both, on one device."""

    weights: int
    kv: int
    free: int

    def __str__(self) -> str:
        gib = lambda size: f"{size / 2**30:.2f} GiB"
        return f"weights {gib(self.weights)}, KV {gib(self.kv)}, free {gib(self.free)}"


def free_bytes(device: jax.Device) -> int:
    """Memory not in use where the device keeps its arrays."""
    if device.platform == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = device.memory_stats()
    return stats["bytes_limit"] - stats["bytes_in_use"]


def count_pages(config: EngineConfig, bytes_per_page: int, free: int, platform: str) -> int:
    """Pages of the KV pool, the null page included.

    --num_pages wins; else as many as all slots at full length can use, within --kv_memory_gib.
    Raises ValueError when not even one sequence of the model length fits the bound.
    """
    if config.num_pages is not None:
        return config.num_pages
    if config.kv_memory_gib is not None:
        bound = config.kv_memory_gib * 2**30  # inf is no bound
    elif platform == "cpu":
        bound = min(_CPU_KV_DEFAULT, free // 2)
    else:
        bound = int(free * _DEVICE_KV_SHARE)
    pages_a_row = -(-config.max_model_len // config.page_size)
    pages = int(min(config.num_slots * pages_a_row + 1, bound // bytes_per_page))
    if pages < pages_a_row + 1:
        needed = (pages_a_row + 1) * bytes_per_page / 2**30
        raise ValueError(
            f"one sequence of {config.max_model_len} tokens needs {needed:.2f} GiB of KV, and "
            f"{bound / 2**30:.2f} GiB are allowed: lower --max_model_len or raise --kv_memory_gib"
        )
    return pages
