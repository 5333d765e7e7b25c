"""Ragged paged attention on GPU (Hopper first), a Pallas kernel through Triton.

One body, launched twice. A program is one tile of queries (a few tokens of one row), one KV head
and one split of the row's KV. Decode rows are tiles of one token whose KV range is cut into splits
of fixed length, so that a few long rows still fill the chip; XLA joins the partial softmaxes (as in
FlashDecoding). The other rows go in tiles of many tokens and one split. The step's K and V are
written by an XLA scatter first: on GPU it runs in place, one thread a number.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .reference import write
from .tables import mixed_tiles

try:
    from jax.experimental.pallas import triton as plgpu
except ImportError as error:  # deprecated since jax 0.11
    raise ValueError(
        "attention on GPU needs Pallas' Triton backend, which this jax has no more: install "
        "jax 0.12, or choose attention_backend=reference"
    ) from error

NEGATIVE = -1e30
LOG2_E = 1.4426950408889634
MIN_ROWS = 16  # of a tensor core's left operand
SPLIT_TOKENS = 512
MAX_SPLITS = 32
TILE_ROWS = 128


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one launch."""

    tile_tokens: int
    group: int  # query heads of a KV head
    head_dim: int
    page_size: int
    block_tokens: int
    split_tokens: int | None  # None: the whole row, and finished outputs
    scale: float
    window: int | None
    soft_cap: float | None
    compute_dtype: jnp.dtype
    num_warps: int

    @property
    def rows_of_token(self):
        return pl.next_power_of_2(self.group)

    @property
    def rows(self):
        return max(MIN_ROWS, self.tile_tokens * self.rows_of_token)

    @property
    def lanes(self):
        return pl.next_power_of_2(self.head_dim)


