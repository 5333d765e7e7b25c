"""The TPU kernel's body: one for decode and for mixed steps, for every shape and option.

A grid step is one tile: a few tokens of one row, all heads. Three things happen in it:

1. The first tile writes the step's new K and V. Pages change in groups of as many tokens as one
   memory tile holds (16 in bfloat16): fetch the group, put the new tokens in, send it back.
2. Each tile walks the pages that it sees, a block at a time, through two VMEM buffers: while one is
   computed on, DMAs fill the other with the next block, or with the next tile's first. Whole blocks
   are computed one or two a turn; what a row may not fill goes span by span, as far as it does.
3. Softmax runs online, in base 2, on float32 scores. The matrix unit multiplies bfloat16: what
   becomes of other numbers is in tpu_numbers.py.

Heads lie side by side in a page's columns of 128 lanes, whatever their size. A *set* is a few heads
multiplied at once: its queries are zero outside their own head's lanes, so one matmul over the
set's lanes gives each head its own scores. That fills sublanes that small groups would leave empty,
and head sizes that are no multiple of 128 lanes need no shuffles.

Names: R rows of a tile in a set (tokens x heads), B tokens of a block, C columns of a page, w lanes
of a set, s sets, p pages of a block, g tokens of a group.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tpu_numbers import E4M3_STEP, LANES, PARTS, matmul
from .tpu_read import lanes_of, order_scales, row_scales, split_span, token_order
from .tpu_write import WRITE_BUFFERS, write_groups

NEGATIVE = -1e30  # finite: the difference of two of them is 0, not NaN
LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call."""

    page_size: int
    pages_per_layer: int  # in memory, layer after layer
    pages_per_row: int
    block_pages: int
    span_pages: int  # of a block, when it may not be filled; divides block_pages
    turn_blocks: int  # 1 or 2 whole blocks in a turn of the steady loop
    tile_tokens: int
    group_tokens: int
    set_rows: int  # rows of one token in a set
    k_lanes: tuple[int, ...]  # first lane of each set's keys, a multiple of 128
    v_lanes: tuple[int, ...]
    set_lanes: int
    unroll_sets: bool
    scale: float
    window: int | None
    soft_cap: float | None
    compute_dtype: jnp.dtype  # of queries and probabilities
    splits: bool  # pages hold float32, see split_span
    split_tokens: int  # in one turn of its loop
    set_heads: int  # KV heads of a set
    num_kv_heads: int
    quantised: bool  # pages hold 8-bit codes, with a scale per slot and head
    unpacks_fp8: bool  # see unpack_e4m3; queries and scale then come E4M3_STEP times larger

    @property
    def block_tokens(self):
        return self.block_pages * self.page_size

    @property
    def span_tokens(self):
        return self.span_pages * self.page_size


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive pages of a block in VMEM."""

    buffer: object
    page: object  # the first of them
    pages: int
    tokens: int
    position: object  # of the first token in its row


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refs:
    """The kernel's arguments, in order. Scalars (SMEM) come first."""

    layer: object  # [1]
    page_table: object  # [S * P]
    tile_row: object  # [tiles]
    tile_first: object  # [tiles] position of the tile's first token
    tile_end: object  # [tiles] one past the position of its last
    group: object  # [5, groups] page, first slot, token at that slot, first new slot, past the last
    counts: object  # [2] tiles, groups
    q: object  # VMEM [1, s, R, w]
    rows: object  # VMEM [2, R, 128] int32: which token of the tile a row is; which head of its set
    first_max: object  # VMEM [s, R, 128] what the maximum starts from: sinks, or NEGATIVE
    new_kv: object  # HBM [tokens, C, 128] float32
    pages_in: object  # aliased to `pages`
    scales: object = None  # HBM [L * G, 2J, K] float32; 8-bit pages only
    out: object  # VMEM [1, s, R, w]
    pages: object  # HBM [L * G, C, K, 128]
    kv: object  # VMEM [2, p, C, K, 128]
    scale_buffer: object = None  # VMEM [2, p, 2J, K] float32; 8-bit pages only
    parts: object = None  # VMEM [PARTS, C, B, 128] bfloat16: the block in parts; float32 pages only
    max: object  # VMEM [s, R, 128] float32
    sum: object  # VMEM [s, R, 128] float32
    value: object  # VMEM [s, R, w] float32
    old: object  # VMEM [WRITE_BUFFERS, C, g, 128]
    new: object  # VMEM [WRITE_BUFFERS, g, C, 128] float32
    parity: object  # SMEM [1] the buffer that holds the tile's first block
    fetch_sems: object  # [2]
    write_sems: object  # [3, WRITE_BUFFERS] old in, new in, merged out


