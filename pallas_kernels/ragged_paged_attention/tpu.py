"""Ragged paged attention on TPU: lays out queries and keys, and calls the kernel.

Decode rows go in tiles of one token; the rest, when there are any, in tiles of many, gathered so
that each tile is one piece of memory. Both calls run the body in tpu_body.py and change the pages
in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .. import tuning
from . import tpu_sizes
from .kv import KVPages, quantise
from .reference import token_places
from .tables import decode_tiles, mixed_tiles
from .tpu_body import LOG2_E, NEGATIVE, Plan, call
from .tpu_numbers import E4M3_STEP, LANES, SUBLANES


def ragged_paged_attention(
    q_THE, k_TJE, v_TJE, kv_pages, batch, *, layer, scale, window=None, soft_cap=None, sinks=None,
    interpret=False, block_tokens=None, span_tokens=None, turn_blocks=None, split_tokens=None,
    tile_tokens=None, decode_only=False,
):  # fmt: skip
    """See api.ragged_paged_attention. kv_pages.data: [L, G, C, K, 128], see kv.py.

    block_tokens, span_tokens, turn_blocks, split_tokens and tile_tokens override what tpu_sizes
    chooses.
    decode_only: the caller knows that every row is a decode row: the other kernel is left out.
    """
    T = q_THE.shape[0]
    rows = min(batch.kv_len_S.shape[0], T)
    C, K = kv_pages.data.shape[2:4]
    group = 32 // kv_pages.data.dtype.itemsize
    least = max(group, 16)  # float32 is split into bfloat16, whose tiles are 16 tokens high
    if K % least:
        dtype = kv_pages.data.dtype.name
        raise ValueError(f"page_size={K}: with {dtype} KV on TPU, use a multiple of {least}")
    new_kv, scales = token_rows(k_TJE, v_TJE, C), None
    if kv_pages.scale is not None:
        if K % LANES:
            raise ValueError(f"page_size={K}: with 8-bit KV on TPU, use a multiple of {LANES}")
        new_kv, new_scales = quantised_rows(k_TJE, v_TJE, C, kv_pages.data.dtype)
        page_T, slot_T = token_places(batch, T, K)
        page_T = jnp.where(page_T < 0, kv_pages.scale.shape[1], page_T)  # padding: dropped
        # Indexed down to single numbers: XLA would otherwise turn the whole array over to scatter.
        row_J2 = jnp.arange(new_scales.shape[1], dtype=jnp.int32)
        at = (layer, page_T[:, None], row_J2[None], slot_T[:, None])
        scales = kv_pages.scale.at[at].set(new_scales, mode="drop")
    # A group may begin before its first new token and end after its last.
    new_kv = jnp.pad(new_kv, ((group, group), (0, 0), (0, 0)))
    common = dict(
        new_kv=new_kv, scales=scales, batch=batch, J=k_TJE.shape[1], layer=layer, scale=scale,
        window=window, soft_cap=soft_cap, sinks=sinks, interpret=interpret,
        block_tokens=block_tokens, span_tokens=span_tokens, turn_blocks=turn_blocks,
        split_tokens=split_tokens,
    )  # fmt: skip
    token_T = jnp.arange(T, dtype=jnp.int32)
    if tile_tokens is None:
        (_, H, E), J = q_THE.shape, k_TJE.shape[1]
        tile_tokens = tpu_sizes.tile_tokens(choose_set(H, J, E, 2) * (H // J))

    tiles = decode_tiles(batch, rows, group, K)
    out_itHE, pages = run_tiles(q_THE[:rows, None], kv_pages.data, tiles, **common)
    out_THE = jnp.pad(out_itHE[:, 0], ((0, T - rows), (0, 0), (0, 0)))
    out_THE = jnp.where((token_T < batch.num_decode)[:, None, None], out_THE, 0)

    if decode_only:
        return out_THE, KVPages(pages, scales)

    def mixed(out_THE, pages):
        tiles, tokens_it, tile_T, place_T = mixed_tiles(batch, T, tile_tokens, group, K)
        out_itHE, pages = run_tiles(q_THE[tokens_it], pages, tiles, **common)
        mine_T = token_T >= batch.num_decode
        mine_T &= token_T < batch.cu_q_len_S1[batch.num_rows[0]]
        return jnp.where(mine_T[:, None, None], out_itHE[tile_T, place_T], out_THE), pages

    any_mixed = batch.num_rows[0] > batch.num_decode[0]
    out_THE, pages = jax.lax.cond(any_mixed, mixed, lambda *same: same, out_THE, pages)
    return out_THE, KVPages(pages, scales)


def interpreted(*args, **options):
    """The same kernel on a CPU, by Pallas' TPU interpreter. Slow: for tests."""
    return ragged_paged_attention(*args, **options, interpret=True)


