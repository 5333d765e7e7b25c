"""Decode rows through Mosaic GPU: one token's few query heads of a KV head, over a split of KV.

Everything is turned, so that wgmma's 64 rows are full: tokens of KV are the rows of the scores and
query heads the columns, by eights; elements of a head are the rows of the values. That takes less
than half of the instructions, and of the registers, that 64 rows of queries do.

Names: N columns, B tokens of a KV block.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import gpu_mosaic_ring as ring
from .gpu import NEGATIVE
from .gpu_mosaic_ring import BY_COLUMN, BY_ROW, FLOAT32, ROWS, WGMMA


def decode(plan, work, *, splits, interpret):
    """-> partial values [i, c, J, group, E], maxima and sums [i, c, J, group]; float32."""
    _, J, group, E = work.q.shape
    plan = ring.make_plan(plan, work, groups=1, has_reader=True, stages=2, interpret=interpret)
    N, dtype = _columns(plan), work.q.dtype
    q = jnp.pad(work.q.swapaxes(0, 1), ((0, 0), (0, 0), (0, N - group), (0, 0)))
    scratch = dict(
        q_full=plgpu.Barrier(),
        q_ref=ring.tiled((N, E), dtype),
        # Both operands of a product are swizzled alike: this one as V is.
        p_ref=ring.tiled((N, plan.block_tokens), dtype, ring.swizzle(E, dtype)),
        sums_ref=plgpu.SMEM((2, N), FLOAT32),
    )
    lead = (work.row_i.shape[0], splits, J)
    lines = jax.ShapeDtypeStruct((lead[0] * splits * J, N), FLOAT32)
    values = jax.ShapeDtypeStruct((lines.shape[0], E, N), FLOAT32)
    out_type = [values, lines, lines]
    values, most, total = ring.launch(
        "decode", plan, work, q, work.sink, scratch, out_type, splits, _attend
    )
    parts = (values.swapaxes(1, 2), most, total)
    return [part.reshape(*lead, *part.shape[1:])[:, :, :, :group] for part in parts]


def _columns(plan):
    """Query heads of a tile: wgmma multiplies them by eights."""
    return pl.cdiv(plan.group, 8) * 8


def _pieces(plan):
    """First elements of the 64 that wgmma makes of a head's values at a time. The last ones overlap
    where 64 does not divide a head."""
    last = plan.head_dim - ROWS
    return [*range(0, last, ROWS), last]


def _attend(plan, program, ahead, inputs, out_refs, scratch):
    """One program's only compute warpgroup."""
    q_in, _ = inputs
    q_full = scratch["q_full"]
    plgpu.copy_gmem_to_smem(q_in.at[program.head, program.token], scratch["q_ref"], q_full)
    plgpu.barrier_wait(q_full)
    N = _columns(plan)
    state = (
        ring.full(NEGATIVE, N, layout=BY_COLUMN),
        ring.full(0, ROWS, N, layout=WGMMA),
        [ring.full(0, ROWS, N, layout=WGMMA) for _ in _pieces(plan)],
    )
    block = lambda b, state: _attend_block(plan, program, b, state, scratch)
    most, total_BN, values = lax.fori_loop(*program.blocks, block, state)
    _store(plan, program, (most, jnp.sum(total_BN, axis=0)), values, out_refs, scratch["sums_ref"])


def _attend_block(plan, program, b, state, scratch):
    """(maxima [N], sums [B, N] by the token's place in its block, pieces of the values [64, N]) of
    the running softmax, after block b."""
    most, total_BN, values = state
    B, N, p_ref = plan.block_tokens, _columns(plan), scratch["p_ref"]
    slot, k_ref, v_ref = ring.next_block(plan, program, b, scratch)
    s_BN = ring.product(k_ref, scratch["q_ref"].T, (B, N))
    if plan.quantised:
        k_scale, v_scale = (ring.load(scratch["scales"].at[slot, i], BY_ROW) for i in (0, 1))
        s_BN = s_BN * ring.across(k_scale, N)
    token = plgpu.broadcasted_iota(jnp.int32, (B,), 0, layout=BY_ROW) + b * B
    seen = (token >= program.begin) & (token < program.stop)
    s_BN = jnp.where(ring.across(seen, N), ring.scaled(plan, s_BN), NEGATIVE)
    new_most = jnp.maximum(most, jnp.max(s_BN, axis=0))
    keep = ring.across_rows(jnp.exp2(most - new_most))
    p_BN = jnp.exp2(s_BN - ring.across_rows(new_most))
    total_BN = keep * total_BN + p_BN
    if plan.quantised:
        p_BN = p_BN * ring.across(jnp.where(seen, v_scale, 0), N)
    turned = plgpu.layout_cast(p_BN.astype(p_ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    p_ref.T[...] = turned
    plgpu.commit_smem()
    if plan.quantised:
        plgpu.barrier_arrive(scratch["empty"].at[slot])
    else:
        plgpu.barrier_wait(scratch["v_full"].at[slot])
    ring.zero_unseen(plan, program, b, v_ref, scratch)
    values = [
        ring.add_product(plan, keep * value, v_ref.at[:, pl.ds(e, ROWS)].T, p_ref.T)
        for e, value in zip(_pieces(plan), values)
    ]
    if not plan.quantised:
        plgpu.barrier_arrive(scratch["empty"].at[slot])
    return new_most, total_BN, values


def _store(plan, program, sums, values, out_refs, sums_ref):
    """Stores a split's maxima, sums and values."""
    for i, number in enumerate(sums):
        sums_ref[i] = number
    plgpu.commit_smem()
    for i in range(2):
        plgpu.copy_smem_to_gmem(sums_ref.at[i], out_refs[1 + i].at[program.line])
    for e, value in zip(_pieces(plan), values):
        out_refs[0][program.line, pl.ds(e, ROWS)] = value
    plgpu.wait_smem_to_gmem(0)
