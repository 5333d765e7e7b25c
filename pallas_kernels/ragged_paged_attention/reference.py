"""Ragged paged attention in plain jnp: the oracle of the kernels, and the CPU fallback.

Queries are cut into tiles of a few tokens of one row. A tile walks its row's KV in blocks aligned
to position 0, keeping a running maximum, sum and weighted value (online softmax: Milakov and
Gimelshein, arXiv:1805.02867). Loops run as often as the batch needs, so cost follows the lengths in
it. A block that a token does not see leaves that token's state as it was, to the last bit, and the
shapes of tiles and blocks follow from static shapes alone: so a token's result is its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .kv import KVPages, quantise

NEGATIVE = -1e30  # below any score, and finite: exp(NEGATIVE - NEGATIVE) is 1, not NaN
BLOCK_TOKENS = 32  # KV tokens a loop iteration reads; more compiles slower and gains little
TILE_QUERIES = 24  # about how many query vectors per KV head share one read of KV ...
FEW_TOKENS = 64  # ... in steps with more tokens than this; below, a tile is one token


def ragged_paged_attention(
    q_THE, k_TJE, v_TJE, kv_pages, batch, *, layer, scale, window=None, soft_cap=None, sinks=None
):
    """See api.ragged_paged_attention. kv_pages.data: [L, G, J, 2, K, E]."""
    kv_pages = write(k_TJE, v_TJE, kv_pages, batch, layer)
    out_THE = attend(q_THE, kv_pages, batch, layer, scale, window, soft_cap, sinks)
    return out_THE, kv_pages


def token_places(batch, num_tokens, page_size):
    """-> (page_T, slot_T) of each packed token; padding tokens get page -1."""
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.sum(batch.cu_q_len_S1[None, 1:] <= token_T[:, None], axis=1, dtype=jnp.int32)
    row_T = jnp.minimum(row_T, batch.kv_len_S.shape[0] - 1)
    # A row's last token is at position kv_len - 1.
    position_T = batch.kv_len_S[row_T] - batch.cu_q_len_S1[row_T + 1] + token_T
    page_T = batch.page_table_SP[row_T, position_T // page_size]
    real_T = token_T < batch.cu_q_len_S1[batch.num_rows[0]]
    return jnp.where(real_T, page_T, -1), position_T % page_size


def write(k_TJE, v_TJE, kv_pages, batch, layer):
    """-> kv_pages with the step's K and V in their slots; padding is written nowhere."""
    data = kv_pages.data
    num_pages, page_size = data.shape[1], data.shape[4]
    page_T, slot_T = token_places(batch, k_TJE.shape[0], page_size)
    page_T = jnp.where(page_T < 0, num_pages, page_T)  # out of range: dropped
    kv_TJ2E = jnp.stack([k_TJE, v_TJE], axis=2)
    put = lambda array, new: array.at[layer, page_T, :, :, slot_T].set(new, mode="drop")
    if kv_pages.scale is None:
        return KVPages(put(data, kv_TJ2E.astype(data.dtype)))
    codes, scales = quantise(kv_TJ2E, data.dtype)
    return KVPages(put(data, codes), put(kv_pages.scale, scales))


