"""The GPU kernel through Pallas' Mosaic GPU backend: Hopper's TMA copies, barriers and wgmma.

One body for both launches. A program has compute warpgroups of 64 rows of queries each, which share
a ring of blocks in shared memory; pages of K and V are copied there by one more warpgroup or, where
registers are few, by the first of them. Rows are a tile's query heads, token by token; those past
the tile's last are computed and not used.

Names: R rows of a warpgroup, B tokens of a KV block.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from .gpu import LOG2_E, NEGATIVE, Plan, span

ROWS = 64  # of wgmma's left operand
GROUPS = 2  # compute warpgroups that a tile of mixed rows fills
WGMMA = plgpu.Layout.WGMMA
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one number a column
BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # one number a row
FLOAT32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class MosaicPlan(Plan):
    num_heads: int  # of KV
    num_pages: int
    groups: int  # compute warpgroups
    stages: int  # blocks of the ring
    page_dtype: jnp.dtype
    interpret: bool

    @property
    def copy_tokens(self):
        """Tokens that one copy brings: a page, or as much of it as a block has room for."""
        return min(self.page_size, self.block_tokens)

    @property
    def quantised(self):
        return self.page_dtype.itemsize == 1

    @property
    def has_reader(self):
        """Whether a warpgroup of its own copies. In decode the first does: registers are few."""
        return self.split_tokens is None and self.head_dim <= 128

    @property
    def out_rows(self):
        """Rows of a decode tile that are stored: a swizzle repeats every eight."""
        return -(-self.group // 8) * 8


def block_tokens(head_dim: int) -> int:
    """KV tokens of one step of a program's loop."""
    return 64


