"""Tiles of several tokens through Mosaic GPU: the chunks of prompts.

Rows are a tile's query heads, token by token, 64 of them a warpgroup; those past the tile's last
are computed and not used.

Names: R rows of a warpgroup, B tokens of a KV block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import gpu_mosaic_ring as ring
from .gpu import NEGATIVE
from .gpu_mosaic_ring import BY_COLUMN, BY_ROW, ROWS, WGMMA

GROUPS = 2  # compute warpgroups that a tile fills


def tile_tokens(group: int) -> int:
    """Tokens of a tile."""
    return max(1, GROUPS * ROWS // group)


def mixed(plan, work, *, interpret):
    """-> outputs [T, J, group, E] of the tiles' tokens; the others are not written."""
    _, J, group, E = work.q.shape
    small = E <= 128
    plan = ring.make_plan(
        plan, work,
        groups=GROUPS, has_reader=small, stages=4 if small else 2, interpret=interpret,
    )  # fmt: skip
    rows = GROUPS * ROWS
    # A tile's last box of rows may hang over the tokens.
    q = jnp.pad(work.q.swapaxes(0, 1).reshape(J, -1, E), ((0, 0), (0, rows), (0, 0)))
    sink = jnp.tile(work.sink, (1, pl.cdiv(rows, group)))[:, :rows]
    scratch = dict(q_ref=ring.tiled((GROUPS, ROWS, E), q.dtype))
    if interpret:
        scratch["p_ref"] = ring.tiled((GROUPS, ROWS, plan.block_tokens), q.dtype)
    tiles = work.row_i.shape[0]
    out = jax.ShapeDtypeStruct((tiles * J, rows, E), q.dtype)
    (out,) = ring.launch("mixed", plan, work, q, sink, scratch, [out], 1, _attend)
    out = out.reshape(tiles, J, rows, E)[:, :, : plan.tile_tokens * group]
    out = out.reshape(tiles, J, plan.tile_tokens, group, E)
    return out[work.tile_T, :, work.place_T]


def _attend(plan, program, ahead, inputs, out_refs, scratch):
    """One of a program's compute warpgroups."""
    q_in, sink_in = inputs
    rows = pl.ds(program.token * plan.group + program.thread * ROWS, ROWS)
    scratch["q_ref"][program.thread] = ring.load(q_in.at[program.head, rows], WGMMA)
    plgpu.commit_smem()
    state = (
        ring.full(NEGATIVE, ROWS, layout=BY_ROW),
        ring.full(0, ROWS, layout=BY_ROW),
        ring.full(0, ROWS, plan.head_dim, layout=WGMMA),
    )
    block = functools.partial(_attend_block, plan, program, ahead, scratch)
    state = lax.fori_loop(*program.blocks, block, state)
    sink = ring.load(sink_in.at[program.head, pl.ds(program.thread * ROWS, ROWS)], BY_ROW)
    _store(plan, program, sink, state, out_refs[0], scratch)


def _attend_block(plan, program, ahead, scratch, b, state):
    """(maximum [R], sum [R], values [R, E]) of the running softmax, after block b."""
    most, total, value = state
    thread, start = program.thread, b * plan.block_tokens
    slot, k_ref, v_ref = ring.next_block(plan, program, b, scratch)
    s_RB = ring.product(scratch["q_ref"].at[thread], k_ref.T, (ROWS, plan.block_tokens))
    if plan.quantised:
        k_scale, v_scale = (ring.load(scratch["scales"].at[slot, i], BY_COLUMN) for i in (0, 1))
        s_RB = s_RB * ring.across_rows(k_scale)
    s_RB = _masked(plan, program, start, ring.scaled(plan, s_RB))
    new_most = jnp.maximum(most, jnp.max(s_RB, axis=1))
    keep = jnp.exp2(most - new_most)
    p_RB = jnp.exp2(s_RB - ring.across(new_most, plan.block_tokens))
    total = keep * total + jnp.sum(p_RB, axis=1)
    places = ahead and ahead[0](b + plan.stages)  # early: the page table is far away
    if plan.quantised:
        column = plgpu.broadcasted_iota(jnp.int32, v_scale.shape, 0, layout=BY_COLUMN) + start
        real = (column >= program.begin) & (column < program.stop)
        p_RB = p_RB * ring.across_rows(jnp.where(real, v_scale, 0))
    else:
        plgpu.barrier_wait(scratch["v_full"].at[slot])
    p_RB = p_RB.astype(jnp.bfloat16)
    ring.zero_unseen(plan, program, b, v_ref, scratch)
    if plan.interpret:  # which knows wgmma from shared memory only
        p_ref = scratch["p_ref"].at[thread]
        p_ref[...] = p_RB
        plgpu.commit_smem()
        p_RB = p_ref
    value = ring.add_product(plan, ring.across(keep, plan.head_dim) * value, p_RB, v_ref)
    plgpu.barrier_arrive(scratch["empty"].at[slot])
    if ahead is not None:  # the slot of the ring may be filled with another block
        more = (thread == 0) & (b + plan.stages < program.blocks[1])
        pl.when(more)(lambda: ahead[1](b + plan.stages, places))
    return new_most, total, value


def _masked(plan, program, start, s_RB):
    """Scores of the block at `start`, NEGATIVE where a row does not see a token.

    A row that sees none of a block adds ones to its sum, until its first token's score comes: that
    is above NEGATIVE by so much that nothing is kept of the sum before it.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW) + program.thread * ROWS
    position_R = program.first + lax.div(row, plan.group)
    first_row = program.thread * ROWS
    lowest, highest = (
        program.first + lax.div(row, plan.group) for row in (first_row, first_row + (ROWS - 1))
    )

    def mask(s_RB, position_R, begin, stop):
        """Positions are relative to the block's first."""
        column = plgpu.broadcasted_iota(jnp.int32, s_RB.shape, 1, layout=WGMMA)
        within = lambda bound_R: ring.across(bound_R, s_RB.shape[1])
        seen = column <= within(jnp.minimum(position_R, stop - 1))
        if plan.window is not None:
            seen &= column >= within(jnp.maximum(position_R - (plan.window - 1), begin))
        return jnp.where(seen, s_RB, NEGATIVE)

    stop = jnp.minimum(lowest + 1, program.stop)
    all_seen = (start + plan.block_tokens <= stop) & (start >= program.begin)
    if plan.window is not None:
        all_seen &= start > highest - plan.window
    return lax.cond(
        all_seen, lambda s, *_: s, mask,
        s_RB, position_R - start, program.begin - start, program.stop - start,
    )  # fmt: skip


def _store(plan, program, sink, state, out_ref, scratch):
    """Stores finished outputs, through the shared memory that held the queries."""
    most, total, value = state
    total = total + jnp.exp2(sink - most)
    staged = scratch["q_ref"].at[program.thread]
    staged[...] = (value / ring.across(total, plan.head_dim)).astype(staged.dtype)
    plgpu.commit_smem()
    rows = pl.ds(program.thread * ROWS, ROWS)
    plgpu.copy_smem_to_gmem(staged, out_ref.at[program.line, rows])
    plgpu.wait_smem_to_gmem(0)
