"""What the launches through Mosaic GPU share: a ring of KV blocks, and who fills it.

A program has compute warpgroups, which attend the ring's blocks in turn, and one more that copies
pages there or, where registers are few, the first of them does that too.

Names: B tokens of a KV block.
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

from .gpu import LOG2_E, Plan, span

ROWS = 64  # of wgmma's left operand
MOST_GROUP = 128  # query heads of a KV head
WGMMA = plgpu.Layout.WGMMA
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one number a column
BY_ROW = plgpu.Layout.WGMMA.reduce(1)  # one number a row
FLOAT32 = jnp.float32


@dataclasses.dataclass(frozen=True)
class MosaicPlan(Plan):
    num_heads: int  # of KV
    num_pages: int
    groups: int  # compute warpgroups
    has_reader: bool  # a warpgroup of its own copies; else the first one does
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


@dataclasses.dataclass(frozen=True)
class Program:
    """What one program computes: a tile's query heads of one KV head over a split of its row."""

    tile: jax.Array
    head: jax.Array
    line: jax.Array  # of the outputs
    token: jax.Array  # the tile's first token
    first: jax.Array  # its position
    begin: jax.Array  # positions [begin, stop) are read
    stop: jax.Array
    blocks: tuple[jax.Array, jax.Array]  # [first, end)
    thread: jax.Array  # which warpgroup


def block_tokens(head_dim: int) -> int:
    """KV tokens of one step of a program's loop."""
    return 64


def make_plan(plan, work, **sizes) -> MosaicPlan:
    """The whole plan, or ValueError where this kernel does not serve what is asked."""
    data = work.kv_pages.data
    if jnp.float32 in (work.q.dtype, data.dtype) or plan.group > MOST_GROUP:
        raise ValueError(
            f"attention on GPU through Mosaic serves no {data.dtype} cache with {work.q.dtype} "
            f"activations and {plan.group} query heads a KV head: choose "
            "attention_backend=reference"
        )
    return MosaicPlan(
        **vars(plan),
        page_dtype=data.dtype, num_pages=data.shape[1], num_heads=data.shape[2], **sizes,
    )  # fmt: skip


def launch(name, plan, work, q, sink, scratch, out_type, splits, attend):
    """Outputs of all programs. attend(plan, program, ahead, inputs, outputs, scratch): what a
    compute warpgroup does; ahead: None, or the ring's reader, where that is the first of them."""
    pages, data = work.kv_pages, work.kv_pages.data
    scales = () if pages.scale is None else (pages.scale.reshape(-1, *pages.scale.shape[-2:]),)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan, attend=attend),
        out_type=out_type,
        grid=(splits, plan.num_heads, work.row_i.shape[0]),
        grid_names=("split", "head", "tile"),
        num_threads=plan.groups + plan.has_reader,
        thread_name="warpgroup",
        scratch_types=scratch | _ring(plan, q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        kernel_name=f"ragged_paged_attention_{name}",
        interpret=plgpu.InterpretGPUParams(detect_races=True) if plan.interpret else None,
    )(
        work.layer, work.page_table_SP, work.row_i, work.token_i, work.first_i, work.end_i,
        q, sink, data.reshape(-1, *data.shape[-2:]), *scales,
    )  # fmt: skip


def _kernel(
    layer_ref, page_table_ref, row_i_ref, token_i_ref, first_i_ref, end_i_ref, q_in, sink_in,
    pages_in, *refs, plan, attend, **scratch,
):  # fmt: skip
    """Program (split, KV head, tile). Positions [first, end) are the tile's own tokens'."""
    scales_in, *out_refs = refs if plan.quantised else (None, *refs)
    split, head, tile = (lax.axis_index(name) for name in ("split", "head", "tile"))
    first, end = first_i_ref[tile], end_i_ref[tile]
    begin, stop, active = span(plan, first, end, split)
    blocks = lax.div(begin, plan.block_tokens), pl.cdiv(stop, plan.block_tokens)
    line = (tile * lax.axis_size("split") + split) * plan.num_heads + head
    thread = lax.axis_index("warpgroup")
    program = Program(tile, head, line, token_i_ref[tile], first, begin, stop, blocks, thread)

    @pl.when(active)
    def _():
        plane = layer_ref[0] * plan.num_pages
        find, copy = _reader(
            plan, program, plane, row_i_ref.at[tile], page_table_ref, pages_in, scales_in, scratch
        )
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
            ahead = None if plan.has_reader else (find, copy)
            attend(plan, program, ahead, (q_in, sink_in), out_refs, scratch)