def kernel(*refs, plan: Plan, sinks: bool):
    """Grid step i is tile i."""
    refs = Refs(**dict(zip(ref_names(plan), refs)))
    tile = pl.program_id(0)

    @pl.when(tile == 0)
    def _():
        @pl.loop(0, plan.block_pages)
        def _(p):  # never-fetched slots must not hold NaN
            refs.kv[:, p] = jnp.zeros((2, *refs.kv.shape[2:]), refs.kv.dtype)

        refs.parity[0] = 0
        write_groups(refs, plan)
        start_fetch(refs, plan, tile, 0, 0)

    refs.max[...] = refs.first_max[...]
    refs.sum[...] = jnp.full_like(refs.sum, 1.0 if sinks else 0.0)
    refs.value[...] = jnp.zeros_like(refs.value)

    parity = refs.parity[0]
    num_blocks = tile_blocks(refs, plan, tile)
    # While the next block is a full one of this tile, its fetch is a fixed list of DMAs: no branch
    # keeps them from being issued alongside the arithmetic. Two blocks a turn begin in buffer 0:
    # what is filled is then known not to be what is read, and more of them are.
    whole = jnp.maximum(full_blocks(refs, plan, tile) - 1, 0)
    lead = parity if plan.turn_blocks == 2 else 0
    turns = jnp.maximum(whole - lead, 0) // plan.turn_blocks

    def steady(turn):
        for i in range(plan.turn_blocks):
            b = lead + turn * plan.turn_blocks + i
            buffer = i if plan.turn_blocks == 2 else (parity + b) & 1
            start_full(refs, plan, tile, b + 1, 1 - buffer)
            wait_full(refs, plan, buffer)
            attend(refs, plan, tile, whole_block(refs, plan, tile, b, buffer))

    if plan.turn_blocks == 1:
        pl.loop(0, turns)(steady)

    @pl.loop(0, num_blocks - turns * plan.turn_blocks)
    def _(n):
        if plan.turn_blocks == 2:
            pl.loop(0, jnp.where(n == lead, turns, 0))(steady)
        b = jnp.where(n < lead, n, n + turns * plan.turn_blocks)
        buffer = (parity + b) & 1
        last = b + 1 == num_blocks
        next_tile = jnp.where(last, tile + 1, tile)

        @pl.when(next_tile < refs.counts[0])
        def _():
            start_fetch(refs, plan, next_tile, jnp.where(last, 0, b + 1), 1 - buffer)

        wait_fetch(refs, plan, tile, b, buffer)
        attend_spans(refs, plan, tile, b, buffer)

    refs.parity[0] = (parity + num_blocks) & 1
    lanes = (1, 1, refs.value.shape[-1] // LANES)
    total = jnp.tile(refs.sum[...], lanes)
    value = refs.value[...] * E4M3_STEP if plan.unpacks_fp8 else refs.value[...]
    refs.out[0] = (value / jnp.where(total > 0, total, 1)).astype(refs.out.dtype)


def ref_names(plan):
    absent = set() if plan.quantised else {"scales", "scale_buffer"}
    absent |= set() if plan.splits else {"parts"}
    return [field.name for field in dataclasses.fields(Refs) if field.name not in absent]


def first_page(refs, plan, tile):
    """The first page of which the tile's first token sees anything."""
    if plan.window is None:
        return 0
    return jnp.maximum(refs.tile_first[tile] - (plan.window - 1), 0) // plan.page_size


def tile_blocks(refs, plan, tile):
    tokens = refs.tile_end[tile] - first_page(refs, plan, tile) * plan.page_size
    return pl.cdiv(tokens, plan.block_tokens)


def full_blocks(refs, plan, tile):
    """How many of the tile's blocks are fetched whole."""
    tokens = refs.tile_end[tile] - first_page(refs, plan, tile) * plan.page_size
    return (tokens + (plan.group_tokens - 1)) // plan.block_tokens


def start_full(refs, plan, tile, block, buffer):
    base, row = refs.layer[0] * plan.pages_per_layer, refs.tile_row[tile]
    at = row * plan.pages_per_row + first_page(refs, plan, tile) + block * plan.block_pages
    for p in range(plan.block_pages):
        page, sem = base + refs.page_table[at + p], refs.fetch_sems.at[buffer]
        pltpu.make_async_copy(refs.pages.at[page], refs.kv.at[buffer, p], sem).start()
        if plan.quantised:
            to = refs.scale_buffer.at[buffer, p]
            pltpu.make_async_copy(refs.scales.at[page], to, sem).start()


def wait_full(refs, plan, buffer):
    """One wait for all of the block's bytes: a DMA semaphore counts bytes, not copies."""
    for ref in (refs.kv, refs.scale_buffer) if plan.quantised else (refs.kv,):
        block = ref.at[buffer]
        pltpu.make_async_copy(block, block, refs.fetch_sems.at[buffer]).wait()


def rest_copies(refs, plan, tile, block, buffer, p, slots=slice(None)):
    """The copies of a page, or of some of its slots, of a block that is not fetched whole."""
    at = refs.tile_row[tile] * plan.pages_per_row + first_page(refs, plan, tile)
    page = refs.layer[0] * plan.pages_per_layer
    page += refs.page_table[at + block * plan.block_pages + p]
    sem = refs.fetch_sems.at[buffer]
    codes = refs.pages.at[page, :, slots], refs.kv.at[buffer, p, :, slots]
    if not plan.quantised:
        return [pltpu.make_async_copy(*codes, sem)]
    # Scales of a page come whole, again with each of its groups: tails of rows are short.
    scales = refs.scales.at[page], refs.scale_buffer.at[buffer, p]
    return [pltpu.make_async_copy(*codes, sem), pltpu.make_async_copy(*scales, sem)]


def for_rest(refs, plan, tile, block, buffer, do):
    """do(copy) for all copies of a block not fetched whole: its pages, then groups of its last."""
    copies = functools.partial(rest_copies, refs, plan, tile, block, buffer)
    first = first_page(refs, plan, tile) * plan.page_size + block * plan.block_tokens
    groups = pl.cdiv(refs.tile_end[tile] - first, plan.group_tokens)
    groups_page = plan.page_size // plan.group_tokens
    whole_pages = groups // groups_page

    @pl.loop(0, whole_pages)
    def _(p):
        for copy in copies(p):
            do(copy)

    if groups_page == 1:
        return

    @pl.loop(0, groups - whole_pages * groups_page)
    def _(g):
        first = pl.multiple_of(g * plan.group_tokens, plan.group_tokens)
        for copy in copies(whole_pages, pl.ds(first, plan.group_tokens)):
            do(copy)


def start_fetch(refs, plan, tile, block, buffer):
    """Starts the copies of a block: whole, or only the groups that hold tokens it sees."""
    full = block < full_blocks(refs, plan, tile)

    @pl.when(full)
    def _():
        start_full(refs, plan, tile, block, buffer)

    @pl.when(jnp.logical_not(full))
    def _():
        for_rest(refs, plan, tile, block, buffer, lambda copy: copy.start())


def wait_fetch(refs, plan, tile, block, buffer):
    full = block < full_blocks(refs, plan, tile)

    @pl.when(full)
    def _():
        wait_full(refs, plan, buffer)

    @pl.when(jnp.logical_not(full))
    def _():
        for_rest(refs, plan, tile, block, buffer, lambda copy: copy.wait())


def whole_block(refs, plan, tile, block, buffer):
    position = first_page(refs, plan, tile) * plan.page_size + block * plan.block_tokens
    return Span(buffer, 0, plan.block_pages, plan.block_tokens, position)


def attend_spans(refs, plan, tile, block, buffer):
    """Attends to as many spans of a block as its row has."""
    whole = whole_block(refs, plan, tile, block, buffer)
    if plan.span_pages == plan.block_pages:
        attend(refs, plan, tile, whole)
        return
    tokens = jnp.minimum(refs.tile_end[tile] - whole.position, plan.block_tokens)

    @pl.loop(0, pl.cdiv(tokens, plan.span_tokens))
    def _(n):
        position = whole.position + n * plan.span_tokens
        page = n * plan.span_pages
        attend(refs, plan, tile, Span(buffer, page, plan.span_pages, plan.span_tokens, position))


def attend(refs, plan, tile, span: Span):
    """Adds a span of a block to the running softmax of all sets."""
    if plan.unpacks_fp8:
        order_scales(refs, plan, span)
    if plan.splits:
        split_span(refs, plan, span)
    R = refs.q.shape[2]
    k_position = span.position + token_order(plan, R, span.tokens)
    q_position = refs.tile_first[tile]
    if plan.tile_tokens > 1:
        q_position = jnp.tile(refs.rows[0], (1, span.tokens // LANES)) + q_position
    seen = k_position <= q_position
    if plan.window is not None:
        seen &= k_position > q_position - plan.window

    def scores(s):
        k = lanes_of(refs, plan, span, plan.k_lanes, s)
        s_RB = matmul(refs.q[0, s].astype(plan.compute_dtype), k, transposed=True)
        if plan.quantised:
            s_RB = s_RB * row_scales(refs, plan, span, s * plan.set_heads)
        if plan.soft_cap is None:
            s_RB = s_RB * (plan.scale * LOG2_E)
        else:
            s_RB = jnp.tanh(s_RB * (plan.scale / plan.soft_cap)) * (plan.soft_cap * LOG2_E)
        return jnp.where(seen, s_RB, NEGATIVE)

    def weigh(s, s_RB):
        """-> probabilities relative to the new maximum, and what the old ones shrink by."""
        old_max = refs.max[s]
        new_max = jnp.maximum(old_max, jnp.max(s_RB, axis=1, keepdims=True))
        p_RB = jnp.exp2(s_RB - jnp.tile(new_max, (1, span.tokens // LANES)))
        p_RB = jnp.where(seen, p_RB, 0)
        keep = jnp.exp2(old_max - new_max)
        refs.max[s] = new_max
        refs.sum[s] = keep * refs.sum[s] + jnp.sum(p_RB, axis=1, keepdims=True)
        if plan.quantised:
            v_scales = row_scales(refs, plan, span, plan.num_kv_heads + s * plan.set_heads)
            p_RB = jnp.where(
                seen, p_RB * (v_scales * E4M3_STEP if plan.unpacks_fp8 else v_scales), 0
            )
        return p_RB.astype(plan.compute_dtype), keep

    def add_values(s, p_RB, keep):
        v = lanes_of(refs, plan, span, plan.v_lanes, s)
        keep = jnp.tile(keep, (1, plan.set_lanes // LANES))
        refs.value[s] = keep * refs.value[s] + matmul(p_RB, v, transposed=False)

    sets = len(plan.k_lanes)
    if plan.unroll_sets:
        weights = [weigh(s, scores(s)) for s in range(sets)]
        for s in range(sets):
            add_values(s, *weights[s])
    else:

        @pl.loop(0, sets)
        def _(s):
            add_values(s, *weigh(s, scores(s)))


def call(plan: Plan, arguments, *, num_tiles, out_dtype, sinks, interpret, vmem_bytes):
    """Runs the kernel. arguments: the fields of Refs before `out`. -> (out, pages)."""
    q, pages = arguments[7], arguments[11]
    _, sets, rows, lanes = q.shape
    C = pages.shape[1]
    optional = []
    if plan.quantised:
        page_scales = arguments[12].shape[1:]
        optional.append(pltpu.VMEM((2, plan.block_pages, *page_scales), jnp.float32))
    if plan.splits:
        optional.append(pltpu.VMEM((PARTS, C, plan.block_tokens, LANES), jnp.bfloat16))
    by_tile = pl.BlockSpec((1, sets, rows, lanes), lambda i, *_: (i, 0, 0, 0))
    fixed = lambda *shape: pl.BlockSpec(shape, lambda i, *_: (0,) * len(shape))
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    vmem, f32 = pltpu.VMEM, jnp.float32
    return pl.pallas_call(
        functools.partial(kernel, plan=plan, sinks=sinks),
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, out_dtype),
            jax.ShapeDtypeStruct(pages.shape, pages.dtype),
        ],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=7,
            grid=(num_tiles,),
            in_specs=[by_tile, fixed(2, rows, LANES), fixed(sets, rows, LANES)]
            + [hbm] * (len(arguments) - 10),
            out_specs=[by_tile, hbm],
            scratch_shapes=[
                vmem((2, plan.block_pages, C, plan.page_size, LANES), pages.dtype),
                *optional,
                vmem((sets, rows, LANES), f32),
                vmem((sets, rows, LANES), f32),
                vmem((sets, rows, lanes), f32),
                vmem((WRITE_BUFFERS, C, plan.group_tokens, LANES), pages.dtype),
                vmem((WRITE_BUFFERS, plan.group_tokens, C, LANES), f32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((3, WRITE_BUFFERS)),
            ],
        ),
        input_output_aliases={11: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"ragged_paged_attention_{'decode' if plan.tile_tokens == 1 else 'mixed'}",
    )(*arguments)
