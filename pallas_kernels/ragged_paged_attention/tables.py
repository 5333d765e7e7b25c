"""The scalar tables that tell a kernel which tokens make a tile and which slots to write.

Computed in XLA from a RaggedBatch. All layers ask for the same values, so the compiler keeps one
copy. Names: i tiles, t tokens of a tile, n groups of slots written together.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One kernel call's work, in order."""

    tokens: int  # of a tile
    row_i: jax.Array
    first_i: jax.Array  # position of the tile's first token
    end_i: jax.Array  # one past that of its last
    group_5n: jax.Array  # page, first slot, token at that slot, first new slot, one past the last
    counts: jax.Array  # [2] tiles, groups


def decode_tiles(batch, rows: int, group: int, page_size: int) -> Tiles:
    """One tile and one group for each of the first num_decode rows."""
    row_i = jnp.arange(rows, dtype=jnp.int32)
    last_i = jnp.maximum(batch.kv_len_S[:rows] - 1, 0)
    group_5n = _write_table(batch, row_i, last_i // group, group, page_size)
    return Tiles(1, row_i, last_i, last_i + 1, group_5n, jnp.tile(batch.num_decode, 2))


def mixed_tiles(batch, T: int, tile_tokens: int, group: int, page_size: int):
    """The other rows -> (Tiles, their tokens [i, t], tile of each token, its place in the tile)."""
    S = batch.kv_len_S.shape[0]
    row_S = jnp.arange(S, dtype=jnp.int32)
    is_mixed_S = (row_S >= batch.num_decode) & (row_S < batch.num_rows)
    start_S = batch.cu_q_len_S1[:-1]
    q_len_S = jnp.where(is_mixed_S, batch.cu_q_len_S1[1:] - start_S, 0)
    new_S = batch.kv_len_S - q_len_S  # position of the row's first token in this step

    tiles_S = (q_len_S + (tile_tokens - 1)) // tile_tokens
    row_i, within_i, num_tiles = _flatten(tiles_S, T // tile_tokens + min(S, T))
    first_i = new_S[row_i] + within_i * tile_tokens
    end_i = jnp.minimum(first_i + tile_tokens, batch.kv_len_S[row_i])
    token_i = start_S[row_i] + within_i * tile_tokens
    tokens_it = token_i[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)[None]

    begin_S = new_S // group
    groups_S = jnp.where(q_len_S > 0, (batch.kv_len_S + (group - 1)) // group - begin_S, 0)
    row_n, within_n, num_groups = _flatten(groups_S, T // group + 2 * min(S, T))
    group_5n = _write_table(batch, row_n, begin_S[row_n] + within_n, group, page_size)

    token_T = jnp.arange(T, dtype=jnp.int32)
    row_T = jnp.sum(batch.cu_q_len_S1[None, 1:] <= token_T[:, None], axis=1, dtype=jnp.int32)
    row_T = jnp.minimum(row_T, S - 1)
    in_row_T = token_T - start_S[row_T]
    before_S = jnp.cumsum(tiles_S, dtype=jnp.int32) - tiles_S
    tile_T = jnp.clip(before_S[row_T] + in_row_T // tile_tokens, 0, row_i.shape[0] - 1)

    counts = jnp.stack([num_tiles, num_groups])
    tiles = Tiles(tile_tokens, row_i, first_i, end_i, group_5n, counts)
    return tiles, jnp.minimum(tokens_it, T - 1), tile_T, in_row_T % tile_tokens


def _flatten(count_S, room: int):
    """Rows with count_S items each -> (row of each item, its index in the row, number of items)."""
    end_S = jnp.cumsum(count_S, dtype=jnp.int32)
    item = jnp.arange(room, dtype=jnp.int32)
    row = jnp.sum(end_S[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, count_S.shape[0] - 1)
    return row, item - (end_S[row] - count_S[row]), end_S[-1]


def _write_table(batch, row_n, index_n, group: int, page_size: int):
    """-> int32 [5, n] for groups of slots: the index_n-th group of row row_n."""
    end_n = batch.kv_len_S[row_n]
    token_end_n = batch.cu_q_len_S1[row_n + 1]
    first_n = index_n * group  # position of the group's first slot
    new_n = end_n - (token_end_n - batch.cu_q_len_S1[row_n])
    page_n = jnp.clip(first_n // page_size, 0, batch.page_table_SP.shape[1] - 1)
    return jnp.stack(
        [
            batch.page_table_SP[row_n, page_n],
            first_n % page_size,
            token_end_n - end_n + first_n + group,  # the tokens have `group` spare ones before them
            jnp.clip(new_n - first_n, 0, group),
            jnp.clip(end_n - first_n, 0, group),
        ]
    )