def tile_tokens(group: int) -> int:
    """Tokens of a tile of mixed rows."""
    return max(1, GROUPS * ROWS // group)


def decode(plan, work, *, splits, interpret):
    """-> partial values [i, c, J, group, E], maxima and sums [i, c, J, group]; float32."""
    _, J, group, E = work.q.shape
    groups = pl.cdiv(group, ROWS)
    plan = _plan(plan, work, groups=groups, stages=2, interpret=interpret)
    lead = (work.row_i.shape[0], splits, J)
    lines = jax.ShapeDtypeStruct((lead[0] * splits * J, groups * ROWS), FLOAT32)
    value = jax.ShapeDtypeStruct((lines.shape[0], plan.out_rows, E), FLOAT32)
    value, most, total = _launch(plan, work, [value, lines, lines], splits)
    parts = [part.reshape(*lead, *part.shape[1:]) for part in (value, most, total)]
    return [part[:, :, :, :group] for part in parts]


def mixed(plan, work, *, interpret):
    """-> outputs [T, J, group, E] of the tiles' tokens; the others are not written."""
    _, J, group, E = work.q.shape
    plan = _plan(plan, work, groups=GROUPS, stages=4 if E <= 128 else 2, interpret=interpret)
    tiles = work.row_i.shape[0]
    out = jax.ShapeDtypeStruct((tiles * J, GROUPS * ROWS, E), work.q.dtype)
    (out,) = _launch(plan, work, [out], 1)
    out = out.reshape(tiles, J, GROUPS * ROWS, E)[:, :, : plan.tile_tokens * group]
    out = out.reshape(tiles, J, plan.tile_tokens, group, E)
    return out[work.tile_T, :, work.place_T]


def _plan(plan, work, **sizes):
    """The whole plan, or ValueError where this kernel does not serve what is asked."""
    data = work.kv_pages.data
    if jnp.float32 in (work.q.dtype, data.dtype) or plan.group > GROUPS * ROWS:
        raise ValueError(
            f"attention on GPU through Mosaic serves no {data.dtype} cache with {work.q.dtype} "
            f"activations and {plan.group} query heads a KV head: choose "
            "attention_backend=reference"
        )
    return MosaicPlan(
        **vars(plan),
        page_dtype=data.dtype, num_pages=data.shape[1], num_heads=data.shape[2], **sizes,
    )  # fmt: skip


def _launch(plan, work, out_type, splits):
    _, J, group, E = work.q.shape
    rows, pages, data = plan.groups * ROWS, work.kv_pages, work.kv_pages.data
    # A tile's last box of rows may hang over the tokens.
    q = jnp.pad(work.q.swapaxes(0, 1).reshape(J, -1, E), ((0, 0), (0, rows), (0, 0)))
    sink = jnp.tile(work.sink, (1, pl.cdiv(rows, group)))[:, :rows]
    scales = () if pages.scale is None else (pages.scale.reshape(-1, *pages.scale.shape[-2:]),)
    kind = "mixed" if plan.split_tokens is None else "decode"
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=out_type,
        grid=(splits, J, work.row_i.shape[0]),
        grid_names=("split", "head", "tile"),
        num_threads=plan.groups + plan.has_reader,
        thread_name="warpgroup",
        scratch_types=_scratch(plan, work.q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name=f"ragged_paged_attention_{kind}",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if plan.interpret else None,
    )(
        work.layer, work.page_table_SP, work.row_i, work.token_i, work.first_i, work.end_i,
        q, sink, data.reshape(-1, *data.shape[-2:]), *scales,
    )  # fmt: skip


def _scratch(plan, dtype):
    """Shared memory and barriers of a program."""
    E, B, stages = plan.head_dim, plan.block_tokens, plan.stages
    copies = B // plan.copy_tokens
    ring = [_tiled((stages, B, E), plan.page_dtype), _tiled((stages, B, E), plan.page_dtype)]
    scratch = dict(
        q_ref=_tiled((plan.groups, ROWS, E), dtype),
        k_full=plgpu.Barrier(num_arrivals=copies * (1 + plan.quantised), num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        empty=plgpu.Barrier(num_arrivals=plan.groups, num_barriers=stages),
        meeting=plgpu.Barrier(num_arrivals=plan.groups),
    )
    if plan.quantised:
        ring += [_tiled((B, E), dtype), _tiled((B, E), dtype)]
        scratch["page_scales"] = plgpu.SMEM((stages, copies, 2, plan.copy_tokens), FLOAT32)
        scratch["scales"] = plgpu.SMEM((2, B), FLOAT32)
    if plan.interpret:
        scratch["p_ref"] = _tiled((plan.groups, ROWS, B), dtype)
    if plan.split_tokens is not None:
        value = _tiled((plan.groups, ROWS, E), FLOAT32)
        ring = plgpu.RefUnion(ring, value)  # the values are stored when the ring is over
        scratch["sums_ref"] = plgpu.SMEM((2, plan.groups * ROWS), FLOAT32)
    return scratch | dict(ring=ring)


def _tiled(shape, dtype):
    """Shared memory in the order that TMA writes and wgmma reads without bank conflicts."""
    row_bytes = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next((size for size in (128, 64, 32) if row_bytes % size == 0), None)
    if swizzle is None:  # heads of 80 in codes, which wgmma does not read
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def _kernel(
    layer_ref, page_table_ref, row_i_ref, token_i_ref, first_i_ref, end_i_ref, q_in, sink_in,
    pages_in, *refs, plan, ring, **scratch,
):  # fmt: skip
    """Program (split, KV head, tile). Positions [first, end) are the tile's own tokens'."""
    if plan.split_tokens is not None:
        ring, scratch["value_ref"] = ring
    scratch["k_ref"], scratch["v_ref"], *scratch["block"] = ring
    scales_in, *out_refs = refs if plan.quantised else (None, *refs)
    split, head, tile = (lax.axis_index(name) for name in ("split", "head", "tile"))
    first, end = first_i_ref[tile], end_i_ref[tile]
    begin, stop, active = span(plan, first, end, split)
    thread = lax.axis_index("warpgroup")
    blocks = lax.div(begin, plan.block_tokens), pl.cdiv(stop, plan.block_tokens)

    @pl.when(active)
    def _():
        plane = layer_ref[0] * plan.num_pages, head
        find, copy = _reader(
            plan, begin, stop, blocks, plane, row_i_ref.at[tile], page_table_ref, pages_in,
            scales_in, scratch,
        )  # fmt: skip
        if plan.has_reader:

            @pl.when(thread == plan.groups)
            def _():
                pl.loop(*blocks)(lambda b: copy(b, find(b)))

        else:
            for b in range(plan.stages):
                b = blocks[0] + b
                pl.when((thread == 0) & (b < blocks[1]))(lambda b=b: copy(b, find(b)))

        @pl.when(thread < plan.groups)
        def _():
            rows = pl.ds(token_i_ref[tile] * plan.group + thread * ROWS, ROWS)
            scratch["q_ref"][thread] = _load(q_in.at[head, rows], WGMMA)
            plgpu.commit_smem()
            ahead = None if plan.has_reader else (find, copy)
            state = _attend(plan, thread, first, begin, stop, blocks, ahead, scratch)
            if plan.split_tokens is None:
                line = tile * plan.num_heads + head
                sink_ref = sink_in.at[head, pl.ds(thread * ROWS, ROWS)]
                _store(plan, thread, state, sink_ref, line, out_refs, scratch)
            else:
                line = (tile * lax.axis_size("split") + split) * plan.num_heads + head
                _store_part(plan, thread, state, line, out_refs, scratch)


def _reader(
    plan, begin, stop, blocks, plane, row_ref, page_table_ref, pages_in, scales_in, scratch
):
    """-> find(b): where block b's pages are; copy(b, those): copies them into the ring.

    Only pages that hold positions [begin, stop) are read.
    """
    layer_page, head = plane
    size, step = plan.page_size, plan.copy_tokens
    lowest, highest = lax.div(begin, size), lax.div(stop - 1, size)
    row = row_ref[...]

    def find(b):
        places = []
        for at in range(0, plan.block_tokens, step):
            position = b * plan.block_tokens + at
            # Outside of what is seen, copy what is seen again: a barrier counts its copies.
            p = jnp.clip(lax.div(position, size), lowest, highest)
            places.append((page_table_ref[row, p], lax.rem(position, size) if size > step else 0))
        return places

    def copy(b, places):
        index = b - blocks[0]
        slot = lax.rem(index, plan.stages)
        pl.when(index >= plan.stages)(lambda: plgpu.barrier_wait(scratch["empty"].at[slot]))
        for i, (page, within) in enumerate(places):
            page = (layer_page + page) * plan.num_heads + head
            source, target = pl.ds(within, step), pl.ds(i * step, step)
            for kind, name in enumerate(("k", "v")):
                plgpu.copy_gmem_to_smem(
                    pages_in.at[page * 2 + kind, source],
                    scratch[f"{name}_ref"].at[slot, target],
                    scratch[f"{name}_full"].at[slot],
                )
            if plan.quantised:
                plgpu.copy_gmem_to_smem(
                    scales_in.at[page, :, source],
                    scratch["page_scales"].at[slot, i],
                    scratch["k_full"].at[slot],
                )

    return find, copy


def _attend(plan, thread, first, begin, stop, blocks, ahead, scratch):
    """-> (maximum [R], sum [R], values [R, E]) of the running softmax after the last block.

    ahead: the reader, where this warpgroup is that too.
    """
    B = plan.block_tokens
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW) + thread * ROWS
    position = first + lax.div(row, plan.group)
    lowest = first + lax.div(thread * ROWS, plan.group)  # the positions of the first row
    highest = first + lax.div(thread * ROWS + (ROWS - 1), plan.group)  # ... and of the last

    def pass_on(b, slot, places):
        """A slot of the ring was read: it may be filled with another block."""
        plgpu.barrier_arrive(scratch["empty"].at[slot])
        if ahead is not None:
            more = (thread == 0) & (b + plan.stages < blocks[1])
            pl.when(more)(lambda: ahead[1](b + plan.stages, places))

    def attend(b, state):
        most, total, value = state
        start = b * B
        slot = lax.rem(b - blocks[0], plan.stages)
        plgpu.barrier_wait(scratch["k_full"].at[slot])
        if plan.quantised:
            plgpu.barrier_wait(scratch["v_full"].at[slot])
            _unpack(plan, thread, slot, scratch)
            places = ahead and ahead[0](b + plan.stages)
            k_ref, v_ref = scratch["block"]
        else:
            k_ref, v_ref = scratch["k_ref"].at[slot], scratch["v_ref"].at[slot]

        def scores(acc_ref):
            plgpu.wgmma(acc_ref, scratch["q_ref"].at[thread], k_ref.T)
            return acc_ref[...]

        s_RB = pl.run_scoped(scores, plgpu.ACC((ROWS, B), FLOAT32))
        if plan.quantised:
            pass_on(b, slot, places)
            s_RB = s_RB * _across_rows(_load(scratch["scales"].at[0], BY_COLUMN))
        s_RB = _scaled(plan, s_RB)
        all_seen = (start + B <= jnp.minimum(lowest + 1, stop)) & (start >= begin)
        if plan.window is not None:
            all_seen &= start > highest - plan.window
        s_RB = lax.cond(
            all_seen,
            lambda s, *_: s,
            functools.partial(_mask, plan),
            s_RB, position - start, begin - start, stop - start,
        )  # fmt: skip
        new_most = jnp.maximum(most, jnp.max(s_RB, axis=1))
        keep = jnp.exp2(most - new_most)
        p_RB = jnp.exp2(s_RB - _across(new_most, B))
        total = keep * total + jnp.sum(p_RB, axis=1)
        if plan.quantised:
            column = plgpu.broadcasted_iota(jnp.int32, (B,), 0, layout=BY_COLUMN)
            real = (column >= begin - start) & (column < stop - start)
            v_scale = _load(scratch["scales"].at[1], BY_COLUMN)
            p_RB = p_RB * _across_rows(jnp.where(real, v_scale, 0))
        else:
            places = ahead and ahead[0](b + plan.stages)  # early: the page table is far away
            plgpu.barrier_wait(scratch["v_full"].at[slot])
        p_RB = p_RB.astype(jnp.bfloat16)

        @pl.when((start < begin) | (start + B > stop))
        def _():
            _zero_unseen(plan, thread, v_ref, begin - start, stop - start, scratch["meeting"])

        value = _across(keep, plan.head_dim) * value
        p_ref = scratch["p_ref"].at[thread] if plan.interpret else None
        value = _add_product(plan, value, p_RB, v_ref, p_ref)
        if not plan.quantised:
            pass_on(b, slot, places)
        return new_most, total, value

    full = lambda number, *shape, layout: plgpu.layout_cast(
        jnp.full(shape, number, FLOAT32), layout
    )
    state = (
        full(NEGATIVE, ROWS, layout=BY_ROW),
        full(0, ROWS, layout=BY_ROW),
        full(0, ROWS, plan.head_dim, layout=WGMMA),
    )
    return lax.fori_loop(*blocks, attend, state)


def _add_product(plan, value, p_RB, v_ref, p_ref):
    """value + p @ V."""
    if plan.interpret:  # which knows wgmma from shared memory, into an accumulator of zeros
        p_ref[...] = p_RB
        plgpu.commit_smem()

        def product(acc_ref):
            plgpu.wgmma(acc_ref, p_ref, v_ref)
            return acc_ref[...]

        return value + pl.run_scoped(product, plgpu.ACC(value.shape, FLOAT32))
    multiply = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p_RB, v_ref))
    return multiply(plgpu.ACC.init(value))