# ---- the ring ------------------------------------------------------------------------------------


def _ring(plan, dtype):
    """Its shared memory and barriers."""
    E, B, stages = plan.head_dim, plan.block_tokens, plan.stages
    full = plgpu.Barrier(
        num_arrivals=B // plan.copy_tokens * (1 + plan.quantised), num_barriers=stages
    )
    ring = dict(
        k_ref=tiled((stages, B, E), plan.page_dtype),
        v_ref=tiled((stages, B, E), plan.page_dtype),
        k_full=full,
        v_full=full,
        empty=plgpu.Barrier(num_arrivals=plan.groups, num_barriers=stages),
        meeting=plgpu.Barrier(num_arrivals=plan.groups),
    )
    if plan.quantised:
        ring["scales"] = plgpu.SMEM((stages, 2, B), FLOAT32)
        ring["unpacked"] = [tiled((B, E), dtype), tiled((B, E), dtype)]
    return ring


def swizzle(columns, dtype) -> int | None:
    """Bytes of a row that TMA writes and wgmma reads without bank conflicts, or None."""
    row_bytes = columns * jnp.dtype(dtype).itemsize
    return next((size for size in (128, 64, 32) if row_bytes % size == 0), None)


def tiled(shape, dtype, swizzled=None):
    """Shared memory in that order."""
    swizzled = swizzled or swizzle(shape[-1], dtype)
    if swizzled is None:  # heads of 80 in codes, which wgmma does not read
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((8, swizzled // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzled)))


def _reader(plan, program, plane, row_ref, page_table_ref, pages_in, scales_in, scratch):
    """-> find(b): where block b's pages are; copy(b, those): copies them into the ring.

    Only pages that hold positions [begin, stop) are read.
    """
    size, step, first_block = plan.page_size, plan.copy_tokens, program.blocks[0]
    lowest, highest = lax.div(program.begin, size), lax.div(program.stop - 1, size)
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
        index = b - first_block
        slot = lax.rem(index, plan.stages)
        pl.when(index >= plan.stages)(lambda: plgpu.barrier_wait(scratch["empty"].at[slot]))
        for i, (page, within) in enumerate(places):
            page = (plane + page) * plan.num_heads + program.head
            source, target = pl.ds(within, step), pl.ds(i * step, step)
            for kind, name in enumerate(("k", "v")):
                full = scratch[f"{name}_full"].at[slot]
                part = scratch[f"{name}_ref"].at[slot, target]
                plgpu.copy_gmem_to_smem(pages_in.at[page * 2 + kind, source], part, full)
                if plan.quantised:
                    part = scratch["scales"].at[slot, kind, target]
                    plgpu.copy_gmem_to_smem(scales_in.at[page, kind, source], part, full)

    return find, copy


def next_block(plan, program, b, scratch):
    """Waits for block b's K, and of codes for its V, too, and makes them bfloat16.

    -> (the block's slot in the ring, its K, its V)."""
    slot = lax.rem(b - program.blocks[0], plan.stages)
    plgpu.barrier_wait(scratch["k_full"].at[slot])
    if not plan.quantised:
        return slot, scratch["k_ref"].at[slot], scratch["v_ref"].at[slot]
    plgpu.barrier_wait(scratch["v_full"].at[slot])
    _unpack(plan, program.thread, slot, scratch)
    return slot, *scratch["unpacked"]


def _panels(plan, width):
    """Columns that registers take at once: whole ones of the tiles in shared memory."""
    width = plan.head_dim if plan.head_dim % width else width
    return [pl.ds(at, width) for at in range(0, plan.head_dim, width)]


def _unpack(plan, thread, slot, scratch):
    """Codes of the ring -> bfloat16 in the block that wgmma reads."""
    if plan.groups > 1:  # the other may still read the block
        _meet(scratch["meeting"])
    # Hopper casts 8-bit floats to float16 only. Every code is exact in all of these.
    via = jnp.float16 if jnp.issubdtype(plan.page_dtype, jnp.floating) else jnp.bfloat16

    def unpack(codes, block, rows):
        for columns in _panels(plan, 128):
            numbers = load(codes.at[slot, rows, columns], WGMMA).astype(via)
            block[rows, columns] = numbers.astype(block.dtype)

    part = 0
    for codes, block in zip((scratch["k_ref"], scratch["v_ref"]), scratch["unpacked"]):
        for at in range(0, plan.block_tokens, ROWS):
            _share(plan, thread, part, functools.partial(unpack, codes, block, pl.ds(at, ROWS)))
            part += 1
    plgpu.commit_smem()
    if plan.groups > 1:
        _meet(scratch["meeting"])


def zero_unseen(plan, program, b, v_ref, scratch):
    """Zeroes V of block b outside of [begin, stop): it may be NaN, and 0 * NaN is NaN."""
    start = b * plan.block_tokens

    def zero(first):
        for columns in _panels(plan, 64):
            at = (pl.ds(first, ROWS), columns)
            v = load(v_ref.at[at], WGMMA)
            token = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=WGMMA) + (start + first)
            own = (token >= program.begin) & (token < program.stop)
            v_ref[at] = jnp.where(own, v, jnp.zeros_like(v))
        plgpu.commit_smem()

    @pl.when((start < program.begin) | (start + plan.block_tokens > program.stop))
    def _():
        for chunk in range(plan.block_tokens // ROWS):
            _share(plan, program.thread, chunk, functools.partial(zero, chunk * ROWS))
        if plan.groups > 1:
            _meet(scratch["meeting"])


def _share(plan, thread, part, work):
    """Part after part is done by one compute warpgroup after the other."""
    if plan.groups == 1:
        return work()
    pl.when(thread == part % plan.groups)(work)


def _meet(barrier):
    """Waits for the other compute warpgroups."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


# ---- arithmetic ----------------------------------------------------------------------------------


def load(ref, layout):
    """Loads all of a reference, from wherever it is."""
    index = inspect.signature(plgpu.load).parameters.get("idx")
    needed = index is not None and index.default is index.empty  # before jax 0.11
    return plgpu.load(ref, *[...] * needed, layout=layout, optimized=False)


def full(number, *shape, layout):
    return plgpu.layout_cast(jnp.full(shape, number, FLOAT32), layout)


def across_rows(number_B):
    """A number of each column, in all of 64 rows."""
    return lax.broadcast_in_dim(number_B, (ROWS, number_B.shape[0]), [1])


def across(number_R, columns):
    """A number of each of 64 rows, in all columns."""
    return lax.broadcast_in_dim(number_R, (ROWS, columns), [0])


def product(left, right_ref, shape):
    """left @ right, float32."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, left, right_ref)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, FLOAT32))


def add_product(plan, value, left, right_ref):
    """value + left @ right."""
    if plan.interpret:  # which knows accumulators of zeros only
        return value + product(left, right_ref, value.shape)
    multiply = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right_ref))
    return multiply(plgpu.ACC.init(value))


def scaled(plan, s):
    """Products -> scores, times log2(e): the softmax is in base 2."""
    if plan.soft_cap is None:
        return s * (plan.scale * LOG2_E)
    # tanh(x) = 1 - 2 / (1 + exp(2x)) saturates cleanly at both ends.
    twice = jnp.exp2(s * (plan.scale / plan.soft_cap * 2 * LOG2_E))
    return plan.soft_cap * LOG2_E - (2 * plan.soft_cap * LOG2_E) / (1 + twice)
