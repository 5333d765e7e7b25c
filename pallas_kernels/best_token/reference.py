"""best_token in plain jnp: the best block of ids by its maximum, then the best id inside.

XLA's argmax on a CPU is scalar code, its max is not. A NaN is its block's maximum and wins both
rounds.
"""

import jax
import jax.numpy as jnp

_BLOCK = 256


def best_token(logits_SV, allowed_SW=None):
    """See api.best_token."""
    if allowed_SW is not None:
        logits_SV = masked(logits_SV, allowed_SW)
    padding = -logits_SV.shape[1] % _BLOCK
    padded_SV = jnp.pad(logits_SV, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    logits_SCB = padded_SV.reshape(logits_SV.shape[0], -1, _BLOCK)
    block_S11 = jnp.argmax(jnp.max(logits_SCB, axis=2), axis=1).astype(jnp.int32)[:, None, None]
    inside_SB = jnp.take_along_axis(logits_SCB, block_S11, axis=1)[:, 0]
    offset_S1 = jnp.argmax(inside_SB, axis=1).astype(jnp.int32)[:, None]
    best_S = jnp.take_along_axis(inside_SB, offset_S1, axis=1)[:, 0]
    token_S = block_S11[:, 0, 0] * _BLOCK + offset_S1[:, 0]
    return jnp.where(jnp.isfinite(best_S), token_S, -1)


def masked(logits_SV, allowed_SW):
    """-inf for tokens that are not allowed, float32 [S, V]; see api.best_token."""
    num_rows, vocab_size = logits_SV.shape
    bit_32 = jnp.arange(32, dtype=jnp.int32)[None, None]
    bits_SWB = jax.lax.shift_right_logical(
        *jnp.broadcast_arrays(allowed_SW[:, :, None], bit_32)
    ) & jnp.int32(1)
    allowed_SV = bits_SWB.reshape(num_rows, -1)[:, :vocab_size] != 0
    return jnp.where(allowed_SV, logits_SV, -jnp.inf)