def run_tiles(
    q_itHE, pages, tiles, *, new_kv, scales, batch, J, layer, scale, window, soft_cap, sinks,
    interpret, block_tokens, span_tokens, turn_blocks, split_tokens,
):  # fmt: skip
    """One kernel call. -> (out_itHE, pages)."""
    _, t, H, E = q_itHE.shape
    K = pages.shape[3]
    heads = choose_set(H, J, E, tiles.tokens)
    k_lanes, v_lanes, lanes, k_offset, v_offset = set_windows(J, E, heads)
    exact = jnp.float32 in (q_itHE.dtype, pages.dtype)
    # TPU 7x converts fp8 itself.
    unpacks = pages.dtype == jnp.float8_e4m3fn and tuning.device_kind() != "tpu7x"
    set_rows = heads * (H // J)
    key = f"{H}/{J}/{E} page {K} {pages.dtype.name} {'decode' if t == 1 else 'mixed'}"
    block_pages, vmem_bytes = tpu_sizes.choose(
        block_tokens, pages, rows=t * set_rows, sets=len(k_lanes), lanes=lanes, tile_tokens=t,
        window=window, key=key,
    )  # fmt: skip
    P = batch.page_table_SP.shape[1]
    spare = -P % block_pages
    page_table = jnp.pad(batch.page_table_SP, ((0, 0), (0, spare)))
    tpu_sizes.check_scalars(page_table, tiles)
    plan = Plan(
        page_size=K,
        pages_per_layer=pages.shape[1],
        pages_per_row=P + spare,
        block_pages=block_pages,
        span_pages=tpu_sizes.span_pages(block_pages, K, span_tokens),
        turn_blocks=turn_blocks or tpu_sizes.turn_blocks(key),
        tile_tokens=t,
        group_tokens=32 // pages.dtype.itemsize,
        set_rows=set_rows,
        k_lanes=k_lanes,
        v_lanes=v_lanes,
        set_lanes=lanes,
        unroll_sets=t == 1 or len(k_lanes) == 1,
        scale=scale * E4M3_STEP if unpacks else scale,
        window=window,
        soft_cap=soft_cap,
        compute_dtype=jnp.dtype(jnp.float32 if exact else jnp.bfloat16),
        splits=pages.dtype == jnp.float32,
        split_tokens=split_tokens or tpu_sizes.split_tokens(key),
        set_heads=heads,
        num_kv_heads=J,
        quantised=scales is not None,
        unpacks_fp8=unpacks,
    )
    if unpacks:
        q_itHE = q_itHE * jnp.asarray(E4M3_STEP, q_itHE.dtype)
    q = spread_queries(q_itHE, J, heads, lanes, k_offset)
    R = q.shape[2]
    row = jnp.arange(R, dtype=jnp.int32)
    rows = jnp.stack([row // set_rows, row % set_rows // (H // J)])
    if sinks is None:
        first_max = jnp.full((len(k_lanes), R, LANES), NEGATIVE, jnp.float32)
    else:
        first_max = jnp.tile(sinks.astype(jnp.float32).reshape(-1, set_rows) * LOG2_E, (1, t))
        first_max = jnp.broadcast_to(first_max[..., None], (*first_max.shape, LANES))
    by_page = lambda array: array.reshape(-1, *array.shape[2:])  # one index to multiply, not two
    arguments = (
        jnp.asarray(layer, jnp.int32).reshape(1),
        page_table.reshape(-1),
        tiles.row_i,
        tiles.first_i,
        tiles.end_i,
        tiles.group_5n,
        tiles.counts,
        q,
        jnp.broadcast_to(rows[..., None], (2, R, LANES)),
        first_max,
        new_kv,
        by_page(pages),
        *(() if scales is None else (by_page(scales),)),
    )
    out, changed = call(
        plan, arguments, num_tiles=tiles.counts[0], out_dtype=q.dtype, sinks=sinks is not None,
        interpret=interpret, vmem_bytes=vmem_bytes,
    )  # fmt: skip
    return gather_values(out, t, heads, v_offset, E), changed.reshape(pages.shape)


def choose_set(H, J, E, tile_tokens):
    """How many KV heads one matmul takes.

    The lanes of a set begin at a multiple of 128. In decode more heads fill the 8 sublanes that a
    small group leaves empty; with many tokens a tile they would only multiply zeros.
    """
    fits = [n for n in range(1, J + 1) if J % n == 0 and n * E % LANES == 0] or [J]
    if tile_tokens > 1:
        return fits[0]
    return next((n for n in fits if n * (H // J) >= SUBLANES), fits[-1])


def token_rows(k_TJE, v_TJE, columns):
    """-> float32 [T, columns, 128]: a token's K heads, then its V heads, then zeros."""
    T = k_TJE.shape[0]
    rows = jnp.concatenate([k_TJE.reshape(T, -1), v_TJE.reshape(T, -1)], axis=1)
    rows = jnp.pad(rows.astype(jnp.float32), ((0, 0), (0, columns * LANES - rows.shape[1])))
    return rows.reshape(T, columns, LANES)


def quantised_rows(k_TJE, v_TJE, columns, dtype):
    """-> (8-bit codes as float32 [T, columns, 128], their scales [T, 2J])."""
    k_codes, k_scales = quantise(k_TJE, dtype)
    v_codes, v_scales = quantise(v_TJE, dtype)
    as_float = lambda codes: codes.astype(jnp.float32)
    rows = token_rows(as_float(k_codes), as_float(v_codes), columns)
    return rows, jnp.concatenate([k_scales, v_scales], axis=1)


def set_windows(J, E, heads):
    """-> (first lane of each set's K, of its V, lanes of a set, offset in them of K, of V)."""
    down = lambda lane: lane // LANES * LANES
    k_starts = range(0, J * E, heads * E)
    v_starts = range(J * E, 2 * J * E, heads * E)
    lanes = max(-(-(s + heads * E - down(s)) // LANES) * LANES for s in (*k_starts, *v_starts))
    k_lanes, v_lanes = (tuple(map(down, starts)) for starts in (k_starts, v_starts))
    return k_lanes, v_lanes, lanes, k_starts[0] - k_lanes[0], v_starts[0] - v_lanes[0]


def spread_queries(q_itHE, J, heads, lanes, offset):
    """-> [i, sets, t * heads * group, lanes]: a query at its own head's lanes, zero elsewhere."""
    i, t, H, E = q_itHE.shape
    q = q_itHE.reshape(i, t, J // heads, heads, H // J, E)
    place = lambda h: (offset + h * E, lanes - offset - (h + 1) * E)
    widen = lambda h: jnp.pad(q[:, :, :, h], ((0, 0), (0, 0), (0, 0), (0, 0), place(h)))
    q = jnp.stack([widen(h) for h in range(heads)], axis=3)
    return q.transpose(0, 2, 1, 3, 4, 5).reshape(i, J // heads, -1, lanes)


def gather_values(out, t, heads, offset, E):
    """[i, sets, t * heads * group, lanes] -> [i, t, H, E]: what each head has at its own lanes."""
    i, sets, _, lanes = out.shape
    out = out.reshape(i, sets, t, heads, -1, lanes)
    own = lambda h: out[:, :, :, h, :, offset + h * E : offset + (h + 1) * E]
    out = jnp.stack([own(h) for h in range(heads)], axis=3)
    return out.transpose(0, 2, 1, 3, 4, 5).reshape(i, t, -1, E)
