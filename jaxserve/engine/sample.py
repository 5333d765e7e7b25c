"""Choosing one token a row: truncation without a sort, then one uniform draw against the CDF.

Everything is per row and its key comes from (request seed, position): batch mates, chunking,
preemption and the step number cannot change a draw.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.engine.state import SamplingInputs
from jaxserve.pallas_kernels.best_token.api import best_token

_GREEDY_BELOW = 1e-5  # types.SamplingParams.greedy states the same bound
_BLOCK = 256  # ids of the vocabulary whose weights are summed at a time, see _draw


def draws(sampling: SamplingInputs):
    """The rows whose token is drawn; of the others it is the best. bool [S]."""
    return sampling.temperature_S >= _GREEDY_BELOW


def sample(logits_SV, sampling: SamplingInputs, new_position_S, *, backend: str):
    """One token a row, int32 [S]. logits_SV: float32, already transformed. backend: of the search
    for the best."""
    greedy_S = best_token(logits_SV, backend=backend)
    draws_S = draws(sampling) & (greedy_S >= 0)
    drawn_S = jax.lax.cond(
        jnp.any(draws_S),
        lambda: _drawn(logits_SV, sampling, new_position_S),
        lambda: greedy_S,
    )
    return jnp.where(draws_S, drawn_S, greedy_S)


def _drawn(logits_SV, sampling: SamplingInputs, new_position_S):
    """A draw for each row from what temperature and truncation leave, int32 [S]."""
    best_S1 = jnp.max(logits_SV, axis=1, keepdims=True)
    # Subtract the maximum before dividing: a tiny temperature then gives 0 and -inf, never NaN.
    temperature_S1 = jnp.maximum(sampling.temperature_S, _GREEDY_BELOW)[:, None]
    below_SV = (best_S1 - logits_SV) / temperature_S1  # >= 0; 0 is the best token
    below_SV = jax.lax.cond(
        sampling.any_truncation, lambda x: _truncate(x, sampling), lambda x: x, below_SV
    )
    return _draw(jnp.exp(-below_SV), _uniform(sampling.seed_S2, new_position_S))


def _uniform(seed_S2, position_S):
    """float32 in [0, 1) from threefry keyed by seed and position."""

    def one(seed_2, position):
        key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(one)(seed_S2, position_S)


def _draw(weight_SV, uniform_S):
    """First index whose running sum of weights exceeds uniform * total: the inverse of the CDF.

    Two levels, blocks and then inside the chosen block: one pass over V where a cumulative sum
    over all of V would take log V passes.
    """
    weight_SCB = _blocks(weight_SV)
    block_SC = jnp.sum(weight_SCB, axis=2)
    running_SC = jnp.cumsum(block_SC, axis=1)
    target_S1 = uniform_S[:, None] * running_SC[:, -1:]
    chosen_S1 = _first_above(running_SC, block_SC, target_S1)
    before_S1 = jnp.take_along_axis(running_SC - block_SC, chosen_S1, axis=1)
    inside_SB = jnp.take_along_axis(weight_SCB, chosen_S1[:, :, None], axis=1)[:, 0]
    running_SB = jnp.cumsum(inside_SB, axis=1)
    offset_S1 = _first_above(running_SB, inside_SB, target_S1 - before_S1)
    return (chosen_S1 * _BLOCK + offset_S1)[:, 0]


def _blocks(values_SV):
    """[S, V] as [S, C, 256], the last block filled up with zeros."""
    padding = -values_SV.shape[1] % _BLOCK
    padded_SV = jnp.pad(values_SV, ((0, 0), (0, padding)))
    return padded_SV.reshape(values_SV.shape[0], -1, _BLOCK)


def _first_above(running_SC, weight_SC, target_S1):
    """First column with weight whose running sum is above the target, int32 [S, 1].

    Rounding can leave the target at or above the last sum; then it is the last column with weight.
    """
    has_weight_SC = weight_SC > 0
    above_SC = (running_SC > target_S1) & has_weight_SC
    first_S = jnp.argmax(above_SC, axis=1)
    column_1C = jnp.arange(weight_SC.shape[1], dtype=jnp.int32)[None]
    last_S = jnp.max(jnp.where(has_weight_SC, column_1C, 0), axis=1)
    return jnp.where(jnp.any(above_SC, axis=1), first_S.astype(jnp.int32), last_S)[:, None]


def _truncate(below_SV, sampling: SamplingInputs):
    """Puts +inf where top_k, then top_p on what is left, then min_p exclude a token.

    below_SV >= 0, so its bits order like integers: a k-th smallest value is found by deciding its
    31 bits from the top, each by one pass that counts (or weighs) the values below. No sort.
    """
    bits_SV = jax.lax.bitcast_convert_type(below_SV, jnp.int32)
    vocab_size = below_SV.shape[1]
    k_S = jnp.where(sampling.top_k_S == 0, vocab_size, jnp.minimum(sampling.top_k_S, vocab_size))
    kept_SV = _smallest_k(bits_SV, k_S)
    weight_SV = jnp.where(kept_SV, jnp.exp(-below_SV), 0.0)
    enough_S = sampling.top_p_S * jnp.sum(weight_SV, axis=1)
    threshold_S = _descend(lambda t_S1: _total(weight_SV, bits_SV <= t_S1) >= enough_S, below_SV)
    nucleus_SV = (bits_SV <= threshold_S[:, None]) | (sampling.top_p_S >= 1)[:, None]
    likely_SV = below_SV <= -jnp.log(sampling.min_p_S)[:, None]  # -log(0) = inf: all of them
    return jnp.where(kept_SV & nucleus_SV & likely_SV, below_SV, jnp.inf)


def _total(weight_SV, where_SV):
    return jnp.sum(jnp.where(where_SV, weight_SV, 0.0), axis=1)


def _descend(enough, below_SV):
    """Smallest t in [0, 2^31) for which enough(t) holds, int32 [S]; enough is monotone in t."""

    def decide_bit(i, t_S):
        # With this bit 0 and all lower bits 1: if that is enough the bit stays 0.
        bit = jnp.int32(1) << (30 - i)
        return jnp.where(enough((t_S | (bit - 1))[:, None]), t_S, t_S | bit)

    start_S = jnp.zeros((below_SV.shape[0],), jnp.int32)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(31), decide_bit, start_S)


def _smallest_k(bits_SV, k_S):
    """True for exactly k values a row; of equal ones the lower token ids win. bool [S, V]."""
    count = lambda where_SV: jnp.sum(where_SV, axis=1, dtype=jnp.int32)
    kth_S1 = _descend(lambda t_S1: count(bits_SV <= t_S1) >= k_S, bits_SV)[:, None]
    less_SV, tied_SV = bits_SV < kth_S1, bits_SV == kth_S1
    wanted_S = k_S - count(less_SV)

    def first_tied(_):
        id_1V = jnp.arange(bits_SV.shape[1], dtype=jnp.int32)[None]
        last_S = _descend(lambda t_S1: count(tied_SV & (id_1V <= t_S1)) >= wanted_S, bits_SV)
        return less_SV | (tied_SV & (id_1V <= last_S[:, None]))

    all_fit = jnp.all(count(tied_SV) == wanted_S)
    return jax.lax.cond(all_fit, lambda _: less_SV | tied_SV, first_tied, None)


def top_logprobs(logits_SV, token_S, count: int):
    """Log-probability of token_S, and the best `count` ids with theirs [S, count], best first."""
    logprobs_SV = jax.nn.log_softmax(logits_SV, axis=1)
    chosen_S = jnp.take_along_axis(logprobs_SV, jnp.maximum(token_S, 0)[:, None], axis=1)[:, 0]
    top_SK, ids_SK = jax.lax.top_k(logprobs_SV, count)
    return chosen_S, ids_SK.astype(jnp.int32), top_SK