def tile_table(batch, num_tokens, tile_tokens):
    """-> (row_i, first_token_i, number of tiles): a tile's row and first token, in token order."""
    num_rows = batch.kv_len_S.shape[0]
    q_len_S = batch.cu_q_len_S1[1:] - batch.cu_q_len_S1[:-1]
    tiles_S = (q_len_S + (tile_tokens - 1)) // tile_tokens
    end_S = jnp.cumsum(tiles_S, dtype=jnp.int32)
    tile_i = jnp.arange(num_rows + num_tokens // tile_tokens, dtype=jnp.int32)
    row_i = jnp.sum(end_S[None, :] <= tile_i[:, None], axis=1, dtype=jnp.int32)
    row_i = jnp.minimum(row_i, num_rows - 1)
    within_i = tile_i - (end_S[row_i] - tiles_S[row_i])
    return row_i, batch.cu_q_len_S1[row_i] + within_i * tile_tokens, end_S[-1]


def attend(q_THE, kv_pages, batch, layer, scale, window, soft_cap, sinks):
    """-> out_THE; reads the pages only.

    The next layer's K comes after this layer's output, so XLA writes it into the cache in place; a
    caller whose writes do not depend on the reads before them pays a copy of the cache.
    """
    T, H, E = q_THE.shape
    _, _, J, _, page_size, _ = kv_pages.data.shape
    group = H // J
    tile = max(1, TILE_QUERIES // group) if T > FEW_TOKENS else 1  # tokens a tile
    pages_block = max(1, BLOCK_TOKENS // page_size)
    block = pages_block * page_size  # KV tokens a block

    # A tile at the end, and a block at the end of the table, may hang over: give them room.
    q_TJHE = jnp.pad(q_THE.astype(jnp.float32) * scale, ((0, tile), (0, 0), (0, 0)))
    q_TJHE = q_TJHE.reshape(T + tile, J, group, E)
    spare = -batch.page_table_SP.shape[1] % pages_block
    page_table_SP = jnp.pad(batch.page_table_SP, ((0, 0), (0, spare)))
    row_i, first_i, num_tiles = tile_table(batch, T, tile)
    # A sink is a score that every token sees and that carries no value: it comes before all others.
    first_H = jnp.full(H, NEGATIVE, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    max_Jq = jnp.broadcast_to(first_H.reshape(J, 1, group), (J, tile, group)).reshape(J, -1)
    start = (
        max_Jq,
        jnp.full(max_Jq.shape, 0.0 if sinks is None else 1.0, jnp.float32),
        jnp.zeros((*max_Jq.shape, E), jnp.float32),
    )

    def attend_tile(i, out_TJHE):
        row, first = row_i[i], first_i[i]
        end = batch.cu_q_len_S1[row + 1]
        kv_len = batch.kv_len_S[row]
        low = kv_len - end + first  # position of the tile's first token
        high = jnp.minimum(low + tile, kv_len)  # one past that of its last
        position_t = low + jnp.arange(tile, dtype=jnp.int32)
        position_q = jnp.repeat(position_t, group)
        q_JqE = jax.lax.dynamic_slice_in_dim(q_TJHE, first, tile)
        q_JqE = q_JqE.transpose(1, 0, 2, 3).reshape(J, tile * group, E)
        lowest = jnp.int32(0) if window is None else jnp.maximum(low - (window - 1), 0)

        def attend_block(b, state):
            max_Jq, sum_Jq, value_JqE = state
            pages_p = jax.lax.dynamic_slice(
                page_table_SP, (row, b * pages_block), (1, pages_block)
            )[0]
            kv_J2kE = read(kv_pages, layer, pages_p)
            position_k = b * block + jnp.arange(block, dtype=jnp.int32)
            # Slots that hold no token of this row may hold anything, and 0 * NaN is NaN.
            real_k = (position_k >= lowest) & (position_k < high)
            v_JkE = jnp.where(real_k[None, :, None], kv_J2kE[:, 1], 0)
            s_Jqk = jnp.einsum(
                "jqe,jke->jqk", q_JqE, kv_J2kE[:, 0], precision=jax.lax.Precision.HIGHEST
            )
            if soft_cap is not None:
                s_Jqk = soft_cap * jnp.tanh(s_Jqk / soft_cap)
            seen_qk = real_k[None, :] & (position_k[None, :] <= position_q[:, None])
            if window is not None:
                seen_qk &= position_k[None, :] > position_q[:, None] - window
            s_Jqk = jnp.where(seen_qk[None], s_Jqk, NEGATIVE)
            new_max_Jq = jnp.maximum(max_Jq, jnp.max(s_Jqk, axis=-1))
            keep_Jq = jnp.exp(max_Jq - new_max_Jq)
            p_Jqk = jnp.where(seen_qk[None], jnp.exp(s_Jqk - new_max_Jq[..., None]), 0)
            value_JqE = keep_Jq[..., None] * value_JqE + jnp.einsum(
                "jqk,jke->jqe", p_Jqk, v_JkE, precision=jax.lax.Precision.HIGHEST
            )
            return new_max_Jq, keep_Jq * sum_Jq + jnp.sum(p_Jqk, axis=-1), value_JqE

        past = (high + (block - 1)) // block
        _, sum_Jq, value_JqE = jax.lax.fori_loop(lowest // block, past, attend_block, start)
        o_JqE = value_JqE / jnp.where(sum_Jq > 0, sum_Jq, 1)[..., None]
        o_tJHE = o_JqE.reshape(J, tile, group, E).transpose(1, 0, 2, 3)
        # Tokens past the row's end get zeros: padding keeps them, the next tile writes its own.
        o_tJHE = jnp.where((position_t < kv_len)[:, None, None, None], o_tJHE, 0)
        return jax.lax.dynamic_update_slice_in_dim(out_TJHE, o_tJHE.astype(q_THE.dtype), first, 0)

    out_TJHE = jnp.zeros(q_TJHE.shape, q_THE.dtype)
    out_TJHE = jax.lax.fori_loop(0, num_tiles, attend_tile, out_TJHE)
    return out_TJHE[:T].reshape(T, H, E)


def read(kv_pages, layer, pages_p):
    """-> float32 [J, 2, block, E]: the K and V of some pages, one after another.

    One slice a page: XLA's CPU gather works element by element, at a tenth of the speed.
    """
    cut = lambda array, page: jax.lax.dynamic_slice(
        array, (layer, page) + (0,) * (array.ndim - 2), (1, 1, *array.shape[2:])
    )[0, 0]

    def one(page):
        kv_J2KE = cut(kv_pages.data, page).astype(jnp.float32)
        if kv_pages.scale is not None:
            kv_J2KE = kv_J2KE * cut(kv_pages.scale, page)[..., None]
        return kv_J2KE

    return jnp.concatenate([one(page) for page in pages_p], axis=2)
