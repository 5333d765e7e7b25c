"""What crosses the jit line: DeviceState (donated), inputs (fresh each step), outputs.

A step of greedy rows is one program, StepInputs to StepOutputs. One with other rows is two: the
first goes from StepInputs to Scores, the second from these and ChoiceInputs to StepOutputs, so that
the host can work out what grammars allow while the first one runs.

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


# How a row samples, as it travels: a column of int32 for each, floats and seeds by their bits.
SETTINGS = {
    "temperature": np.float32,  # 0 is greedy
    "top_k": np.int32,  # 0 is off
    "top_p": np.float32,  # 1 is off
    "min_p": np.float32,  # 0 is off
    "repetition": np.float32,  # 1 is off
    "presence": np.float32,
    "frequency": np.float32,
    "seed_high": np.uint32,  # the two halves of the choice's 64-bit seed
    "seed_low": np.uint32,
    "num_prompt": np.int32,
    "min_tokens": np.int32,
    "biased": np.int32,  # 1: it has a logit_bias
    "logprobs": np.int32,  # 1: it wants them
}


@flax.struct.dataclass
class SamplingInputs:
    """How each scheduled row samples. Padding rows hold the values of a plain greedy row."""

    temperature_S: Any  # as in SETTINGS
    top_k_S: Any
    top_p_S: Any
    min_p_S: Any
    repetition_S: Any
    presence_S: Any
    frequency_S: Any
    seed_S2: Any
    num_prompt_S: Any
    masks_ends_S: Any  # bool: min_tokens not reached yet
    any_penalty: Any  # bool scalars: what no row asks for is not computed
    any_bias: Any
    any_truncation: Any
    any_logprobs: Any

    @classmethod
    def of(cls, settings_SF, new_position_S) -> SamplingInputs:
        """From what travels; inside a compiled program."""
        column = {
            name: jax.lax.bitcast_convert_type(settings_SF[:, at], dtype)
            for at, (name, dtype) in enumerate(SETTINGS.items())
        }
        penalised_S = (column["repetition"] != 1) | (column["presence"] != 0)
        penalised_S |= column["frequency"] != 0
        truncated_S = (column["top_k"] > 0) | (column["top_p"] < 1) | (column["min_p"] > 0)
        return cls(
            temperature_S=column["temperature"],
            top_k_S=column["top_k"],
            top_p_S=column["top_p"],
            min_p_S=column["min_p"],
            repetition_S=column["repetition"],
            presence_S=column["presence"],
            frequency_S=column["frequency"],
            seed_S2=jnp.stack([column["seed_high"], column["seed_low"]], axis=1),
            num_prompt_S=column["num_prompt"],
            masks_ends_S=new_position_S - column["num_prompt"] < column["min_tokens"],
            any_penalty=jnp.any(penalised_S),
            any_bias=jnp.any(column["biased"] != 0),
            any_truncation=jnp.any(truncated_S),
            any_logprobs=jnp.any(column["logprobs"] != 0),
        )


@flax.struct.dataclass
class ChoiceInputs:
    """The second half of a step that samples: who sits in each of S rows, and how it samples."""

    slot_S: Any  # as in StepInputs
    new_position_S: Any
    samples_S: Any
    settings_SF: Any | None  # int32, F of SETTINGS; None selects the program for SamplingParams
    # that all take the best: it reads no settings and writes no histories


@flax.struct.dataclass
class ReadingInputs:
    """What some rows want to know of their prompts."""

    pooling_S: Any  # int32: 0 is off, else 1 + the place in types.POOLINGS
    next_token_T: Any  # int32: the prompt token after each, for prompt log-probabilities
    any_prompt_logprobs: Any  # bool scalars
    any_pooling: Any


@flax.struct.dataclass
class StepInputs:
    """One step of one bucket: T tokens, S rows. int32 unless said."""

    token_ids_T: Any  # ON_DEVICE reads last_token_N of the token's slot; PADDING is zeros
    positions_T: Any
    slot_T: Any  # slot of each token; padding holds 0
    slot_S: Any  # slot of each row; padding rows hold N, which scatters drop
    last_T_S: Any  # index in T of the row's last token; padding holds 0
    new_position_S: Any  # position of the token the row brings
    samples_S: Any  # bool
    batch: RaggedBatch
    reading: ReadingInputs | None  # None selects the greedy-only program


@flax.struct.dataclass
class Scores:
    """What the first half of a step that samples hands on."""

    logits_SV: jax.Array  # float32: for the second half
    prompt_logprob_T: jax.Array  # float32: of the token after each, where it is known
    prompt_top_ids_TK: jax.Array  # int32, K = MAX_LOGPROBS
    prompt_top_logprobs_TK: jax.Array  # float32
    pooled_SD: jax.Array  # float32: of the row's tokens up to here


@flax.struct.dataclass
class StepOutputs:
    """Copied to the host asynchronously. token_S is -1 where the logits were not finite."""

    token_S: jax.Array  # int32
    logprob_S: jax.Array | None = None  # float32
    top_ids_SK: jax.Array | None = None  # int32, K = MAX_LOGPROBS
    top_logprobs_SK: jax.Array | None = None  # float32


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
