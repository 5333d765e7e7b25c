"""The TPU kernel's reading of a span of a block: its numbers as the matrix unit multiplies them.

`plan`, `refs` and `span` are those of tpu_body.py.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .tpu_numbers import LANES, PARTS, split_float32, unpack_e4m3, unpacked_order


def token_order(plan, rows, tokens):
    """-> int32 [rows, tokens]: which token of a span is which column of the scores."""
    column = jax.lax.broadcasted_iota(jnp.int32, (rows, tokens), 1)
    return unpacked_order(column) if plan.unpacks_fp8 else column


def split_span(refs, plan, span):
    """Writes the bfloat16 parts of float32 tokens to VMEM, for all sets at once.

    Left to the matmuls, each set's would live in registers, and most would be spilled: a loop of
    its own keeps few of them at a time.
    """
    rows, columns = 16, refs.kv.shape[2]  # rows: of a tile of bfloat16

    @pl.loop(0, span.tokens // plan.split_tokens)
    def _(turn):
        for row, c in itertools.product(range(0, plan.split_tokens, rows), range(columns)):
            token = pl.multiple_of(turn * plan.split_tokens + row, rows)
            page = span.page + token // plan.page_size
            slots = pl.ds(pl.multiple_of(token % plan.page_size, rows), rows)
            for n, x in enumerate(split_float32(refs.kv[span.buffer, page, c, slots])):
                refs.parts[n, c, pl.ds(token, rows)] = x.astype(jnp.bfloat16)


def order_scales(refs, plan, span):
    """Puts a span's scales, as they came from memory, in the order of its unpacked tokens."""
    rows = refs.scale_buffer.shape[2]
    source = unpacked_order(jax.lax.broadcasted_iota(jnp.int32, (rows, LANES), 1))
    for p in range(span.pages):
        for start in range(0, plan.page_size, LANES):
            at = (span.buffer, span.page + p, slice(None), pl.ds(start, LANES))
            scales = refs.scale_buffer[at]
            refs.scale_buffer[at] = jnp.take_along_axis(
                scales, source, axis=1, mode="promise_in_bounds"
            )


def lanes_of(refs, plan, span, starts, s):
    """-> the bfloat16 parts [tokens, w] of what is in VMEM: the lanes of set s."""
    if isinstance(s, int):
        first = starts[s] // LANES
    else:
        step = starts[1] - starts[0]
        assert all(b - a == step for a, b in itertools.pairwise(starts)) and step % LANES == 0
        first = starts[0] // LANES + s * (step // LANES)
    columns = [column_parts(refs, plan, span, first + c) for c in range(plan.set_lanes // LANES)]
    return [jnp.concatenate(parts, axis=1) for parts in zip(*columns)]


def column_parts(refs, plan, span, c):
    """-> the bfloat16 parts [tokens, 128] of column c."""
    if plan.splits:
        return [refs.parts[n, c, pl.ds(0, span.tokens)] for n in range(PARTS)]
    if not plan.unpacks_fp8:
        tokens = refs.kv[span.buffer, pl.ds(span.page, span.pages), c]
        return [tokens.reshape(span.tokens, LANES).astype(jnp.bfloat16)]
    unpacked = []
    for p in range(span.pages):
        for start in range(0, plan.page_size, LANES):
            unpacked += unpack_e4m3(refs.kv[span.buffer, span.page + p, c, pl.ds(start, LANES)])
    return [jnp.concatenate(unpacked, axis=0)]


def row_scales(refs, plan, span, first):
    """-> [R, tokens]: scales of the rows from `first` on, at the queries of a set's heads."""
    head = jnp.tile(refs.rows[1], (1, span.tokens // LANES))
    result = jnp.zeros(head.shape, jnp.float32)
    for h in range(plan.set_heads):
        of_pages = [
            refs.scale_buffer[span.buffer, span.page + p, pl.ds(first + h, 1)]
            for p in range(span.pages)
        ]
        scale = jnp.concatenate(of_pages, axis=1)
        result = jnp.where(head == h, scale, result)
    return result
