"""Ragged paged attention on GPU (Hopper first): what its two kernels share.

A kernel is launched twice. A program is one tile of queries (a few tokens of one row), one KV head
and one split of the row's KV. Decode rows are tiles of one token whose KV range is cut into splits
of fixed length, so that a few long rows still fill the chip; XLA joins the partial softmaxes (as in
FlashDecoding). The other rows go in tiles of many tokens and one split. The step's K and V are
written by an XLA scatter first: on GPU it runs in place, one thread a number.

The kernel itself is gpu_triton.py where jax has Pallas' Triton backend, and gpu_mosaic.py after.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import types

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .reference import write
from .tables import mixed_tiles

LAUNCHERS = ("triton", "mosaic")  # the first that jax has is used; neither has been timed
NEGATIVE = -1e30
LOG2_E = 1.4426950408889634
SPLIT_TOKENS = 512
MAX_SPLITS = 32


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch, whichever kernel it is of."""

    tile_tokens: int
    group: int  # query heads of a KV head
    head_dim: int
    page_size: int
    block_tokens: int  # of KV, in one step of a program's loop
    split_tokens: int | None  # None: the whole row, and finished outputs
    scale: float
    window: int | None
    soft_cap: float | None


@dataclasses.dataclass(frozen=True)
class Work:
    """The arrays of one launch."""

    row_i: jax.Array
    token_i: jax.Array  # a tile's first token
    first_i: jax.Array  # its position
    end_i: jax.Array  # one past the position of its last; not above first_i in an empty tile
    tile_T: jax.Array  # where a token's output is: its tile ...
    place_T: jax.Array  # ... and its place in the tile
    layer: jax.Array  # [1]
    q: jax.Array  # [T, J, group, E]
    sink: jax.Array  # [J, group] float32, times log2(e)
    page_table_SP: jax.Array
    kv_pages: object


def launcher(name: str | None = None) -> types.ModuleType:
    """The kernel of that name, or else the first that this jax has."""
    if name is not None:
        return importlib.import_module(f"{__package__}.gpu_{name}")
    for name in LAUNCHERS[:-1]:
        try:
            return launcher(name)
        except ImportError:  # jax deprecated its Triton backend in 0.11
            pass
    return launcher(LAUNCHERS[-1])


def span(plan, first, end, split):
    """-> (positions [begin, stop) that a program reads, whether it runs)."""
    low = jnp.int32(0) if plan.window is None else jnp.maximum(first - (plan.window - 1), 0)
    if plan.split_tokens is None:
        return low, end, first < end
    start = split * plan.split_tokens
    # A split that lies before the row's window runs too: it writes a sum of zero.
    active = (first < end) & (start < end)
    return jnp.maximum(low, start), jnp.minimum(end, start + plan.split_tokens), active


def ragged_paged_attention(
    q_THE, k_TJE, v_TJE, kv_pages, batch, *, layer, scale, window=None, soft_cap=None, sinks=None,
    kernel=None, interpret=False,
):  # fmt: skip
    """See api.ragged_paged_attention. kv_pages.data: [L, G, J, 2, K, E]. kernel: of LAUNCHERS."""
    T, H, E = q_THE.shape
    _, _, J, _, K, _ = kv_pages.data.shape
    kernel = launcher(kernel)
    kv_pages = write(k_TJE, v_TJE, kv_pages, batch, layer)
    plan = functools.partial(
        Plan,
        group=H // J, head_dim=E, page_size=K, scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip
    sink = jnp.full((J, H // J), NEGATIVE, jnp.float32)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(J, H // J) * LOG2_E
    work = functools.partial(
        Work,
        layer=jnp.asarray(layer, jnp.int32).reshape(1), q=q_THE.reshape(T, J, H // J, E),
        sink=sink, page_table_SP=batch.page_table_SP, kv_pages=kv_pages,
    )  # fmt: skip
    token_T = jnp.arange(T, dtype=jnp.int32)
    num_decode = batch.num_decode[0]

    rows = min(batch.kv_len_S.shape[0], T)
    longest = batch.page_table_SP.shape[1] * K
    block = kernel.block_tokens(E)
    split = max(SPLIT_TOKENS, pl.cdiv(longest, MAX_SPLITS * block) * block)
    row_i = jnp.arange(rows, dtype=jnp.int32)
    end_i = jnp.where(row_i < num_decode, batch.kv_len_S[:rows], 0)
    parts = kernel.decode(
        plan(tile_tokens=1, block_tokens=block, split_tokens=split),
        work(
            row_i=row_i, token_i=row_i, first_i=end_i - 1, end_i=end_i, tile_T=row_i, place_T=row_i
        ),
        splits=pl.cdiv(longest, split),
        interpret=interpret,
    )
    out = _join(parts, end_i, split, sink)
    out = jnp.pad(out, ((0, T - rows), (0, 0), (0, 0), (0, 0))).astype(q_THE.dtype)

    def mixed(out):
        tile = kernel.tile_tokens(H // J)
        tiles, tokens_it, tile_T, place_T = mixed_tiles(batch, T, tile, 1, K)
        real_i = jnp.arange(tiles.row_i.shape[0], dtype=jnp.int32) < tiles.counts[0]
        end_i = jnp.where(real_i, tiles.end_i, tiles.first_i)  # an empty tile writes nothing
        mixed_out = kernel.mixed(
            plan(tile_tokens=tile, block_tokens=block, split_tokens=None),
            work(
                row_i=tiles.row_i, token_i=tokens_it[:, 0], first_i=tiles.first_i, end_i=end_i,
                tile_T=tile_T, place_T=place_T,
            ),
            interpret=interpret,
        )  # fmt: skip
        mine_T = token_T >= num_decode
        mine_T &= token_T < batch.cu_q_len_S1[batch.num_rows[0]]
        return jnp.where(mine_T[:, None, None, None], mixed_out, out)

    out = jax.lax.cond(batch.num_rows[0] > num_decode, mixed, lambda out: out, out)
    return out.reshape(T, H, E), kv_pages


def _join(parts, end_i, split, sink):
    """Partial softmaxes of the splits -> outputs [i, J, group, E]; zero for rows of length zero."""
    value, most, total = parts  # [i, c, J, group, E], [i, c, J, group] twice
    c = jnp.arange(most.shape[1], dtype=jnp.int32)
    ran = (c[None] * split < end_i[:, None])[..., None, None]  # the others were never written
    most = jnp.where(ran, most, NEGATIVE)
    highest = jnp.maximum(jnp.max(most, axis=1), sink[None])
    weight = jnp.where(ran, jnp.exp2(most - highest[:, None]), 0)
    total = jnp.sum(jnp.where(ran, weight * total, 0), axis=1) + jnp.exp2(sink[None] - highest)
    value = jnp.sum(jnp.where(ran[..., None], weight[..., None] * value, 0), axis=1)
    return value / jnp.where(total > 0, total, 1)[..., None]
