"""What crosses the jit line: DeviceState (donated), StepInputs (fresh each step), StepOutputs.

Rows that outlive a step live in DeviceState by slot; what only this step needs comes in StepInputs
by scheduled row. S is the bucket's number of rows: min(N, T), for a row has at least one token.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.ragged_paged_attention.api import RaggedBatch
from jaxserve.types import MAX_LOGIT_BIAS, MAX_STOP_IDS

# End ids of the model join a request's own stop ids under the min_tokens mask.
MAX_MASKED_IDS = MAX_STOP_IDS + 32


@flax.struct.dataclass
class DeviceState:
    """DONATED to every step and replaced by what it returns: never keep a reference to an old one.

    What follows last_token_N is read by sampled steps only. Of history, biases and masks, only rows
    that asked for them are ever filled (see `row_settings`): greedy rows leave them stale on
    purpose. pooled_ND begins anew with a row's first token.
    """

    kv_pages: Any  # as the attention op lays it out, all layers
    last_token_N: (
        jax.Array
    )  # int32: newest token of each slot, so step k+1 may leave before k is read
    history_NM: jax.Array  # int32: the slot's tokens by position, for penalties
    bias_ids_NB: jax.Array  # int32: logit_bias; unused entries hold the vocabulary size
    bias_NB: jax.Array  # float32
    masked_ids_NB: jax.Array  # int32: end and stop ids, masked until min_tokens
    pooled_ND: jax.Array  # float32: sum of the slot's hidden states so far, for mean pooling


@flax.struct.dataclass
class SamplingInputs:
    """How each scheduled row samples. Padding rows hold the values of a plain greedy row."""

    temperature_S: Any  # float32; 0 is greedy
    top_k_S: Any  # int32; 0 is off
    top_p_S: Any  # float32; 1 is off
    min_p_S: Any  # float32; 0 is off
    repetition_S: Any  # float32; 1 is off
    presence_S: Any  # float32
    frequency_S: Any  # float32
    seed_S2: Any  # uint32: the two halves of the choice's 64-bit seed
    num_prompt_S: Any  # int32
    masks_ends_S: Any  # bool: min_tokens not reached yet
    pooling_S: Any  # int32: 0 is off, else 1 + the place in types.POOLINGS
    next_token_T: Any  # int32: the prompt token after each, for prompt log-probabilities
    any_penalty: Any  # bool scalars: what no row asks for is not computed
    any_bias: Any
    any_truncation: Any
    any_logprobs: Any
    any_prompt_logprobs: Any
    any_grammar: Any
    any_pooling: Any


@flax.struct.dataclass
class StepInputs:
    """One step of one bucket: T tokens, S rows. int32 unless said."""

    token_ids_T: Any  # ON_DEVICE (-1) reads last_token_N of the token's slot; padding holds 0
    positions_T: Any
    slot_T: Any  # slot of each token; padding holds 0
    slot_S: Any  # slot of each row; padding rows hold N, which scatters drop
    last_T_S: Any  # index in T of the row's last token; padding holds 0
    new_position_S: Any  # position of the token the row brings
    samples_S: Any  # bool
    batch: RaggedBatch
    sampling: SamplingInputs | None  # None selects the greedy-only program


@flax.struct.dataclass
class StepOutputs:
    """Copied to the host asynchronously. token_S is -1 where the logits were not finite."""

    token_S: jax.Array  # int32
    logprob_S: jax.Array | None = None  # float32
    top_ids_SK: jax.Array | None = None  # int32, K = MAX_LOGPROBS
    top_logprobs_SK: jax.Array | None = None  # float32
    prompt_logprob_T: jax.Array | None = None  # float32: of the token after each, where it is known
    prompt_top_ids_TK: jax.Array | None = None
    prompt_top_logprobs_TK: jax.Array | None = None
    pooled_SD: jax.Array | None = None  # float32: of the row's tokens up to here


@flax.struct.dataclass
class RowSettings:
    """What a newly admitted row brings to the device, when it has penalties, biases or a mask."""

    history_M: Any  # int32, the row's known tokens
    bias_ids_B: Any
    bias_B: Any
    masked_ids_B: Any


def init_state(
    kv_pages, num_slots: int, history_len: int, vocab_size: int, hidden_size: int
) -> DeviceState:
    """An empty state. history_len: positions a row can have (the model length)."""
    unused = lambda width: jnp.full((num_slots, width), vocab_size, jnp.int32)
    return DeviceState(
        kv_pages=kv_pages,
        last_token_N=jnp.zeros((num_slots,), jnp.int32),
        history_NM=jnp.zeros((num_slots, history_len), jnp.int32),
        bias_ids_NB=unused(MAX_LOGIT_BIAS),
        bias_NB=jnp.zeros((num_slots, MAX_LOGIT_BIAS), jnp.float32),
        masked_ids_NB=unused(MAX_MASKED_IDS),
        pooled_ND=jnp.zeros((num_slots, hidden_size), jnp.float32),
    )


def row_settings(tokens, params, end_ids, history_len: int, vocab_size: int) -> RowSettings:
    """RowSettings of one sequence, in numpy. tokens: everything it has so far."""
    history_M = np.zeros(history_len, np.int32)
    history_M[: len(tokens)] = tokens
    bias_ids_B = np.full(MAX_LOGIT_BIAS, vocab_size, np.int32)
    bias_B = np.zeros(MAX_LOGIT_BIAS, np.float32)
    count = len(params.logit_bias)
    bias_ids_B[:count] = list(params.logit_bias)
    bias_B[:count] = list(params.logit_bias.values())
    masked_ids_B = np.full(MAX_MASKED_IDS, vocab_size, np.int32)
    masked = sorted({*end_ids, *params.stop_token_ids})
    masked_ids_B[: len(masked)] = masked
    return RowSettings(history_M, bias_ids_B, bias_B, masked_ids_B)


def set_row(state: DeviceState, slot, row: RowSettings) -> DeviceState:
    """Writes one row's settings. DONATES state. slot: int32 scalar."""
    return state.replace(
        history_NM=state.history_NM.at[slot].set(row.history_M),
        bias_ids_NB=state.bias_ids_NB.at[slot].set(row.bias_ids_B),
        bias_NB=state.bias_NB.at[slot].set(row.bias_B),
        masked_ids_NB=state.masked_ids_NB.at[slot].set(row.masked_ids_B),
    )