def _load(ref, layout):
    """Loads all of a reference, from wherever it is."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = index is not None and index.default is index.empty  # before jax 0.11
    return plgpu.load(ref, *[...] * needed, layout=layout, optimized=False)


def _across_rows(number_B):
    return lax.broadcast_in_dim(number_B, (ROWS, number_B.shape[0]), [1])


def _across(number_R, columns):
    return lax.broadcast_in_dim(number_R, (ROWS, columns), [0])


def _scaled(plan, s_RB):
    """Products -> scores, times log2(e): the softmax is in base 2."""
    if plan.soft_cap is None:
        return s_RB * (plan.scale * LOG2_E)
    # tanh(x) = 1 - 2 / (1 + exp(2x)) saturates cleanly at both ends.
    twice = jnp.exp2(s_RB * (plan.scale / plan.soft_cap * 2 * LOG2_E))
    return plan.soft_cap * LOG2_E - (2 * plan.soft_cap * LOG2_E) / (1 + twice)


def _mask(plan, s_RB, position_R, begin, stop):
    """NEGATIVE where a row does not see a token; numbers are relative to the block's first.

    A row that sees none of a block adds ones to its sum, until its first token's score comes: that
    is above NEGATIVE by so much that nothing is kept of the sum before it.
    """
    column = plgpu.broadcasted_iota(jnp.int32, s_RB.shape, 1, layout=WGMMA)
    seen = column <= _across(jnp.minimum(position_R, stop - 1), s_RB.shape[1])
    if plan.window is not None:
        seen &= column >= _across(jnp.maximum(position_R - (plan.window - 1), begin), s_RB.shape[1])
    return jnp.where(seen, s_RB, NEGATIVE)


def _panels(plan, width):
    """Columns that registers take at once: whole ones of the tiles in shared memory."""
    width = plan.head_dim if plan.head_dim % width else width
    return [pl.ds(at, width) for at in range(0, plan.head_dim, width)]


def _unpack(plan, thread, slot, scratch):
    """Codes of the ring -> bfloat16 in the block that wgmma reads; their scales in one row."""
    if plan.groups > 1:  # the other may still read the block
        _meet(scratch["meeting"])
    # Hopper casts 8-bit floats to float16 only. Every code is exact in all of these.
    via = jnp.float16 if jnp.issubdtype(plan.page_dtype, jnp.floating) else jnp.bfloat16

    def unpack(codes, block, rows):
        for columns in _panels(plan, 128):
            numbers = _load(codes.at[slot, rows, columns], WGMMA).astype(via)
            block[rows, columns] = numbers.astype(block.dtype)

    part = 0
    for codes, block in zip((scratch["k_ref"], scratch["v_ref"]), scratch["block"]):
        for at in range(0, plan.block_tokens, ROWS):
            mine = thread == part % plan.groups
            pl.when(mine)(functools.partial(unpack, codes, block, pl.ds(at, ROWS)))
            part += 1

    @pl.when(thread == 0)
    def _():
        step = plan.copy_tokens
        for kind in range(2):
            for i in range(plan.block_tokens // step):
                page = _load(scratch["page_scales"].at[slot, i, kind], BY_COLUMN)
                scratch["scales"][kind, pl.ds(i * step, step)] = page

    plgpu.commit_smem()
    if plan.groups > 1:
        _meet(scratch["meeting"])


def _zero_unseen(plan, thread, v_ref, begin, stop, meeting):
    """Zeroes V outside of the block's [begin, stop): it may be NaN, and 0 * NaN is NaN."""

    def zero(first):
        for columns in _panels(plan, 64):
            at = (pl.ds(first, ROWS), columns)
            v = _load(v_ref.at[at], WGMMA)
            token = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WGMMA) + first
            v_ref[at] = jnp.where((token >= begin) & (token < stop), v, jnp.zeros_like(v))
        plgpu.commit_smem()

    for chunk in range(plan.block_tokens // ROWS):
        pl.when(thread == chunk % plan.groups)(functools.partial(zero, chunk * ROWS))
    if plan.groups > 1:
        _meet(meeting)


def _meet(barrier):
    """Waits for the other compute warpgroups."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _store(plan, thread, state, sink_ref, line, out_refs, scratch):
    """Stores finished outputs, through the shared memory that held the queries."""
    most, total, value = state
    sink = _load(sink_ref, BY_ROW)
    total = total + jnp.exp2(sink - most)
    out_ref = scratch["q_ref"].at[thread]
    out_ref[...] = (value / _across(total, plan.head_dim)).astype(out_ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_ref, out_refs[0].at[line, pl.ds(thread * ROWS, ROWS)])
    plgpu.wait_smem_to_gmem(0)


def _store_part(plan, thread, state, line, out_refs, scratch):
    """Stores a split's maxima, sums and values, of the rows that matter."""
    *sums, value = state
    if plan.groups > 1:  # the other may still read the ring, where the values go
        _meet(scratch["meeting"])
    rows = pl.ds(thread * ROWS, ROWS)
    scratch["value_ref"][thread] = value
    for i, number in enumerate(sums):
        scratch["sums_ref"][i, rows] = number
    plgpu.commit_smem()
    for i in range(2):
        plgpu.copy_smem_to_gmem(scratch["sums_ref"].at[i, rows], out_refs[1 + i].at[line, rows])

    def store(group):  # its rows that matter: how many is known for each
        kept = min(ROWS, plan.out_rows - group * ROWS)
        plgpu.copy_smem_to_gmem(
            scratch["value_ref"].at[group, pl.ds(0, kept)],
            out_refs[0].at[line, pl.ds(group * ROWS, kept)],
        )

    for group in range(plan.groups):
        pl.when(thread == group)(functools.partial(store, group))
    plgpu.wait_smem_to_gmem(0)
