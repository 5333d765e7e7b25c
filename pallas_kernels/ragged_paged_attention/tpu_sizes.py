"""Block and tile sizes of the TPU kernel, from tuned data or from its own memory footprint."""

from __future__ import annotations

import math

import jax.numpy as jnp

from .. import tuning
from .tpu_numbers import LANES, PARTS
from .tpu_write import WRITE_BUFFERS

OP = "ragged_paged_attention"
MAX_BLOCK_TOKENS = 1024
SPLIT_TOKENS = 64  # of a float32 block, in one turn of tpu_read.split_span
SPAN_TOKENS = 512  # of a block that a row may not fill, computed at once
BUFFER_BYTES = 8 * 2**20  # of the two KV buffers: enough to hide a DMA's latency many times over
SCORE_REGISTERS = 32  # float32 registers a block's scores may fill before they spill
VMEM_BYTES = 48 * 2**20  # 7x has 64 MB a core, the others 128
SMEM_BYTES = 896 * 2**10  # of 1 MB on every chip since v5e
REGISTER = 8 * LANES


def tile_tokens(set_rows: int) -> int:
    """Tokens of a tile in the mixed kernel, for about 128 query rows a set; a power of two."""
    return max(8, 1 << (160 // set_rows).bit_length() - 1)


def choose(block_tokens, pages, *, rows, sets, lanes, tile_tokens, window, key):
    """-> (pages of a block, VMEM limit in bytes).

    block_tokens: a wish, or None for the tuned size or the heuristic, cut down to what a tile can
    see through a window. rows: query rows of a tile in a set. ValueError when nothing fits.
    """
    C, K = pages.shape[2:4]
    W, itemsize = C * LANES, pages.dtype.itemsize
    parts = PARTS if pages.dtype == jnp.float32 else 1
    least = math.lcm(K, LANES)  # scores have whole registers of tokens
    if block_tokens is None:
        tuned = tuning.lookup(OP, key)
        if tuned:
            block_tokens = tuned["block_tokens"]
        else:
            block_tokens = MAX_BLOCK_TOKENS
            while block_tokens > least and not _fits(
                block_tokens, W * itemsize, rows * parts, sets, tile_tokens
            ):
                block_tokens //= 2
    if window is not None:
        seen = window + tile_tokens - 1 + K - 1  # the first page may begin before the window
        block_tokens = min(block_tokens, -(-seen // least) * least)
    block_tokens = max(least, block_tokens // least * least)
    group = 32 // itemsize
    state = sets * rows * (2 * LANES + lanes) * 4
    inputs = 2 * 2 * sets * rows * lanes * 4 + 4 * rows * LANES * 4 * (sets + 2)
    footprint = 2 * block_tokens * W * itemsize + state + inputs
    footprint += WRITE_BUFFERS * group * W * (itemsize + 4)
    if parts > 1:
        footprint += parts * block_tokens * W * 2
    if footprint > VMEM_BYTES:
        raise ValueError(
            f"attention at {key} needs {footprint >> 20} MB of VMEM, {VMEM_BYTES >> 20} MB are "
            "there: use smaller pages"
        )
    return block_tokens // K, VMEM_BYTES


def span_pages(block_pages, page_size, span_tokens) -> int:
    """Pages of a span: of span_tokens or, if None, SPAN_TOKENS, or all where they do not divide."""
    pages = max(1, (span_tokens or SPAN_TOKENS) // page_size)
    return block_pages if block_pages % pages or pages * page_size % LANES else pages


def turn_blocks(key) -> int:
    """Blocks in a turn of the steady loop: two where that was measured to take fewer cycles."""
    tuned = tuning.lookup(OP, key)
    return tuned.get("turn_blocks", 1) if tuned else 1


def split_tokens(key) -> int:
    """Tokens of a float32 block split in one turn: fewer where more were seen to spill."""
    tuned = tuning.lookup(OP, key)
    return tuned.get("split_tokens", SPLIT_TOKENS) if tuned else SPLIT_TOKENS


def _fits(block_tokens, token_bytes, rows, sets, tile_tokens):
    if 2 * block_tokens * token_bytes > BUFFER_BYTES:
        return False
    # Decode holds the scores of all sets at once, other tiles those of one; float32 rows come in
    # parts, as so many rows.
    registers = -(-rows // 8) * (block_tokens // LANES) * (sets if tile_tokens == 1 else 1)
    return registers <= SCORE_REGISTERS


def check_scalars(page_table, tiles) -> None:
    """ValueError unless the tables fit in scalar memory."""
    count = page_table.size + 3 * tiles.row_i.size + 8 * tiles.group_5n.shape[1]
    if 4 * count > SMEM_BYTES:
        rows, pages = page_table.shape
        raise ValueError(
            f"a page table of {rows} rows and {pages} pages takes {4 * count >> 10} kB of scalar "
            f"memory, {SMEM_BYTES >> 10} kB are there: use larger pages or fewer slots"
        )
