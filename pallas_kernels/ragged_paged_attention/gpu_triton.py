"""The GPU kernel through Pallas' Triton backend, which jax has announced to remove (gpu.py).

One body for both launches. Loads and stores go to computed addresses, under masks.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu  # ImportError: this jax has it no more

from .gpu import LOG2_E, NEGATIVE, Plan, span

MIN_ROWS = 16  # of a tensor core's left operand
TILE_ROWS = 128


@dataclasses.dataclass(frozen=True)
class TritonPlan(Plan):
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


def block_tokens(head_dim: int) -> int:
    """KV tokens of one step of a program's loop."""
    return 64 if head_dim <= 128 else 32


def tile_tokens(group: int) -> int:
    """Tokens of a tile of mixed rows."""
    return max(1, TILE_ROWS // pl.next_power_of_2(group))


def decode(plan, work, *, splits, interpret):
    """-> partial values [i, c, J, group, E], maxima and sums [i, c, J, group]; float32."""
    return _launch(plan, work, splits, 4, interpret)


def mixed(plan, work, *, interpret):
    """-> outputs [T, J, group, E] of the tiles' tokens; the others are not written."""
    return _launch(plan, work, 1, 8, interpret)[0]


def _launch(plan, work, splits, num_warps, interpret):
    """-> [out [T, J, group, E]], or partial (values, maxima, sums) by tile and split."""
    _, J, group, E = work.q.shape
    pages = work.kv_pages
    exact = jnp.float32 in (work.q.dtype, pages.data.dtype)
    compute_dtype = jnp.dtype(jnp.float32 if exact else jnp.bfloat16)
    plan = TritonPlan(**vars(plan), compute_dtype=compute_dtype, num_warps=num_warps)
    tiles = work.row_i.shape[0]
    if plan.split_tokens is None:
        out_shape = [jax.ShapeDtypeStruct(work.q.shape, work.q.dtype)]
    else:
        float32 = lambda *dims: jax.ShapeDtypeStruct((tiles, splits, J, group, *dims), jnp.float32)
        out_shape = [float32(E), float32(), float32()]
    scales = () if pages.scale is None else (pages.scale,)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, quantised=bool(scales)),
        out_shape=out_shape,
        grid=(tiles, J, splits),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=2),
        name=f"ragged_paged_attention_{'mixed' if plan.split_tokens is None else 'decode'}",
    )(
        work.layer, work.page_table_SP, work.row_i, work.token_i, work.first_i, work.end_i,
        work.q, work.sink, pages.data, *scales,
    )  # fmt: skip


def _kernel(
    layer_ref, page_table_ref, row_ref, token_ref, first_ref, end_ref, q_ref, sink_ref, pages_ref,
    *refs, plan, quantised,
):  # fmt: skip
    """Program (tile, KV head, split). Positions [first, end) are the tile's own tokens'."""
    scales_ref, *out_refs = refs if quantised else (None, *refs)
    tile, head, split = (pl.program_id(axis) for axis in range(3))
    first, end = first_ref[tile], end_ref[tile]
    begin, stop, active = span(plan, first, end, split)

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
