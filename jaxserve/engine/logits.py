"""What a request may do to its logits before sampling: bias, penalties, the min_tokens mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.engine.state import DeviceState, SamplingInputs


def mask_padded_vocabulary(logits_SV, num_tokens: int):
    """Rows of the output head past the tokenizer's ids exist for alignment: never choose them."""
    if num_tokens >= logits_SV.shape[1]:
        return logits_SV
    known_1V = jnp.arange(logits_SV.shape[1], dtype=jnp.int32)[None] < num_tokens
    return jnp.where(known_1V, logits_SV, -jnp.inf)


def any_transform(sampling: SamplingInputs):
    """Whether transform would change anything."""
    return sampling.any_bias | sampling.any_penalty | jnp.any(sampling.masks_ends_S)


def transform(logits_SV, state: DeviceState, sampling: SamplingInputs, slot_S, new_position_S):
    """Applies, in this order: logit_bias, penalties, the mask on end tokens. float32 [S, V]."""
    logits_SV = jax.lax.cond(
        sampling.any_penalty,
        lambda x: _penalise(x, state.history_NM[slot_S], sampling, new_position_S),
        lambda x: x,
        jax.lax.cond(
            sampling.any_bias, lambda x: _add_bias(x, state, slot_S), lambda x: x, logits_SV
        ),
    )
    return jax.lax.cond(
        jnp.any(sampling.masks_ends_S),
        lambda x: _mask_ends(x, state, sampling, slot_S),
        lambda x: x,
        logits_SV,
    )


def _add_bias(logits_SV, state, slot_S):
    row_S1 = jnp.arange(logits_SV.shape[0], dtype=jnp.int32)[:, None]
    return logits_SV.at[row_S1, state.bias_ids_NB[slot_S]].add(state.bias_NB[slot_S], mode="drop")


def _mask_ends(logits_SV, state, sampling, slot_S):
    row_S1 = jnp.arange(logits_SV.shape[0], dtype=jnp.int32)[:, None]
    floor_S1 = jnp.where(sampling.masks_ends_S, -jnp.inf, jnp.inf)[:, None]
    ids_SB = state.masked_ids_NB[slot_S]
    return logits_SV.at[row_S1, ids_SB].min(jnp.broadcast_to(floor_S1, ids_SB.shape), mode="drop")


def _penalise(logits_SV, history_SM, sampling, new_position_S):
    """Repetition penalty (CTRL, arXiv 1909.05858) over prompt and output; presence and frequency
    penalties (OpenAI) over output only. Rows without penalties have factors 1, 0, 0: unchanged."""
    num_rows, vocab_size = logits_SV.shape
    row_S1 = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    position_1M = jnp.arange(history_SM.shape[1], dtype=jnp.int32)[None]
    known_SM = position_1M < new_position_S[:, None]
    output_SM = known_SM & (position_1M >= sampling.num_prompt_S[:, None])
    ids_SM = jnp.where(known_SM, history_SM, vocab_size)
    zero_SV = jnp.zeros((num_rows, vocab_size), jnp.float32)
    seen_SV = zero_SV.at[row_S1, ids_SM].max(1.0, mode="drop") > 0
    count_SV = zero_SV.at[row_S1, ids_SM].add(output_SM.astype(jnp.float32), mode="drop")

    factor_S1 = sampling.repetition_S[:, None]
    repeated_SV = jnp.where(logits_SV > 0, logits_SV / factor_S1, logits_SV * factor_S1)
    logits_SV = jnp.where(seen_SV, repeated_SV, logits_SV)
    logits_SV -= sampling.frequency_S[:, None] * count_SV
    return logits_SV - jnp.where(count_SV > 0, sampling.presence_S[:, None], 0.0)
