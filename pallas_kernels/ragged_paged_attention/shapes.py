"""The head shapes and batches that tests, benches, tuning and device checks all use.

A `Case` is data only (numpy, seeded): queries, this step's K and V, and a cache in the plain layout
[L, G, J, 2, K, E] whose every unowned slot is NaN. `place` puts it on a device in a backend's
layout.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from . import kv
from .api import RaggedBatch


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Attention of one model, per device: H query heads, J KV heads, E head size."""

    name: str
    H: int
    J: int
    E: int
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def scale(self):
        return self.E**-0.5

    def scaled(self, heads: int, window: int):
        """The same kind of attention with at most `heads` KV heads and a window of `window`."""
        J = min(self.J, heads)
        return dataclasses.replace(
            self, H=self.H // self.J * J, J=J, window=self.window and min(self.window, window)
        )


SHAPES = (
    HeadShape("llama-3-8b", 32, 8, 128),
    HeadShape("llama-3-70b-8-chips", 8, 1, 128),
    HeadShape("qwen3-0.6b", 16, 8, 128),
    HeadShape("smollm2", 9, 3, 64),
    HeadShape("gemma-3-270m", 4, 1, 256, window=512),
    HeadShape("gemma-2-9b", 16, 8, 256, soft_cap=50.0, window=4096),
    HeadShape("gpt-oss-20b", 64, 8, 64, sinks=True, window=128),
    HeadShape("phi-3-mini", 32, 32, 96),
)


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """rows: (query tokens, length with them) each, decode rows first; then padding."""

    name: str
    rows: tuple[tuple[int, int], ...]
    pad_rows: int = 0
    pad_tokens: int = 0

    @property
    def num_decode(self):
        lengths = [q for q, _ in self.rows]
        return next((i for i, q in enumerate(lengths) if q != 1), len(lengths))

    @property
    def num_tokens(self):
        return sum(q for q, _ in self.rows) + self.pad_tokens

    def scaled(self, factor):
        """The same mix of rows, about `factor` times fewer and shorter."""
        shrink = lambda n: max(1, n // factor) if n > 1 else n
        rows = tuple((shrink(q), max(shrink(length), shrink(q))) for q, length in self.rows)
        thin = lambda part: part[:: max(1, min(factor, len(part) // 4))]
        rows = thin(rows[: self.num_decode]) + thin(rows[self.num_decode :])
        return dataclasses.replace(self, rows=rows)


def _spread(low, high, count):
    """`count` lengths from low to high, spaced evenly in the logarithm."""
    return [round(low * (high / low) ** (i / (count - 1))) for i in range(count)]


BATCHES = (
    BatchShape("decode-64", tuple((1, n) for n in _spread(128, 8192, 64))),
    BatchShape("decode-256-short", tuple((1, n) for n in _spread(1, 128, 256))),
    BatchShape("prefill-8k", ((8192, 8192),)),
    BatchShape("mixed-512", (*((1, n) for n in _spread(128, 8192, 63)), (512, 2048)), pad_tokens=1),
    BatchShape("empty-rows", ((1, 33), (0, 0), (5, 40), (0, 0), (3, 3)), pad_rows=3, pad_tokens=7),
    BatchShape("all-padding", (), pad_rows=4, pad_tokens=8),
)


@dataclasses.dataclass
class Case:
    q_THE: np.ndarray
    k_TJE: np.ndarray
    v_TJE: np.ndarray
    cache_LGJ2KE: np.ndarray  # holds the rows' earlier tokens; NaN elsewhere
    page_table_SP: np.ndarray
    kv_len_S: np.ndarray
    cu_q_len_S1: np.ndarray
    num_rows: int
    num_decode: int
    sinks_H: np.ndarray | None

    @property
    def batch(self):
        as_int = lambda x: jnp.asarray(np.asarray(x, np.int32))
        return RaggedBatch(
            as_int(self.page_table_SP),
            as_int(self.kv_len_S),
            as_int(self.cu_q_len_S1),
            as_int([self.num_rows]),
            as_int([self.num_decode]),
        )


def make_case(shape: HeadShape, rows: BatchShape, *, page_size, seed=0, layers=1, layer=0) -> Case:
    """Random values of unit size; pages are handed out in random order and never shared."""
    rng = np.random.default_rng(seed)
    normal = lambda *dims: rng.standard_normal(dims, np.float32)
    H, J, E = shape.H, shape.J, shape.E
    num_rows, S, T = len(rows.rows), len(rows.rows) + rows.pad_rows, rows.num_tokens
    kv_len_S = np.array([n for _, n in rows.rows] + [0] * rows.pad_rows, np.int32)
    q_len_S = np.array([q for q, _ in rows.rows] + [0] * rows.pad_rows, np.int32)
    pages_S = -(-kv_len_S // page_size)
    P, G = max(1, int(pages_S.max(initial=1))), int(pages_S.sum()) + 2
    ids = iter(rng.permutation(np.arange(1, G)))
    page_table_SP = np.zeros((S, P), np.int32)
    cache = np.full((layers, G, J, 2, page_size, E), np.nan, np.float32)
    for s in range(S):
        for p in range(pages_S[s]):
            page = page_table_SP[s, p] = next(ids)
            known = min(page_size, int(kv_len_S[s] - q_len_S[s]) - p * page_size)
            if known > 0:
                cache[layer, page, :, :, :known] = normal(J, 2, known, E)
    tokens = {name: normal(T, heads, E) for name, heads in (("q", H), ("k", J), ("v", J))}
    for array in tokens.values():
        array[int(q_len_S.sum()) :] = np.nan
    return Case(
        tokens["q"],
        tokens["k"],
        tokens["v"],
        cache,
        page_table_SP,
        kv_len_S,
        np.concatenate([[0], np.cumsum(q_len_S)]).astype(np.int32),
        num_rows,
        rows.num_decode,
        normal(H) if shape.sinks else None,
    )


def place(case: Case, backend: str, dtype, kv_dtype=None):
    """-> (q, k, v, kv_pages, batch, sinks) as jax arrays in the backend's layout."""
    kv_dtype = jnp.dtype(kv_dtype or dtype)
    cache = jnp.asarray(case.cache_LGJ2KE)
    if kv_dtype.name in kv.CODE_MAX:
        # An integer cannot say NaN; its scale can.
        codes, scales = kv.quantise(jnp.nan_to_num(cache), kv_dtype)
        pages = kv.KVPages(codes, jnp.where(jnp.isnan(cache[..., 0]), jnp.nan, scales))
    else:
        pages = kv.KVPages(cache.astype(kv_dtype))
    as_float = lambda x: jnp.asarray(x).astype(dtype)
    sinks = None if case.sinks_H is None else jnp.asarray(case.sinks_H)
    return (
        as_float(case.q_THE),
        as_float(case.k_TJE),
        as_float(case.v_TJE),
        kv.to_layout(pages, backend),
        case.batch,
        sinks,
    )