def ragged_paged_attention(
    q_THE, k_TJE, v_TJE, kv_pages, batch, *, layer, scale, window=None, soft_cap=None, sinks=None,
    interpret=False,
):  # fmt: skip
    """See api.ragged_paged_attention. kv_pages.data: [L, G, J, 2, K, E]."""
    T, H, E = q_THE.shape
    _, _, J, _, K, _ = kv_pages.data.shape
    kv_pages = write(k_TJE, v_TJE, kv_pages, batch, layer)
    exact = jnp.float32 in (q_THE.dtype, kv_pages.data.dtype)
    plan = functools.partial(
        Plan,
        group=H // J, head_dim=E, page_size=K, scale=scale, window=window, soft_cap=soft_cap,
        compute_dtype=jnp.dtype(jnp.float32 if exact else jnp.bfloat16),
    )  # fmt: skip
    q = q_THE.reshape(T, J, H // J, E)
    sink = jnp.full((J, H // J), NEGATIVE, jnp.float32)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(J, H // J) * LOG2_E
    layer = jnp.asarray(layer, jnp.int32).reshape(1)
    launch = functools.partial(
        _launch, q=q, sink=sink, layer=layer, kv_pages=kv_pages, batch=batch, interpret=interpret
    )
    token_T = jnp.arange(T, dtype=jnp.int32)
    num_decode = batch.num_decode[0]
    block = 64 if E <= 128 else 32

    rows = min(batch.kv_len_S.shape[0], T)
    longest = batch.page_table_SP.shape[1] * K
    split = max(SPLIT_TOKENS, pl.cdiv(longest, MAX_SPLITS * block) * block)
    row_i = jnp.arange(rows, dtype=jnp.int32)
    end_i = jnp.where(row_i < num_decode, batch.kv_len_S[:rows], 0)
    parts = launch(
        plan(tile_tokens=1, block_tokens=block, split_tokens=split, num_warps=4),
        tables=(row_i, row_i, end_i - 1, end_i),
        splits=pl.cdiv(longest, split),
    )
    out = _join(parts, end_i, split, sink)
    out = jnp.pad(out, ((0, T - rows), (0, 0), (0, 0), (0, 0))).astype(q_THE.dtype)

    def mixed(out):
        tile = max(1, TILE_ROWS // pl.next_power_of_2(H // J))
        tiles, tokens_it, _, _ = mixed_tiles(batch, T, tile, 1, K)
        real_i = jnp.arange(tiles.row_i.shape[0], dtype=jnp.int32) < tiles.counts[0]
        end_i = jnp.where(real_i, tiles.end_i, tiles.first_i)  # an empty tile writes nothing
        (mixed_out,) = launch(
            plan(tile_tokens=tile, block_tokens=block, split_tokens=None, num_warps=8),
            tables=(tiles.row_i, tokens_it[:, 0], tiles.first_i, end_i),
            splits=1,
        )
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


def _launch(plan, *, tables, splits, q, sink, layer, kv_pages, batch, interpret):
    """-> [out [T, J, group, E]], or partial (values, maxima, sums) by tile and split."""
    _, J, group, E = q.shape
    tiles = tables[0].shape[0]
    if plan.split_tokens is None:
        out_shape = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    else:
        float32 = lambda *dims: jax.ShapeDtypeStruct((tiles, splits, J, group, *dims), jnp.float32)
        out_shape = [float32(E), float32(), float32()]
    scales = () if kv_pages.scale is None else (kv_pages.scale,)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, quantised=bool(scales)),
        out_shape=out_shape,
        grid=(tiles, J, splits),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=plan.num_warps, num_stages=2),
        name=f"ragged_paged_attention_{'mixed' if plan.split_tokens is None else 'decode'}",
    )(layer, batch.page_table_SP, *tables, q, sink, kv_pages.data, *scales)


def _kernel(
    layer_ref, page_table_ref, row_ref, token_ref, first_ref, end_ref, q_ref, sink_ref, pages_ref,
    *refs, plan, quantised,
):  # fmt: skip
    """Program (tile, KV head, split). Positions [first, end) are the tile's own tokens'."""
    scales_ref, *out_refs = refs if quantised else (None, *refs)
    tile, head, split = (pl.program_id(axis) for axis in range(3))
    first, end = first_ref[tile], end_ref[tile]
    low = jnp.int32(0) if plan.window is None else jnp.maximum(first - (plan.window - 1), 0)
    begin, stop, active = low, end, first < end
    if plan.split_tokens is not None:
        begin = jnp.maximum(low, split * plan.split_tokens)
        stop = jnp.minimum(end, (split + 1) * plan.split_tokens)
        # A split that lies before the row's window runs too: it writes a sum of zero.
        active &= split * plan.split_tokens < end

    @pl.when(active)
    def _():
        row = jnp.arange(plan.rows, dtype=jnp.int32)
        place, member = row // plan.rows_of_token, row % plan.rows_of_token
        lane = jnp.arange(plan.lanes, dtype=jnp.int32)
        member = jnp.where(place < plan.tile_tokens, member, plan.group)  # past the last: masked
        real_R = (member < plan.group) & (first + place < end)
        mine = real_R, real_R[:, None] & (lane < plan.head_dim)[None]
        token = token_ref[tile] + place
        q_at = q_ref.at[token[:, None], head, member[:, None], lane[None]]
        q_RE = plgpu.load(q_at, mask=mine[1], other=0).astype(plan.compute_dtype)
        attend = functools.partial(
            _attend_block, plan, q_RE, first + place, begin, stop, lane,
            layer_ref[0], row_ref[tile], head, page_table_ref, pages_ref, scales_ref,
        )  # fmt: skip
        state = (
            jnp.full((plan.rows,), NEGATIVE, jnp.float32),
            jnp.zeros((plan.rows,), jnp.float32),
            jnp.zeros((plan.rows, plan.lanes), jnp.float32),
        )
        block = plan.block_tokens
        state = jax.lax.fori_loop(begin // block, pl.cdiv(stop, block), attend, state)
        _store(plan, out_refs, state, sink_ref, (tile, head, split), token, member, lane, mine)


def _store(plan, out_refs, state, sink_ref, place, token, member, lane, mine):
    most, total, value = state
    tile, head, split = place
    mine_R, mine_RE = mine
    if plan.split_tokens is None:
        sink = plgpu.load(sink_ref.at[head, member], mask=mine_R, other=0)
        total = total + jnp.exp2(sink - most)
        out = value / jnp.where(total > 0, total, 1)[:, None]
        at = out_refs[0].at[token[:, None], head, member[:, None], lane[None]]
        plgpu.store(at, out.astype(out_refs[0].dtype), mask=mine_RE)
        return
    at = out_refs[0].at[tile, split, head, member[:, None], lane[None]]
    plgpu.store(at, value, mask=mine_RE)
    for ref, numbers in zip(out_refs[1:], (most, total)):
        plgpu.store(ref.at[tile, split, head, member], numbers, mask=mine_R)


def _attend_block(
    plan, q_RE, position_R, begin, stop, lane, layer, row, head, page_table_ref, pages_ref,
    scales_ref, b, state,
):  # fmt: skip
    """Adds KV block b to the running softmax (maximum, sum, values) of a tile."""
    most, total, value = state
    position = b * plan.block_tokens + jnp.arange(plan.block_tokens, dtype=jnp.int32)
    real = (position >= begin) & (position < stop)
    page = plgpu.load(page_table_ref.at[row, position // plan.page_size], mask=real, other=0)
    slot = position % plan.page_size
    inside = real[:, None] & (lane < plan.head_dim)[None]

    def load(kind):
        """-> ([B, E] of K (0) or V (1), their scales [1, B] or None); zero where nothing is."""
        at = pages_ref.at[layer, page[:, None], head, kind, slot[:, None], lane[None]]
        if scales_ref is None:
            return plgpu.load(at, mask=inside, other=0).astype(plan.compute_dtype), None
        codes = plgpu.load(at, mask=inside).astype(plan.compute_dtype)  # no zero of 8-bit floats
        codes = jnp.where(inside, codes, 0)
        scales = plgpu.load(scales_ref.at[layer, page, head, kind, slot], mask=real, other=0)
        return codes, scales[None]

    k_BE, k_scale = load(0)
    s_RB = _dot(q_RE, k_BE.T)
    if k_scale is not None:
        s_RB = s_RB * k_scale
    if plan.soft_cap is None:
        s_RB = s_RB * (plan.scale * LOG2_E)
    else:
        s_RB = _tanh(s_RB * (plan.scale / plan.soft_cap)) * (plan.soft_cap * LOG2_E)
    seen = real[None] & (position[None] <= position_R[:, None])
    if plan.window is not None:
        seen &= position[None] > position_R[:, None] - plan.window
    s_RB = jnp.where(seen, s_RB, NEGATIVE)
    new_most = jnp.maximum(most, jnp.max(s_RB, axis=1))
    keep = jnp.exp2(most - new_most)
    p_RB = jnp.where(seen, jnp.exp2(s_RB - new_most[:, None]), 0)
    total = keep * total + jnp.sum(p_RB, axis=1)
    v_BE, v_scale = load(1)
    if v_scale is not None:
        p_RB = p_RB * v_scale
    value = keep[:, None] * value + _dot(p_RB.astype(plan.compute_dtype), v_BE)
    return new_most, total, value


def _tanh(x):
    """tanh from exp2, which Triton has on every GPU; saturates cleanly at both ends."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))


def _dot(a, b):
    exact = a.dtype == jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((1,), (0,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )
