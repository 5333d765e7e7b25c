"""What a step computes. Pure functions; jitted and compiled ahead by runner.py.

tokens (from the host, or last_token_N) -> family.forward -> rows that sample -> logits transforms
-> sample -> last_token_N. greedy_step is all of it for rows that want the best token and nothing
else; for others score_step goes as far as the logits and choose_step on from there, or best_step
where all take the best that their grammars allow. Rows and tokens past the batch's own are padding:
zeros, which native matmuls pass over, or finite rubbish; nothing reads it, and it writes nowhere a
real row can see.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType

import jax
import jax.numpy as jnp

from jaxserve.engine import logits as logit_transforms
from jaxserve.engine import sample as sampling_op
from jaxserve.engine.state import (
    ChoiceInputs,
    DeviceState,
    SamplingInputs,
    Scores,
    StepInputs,
    StepOutputs,
)
from jaxserve.pallas_kernels.best_token.api import best_token, masked
from jaxserve.pallas_kernels.ragged_paged_attention import api as attention
from jaxserve.scheduler.plan import ON_DEVICE, PADDING
from jaxserve.types import MAX_LOGPROBS, POOLINGS

_SCORE_BLOCK = 16  # prompt tokens scored at a time: bounds the [block, V] logits in memory


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What is fixed when a step is compiled, whatever its bucket."""

    family: ModuleType
    model_config: object
    attention_backend: str
    num_tokens: int  # ids the tokenizer knows; the head's other rows are padding

    @property
    def best_token_backend(self) -> str:
        """Native code wherever the model's matmuls are."""
        return self.model_config.backend.linear


def greedy_step(params, state: DeviceState, inputs: StepInputs, spec: StepSpec):
    """One step over inputs' T tokens. DONATES state.

    Returns:
      (DeviceState, StepOutputs): pages hold the new K and V, last_token_N the new tokens of rows
      that sample.
    """
    state, hidden_TD = _forward(params, state, inputs, spec)
    logits_SV = _logits(params, hidden_TD, inputs, spec)
    token_S = best_token(logits_SV, backend=spec.best_token_backend)
    return _remember(state, inputs, token_S), StepOutputs(token_S)


def score_step(params, state: DeviceState, inputs: StepInputs, spec: StepSpec):
    """The first half of a step over inputs' T tokens. DONATES state.

    Returns:
      (DeviceState, Scores): pages hold the new K and V; the logits are for choose_step.
    """
    state, hidden_TD = _forward(params, state, inputs, spec)
    logits_SV = _logits(params, hidden_TD, inputs, spec)
    pooled_ND, pooled_SD = jax.lax.cond(
        inputs.reading.any_pooling,
        lambda sums_ND: _pool(sums_ND, inputs, hidden_TD),
        lambda sums_ND: (sums_ND, jnp.zeros((logits_SV.shape[0], sums_ND.shape[1]))),
        state.pooled_ND,
    )
    scores = jax.lax.cond(
        inputs.reading.any_prompt_logprobs,
        lambda: _score_prompt(params, spec, hidden_TD, inputs),
        lambda: _no_scores(hidden_TD.shape[0]),
    )
    return state.replace(pooled_ND=pooled_ND), Scores(logits_SV, *scores, pooled_SD)


def choose_step(state: DeviceState, logits_SV, inputs: ChoiceInputs, allowed_SW, spec: StepSpec):
    """The second half of a step. DONATES state.

    allowed_SW: int32 bits of the tokens that each row's grammar allows.

    Returns:
      (DeviceState, StepOutputs): last_token_N and the histories hold the new tokens of rows that
      sample.
    """
    sampling = SamplingInputs.of(inputs.settings_SF, inputs.new_position_S)
    token_S = jax.lax.cond(
        logit_transforms.any_transform(sampling) | jnp.any(sampling_op.draws(sampling)),
        lambda: _shape_and_sample(state, logits_SV, sampling, inputs, allowed_SW, spec),
        lambda: best_token(logits_SV, allowed_SW, backend=spec.best_token_backend),
    )
    # Reported log-probabilities are the model's own, before penalties and temperature.
    logprobs = jax.lax.cond(
        sampling.any_logprobs,
        lambda: sampling_op.top_logprobs(logits_SV, token_S, MAX_LOGPROBS),
        lambda: _no_scores(token_S.shape[0]),
    )
    state = state.replace(history_NM=_append(state.history_NM, inputs, token_S))
    return _remember(state, inputs, token_S), StepOutputs(token_S, *logprobs)


def best_step(state: DeviceState, logits_SV, inputs: ChoiceInputs, allowed_SW, spec: StepSpec):
    """What choose_step gives when every row takes the best of what it may. DONATES state.

    Its few operations are what rows with grammars cost those without: of a step of 16 rows of a
    small model choose_step took a fiftieth.

    Returns:
      (DeviceState, StepOutputs): last_token_N holds the new tokens of rows that sample.
    """
    token_S = best_token(logits_SV, allowed_SW, backend=spec.best_token_backend)
    return _remember(state, inputs, token_S), StepOutputs(token_S)


def _shape_and_sample(state, logits_SV, sampling, inputs, allowed_SW, spec):
    """One token a row, int32 [S], when some row changes its logits or draws from them."""
    # In both branches: one that only passed the logits on would copy them.
    allowed = lambda: masked(logits_SV, allowed_SW)
    shaped_SV = jax.lax.cond(
        logit_transforms.any_transform(sampling),
        lambda: logit_transforms.transform(
            allowed(), state, sampling, inputs.slot_S, inputs.new_position_S
        ),
        allowed,
    )
    backend = spec.best_token_backend
    return sampling_op.sample(shaped_SV, sampling, inputs.new_position_S, backend=backend)


def _forward(params, state, inputs, spec):
    """(state with the new K and V, hidden states [T, D])."""
    on_device_T = inputs.token_ids_T == ON_DEVICE
    token_ids_T = jnp.where(on_device_T, state.last_token_N[inputs.slot_T], inputs.token_ids_T)

    def attend(q_THE, k_TJE, v_TJE, kv_pages, **options):
        backend = spec.attention_backend
        return attention.ragged_paged_attention(
            q_THE, k_TJE, v_TJE, kv_pages, inputs.batch, backend=backend, **options
        )

    hidden_TD, kv_pages = spec.family.forward(
        params, spec.model_config, token_ids_T, inputs.positions_T, state.kv_pages, attend
    )
    return state.replace(kv_pages=kv_pages), hidden_TD


def _logits(params, hidden_TD, inputs, spec):
    """float32 [S, V] at the last token of each row that samples. Of others the input is zero, which
    costs native matmuls nothing behind those that sample; but a static batch's idle rows cost what
    they always do."""
    num_idle = (inputs.token_ids_T != PADDING).sum() - inputs.batch.cu_q_len_S1[-1]
    row_S = jnp.arange(inputs.samples_S.shape[0], dtype=jnp.int32) - inputs.batch.num_rows
    computed_S = inputs.samples_S | ((row_S >= 0) & (row_S < num_idle))
    zero = jnp.zeros((), hidden_TD.dtype)
    hidden_SD = jnp.where(computed_S[:, None], hidden_TD[inputs.last_T_S], zero)
    logits_SV = spec.family.logits(params, spec.model_config, hidden_SD)
    return logit_transforms.mask_padded_vocabulary(logits_SV, spec.num_tokens)


def _remember(state, inputs, token_S):
    """The new tokens of rows that sample become their slots' newest."""
    newest_S = jnp.where(inputs.samples_S, token_S, state.last_token_N[inputs.slot_S])
    last_token_N = state.last_token_N.at[inputs.slot_S].set(newest_S, mode="drop")
    return state.replace(last_token_N=last_token_N)


def _append(history_NM, inputs, token_S):
    """The new token joins its row's history; a row that does not sample writes out of range."""
    position_S = jnp.where(inputs.samples_S, inputs.new_position_S, history_NM.shape[1])
    return history_NM.at[inputs.slot_S, position_S].set(token_S, mode="drop")


def _pool(sums_ND, inputs, hidden_TD):
    """(sums_ND with this step's hidden states added, the rows' means or last states [S, D]).

    A row's states are added one by one in the order of its tokens wherever the backend's scatter
    keeps it, so a prompt's chunks do not show in its mean; on CPU to the last bit.
    """
    kind_S, num_slots = inputs.reading.pooling_S, sums_ND.shape[0]
    averaged_S = kind_S == 1 + POOLINGS.index("mean")
    cu_q_len_S1, end_S = inputs.batch.cu_q_len_S1, inputs.new_position_S
    begins_S = averaged_S & (end_S == cu_q_len_S1[1:] - cu_q_len_S1[:-1])
    sums_ND = sums_ND.at[jnp.where(begins_S, inputs.slot_S, num_slots)].set(0.0, mode="drop")
    averaged_N = jnp.zeros((num_slots,), bool).at[inputs.slot_S].set(averaged_S, mode="drop")
    real_T = jnp.arange(hidden_TD.shape[0], dtype=jnp.int32) < cu_q_len_S1[-1]
    into_T = jnp.where(real_T & averaged_N[inputs.slot_T], inputs.slot_T, num_slots)
    hidden_TD = hidden_TD.astype(jnp.float32)
    sums_ND = sums_ND.at[into_T].add(hidden_TD, mode="drop")
    mean_SD = sums_ND[inputs.slot_S] / jnp.maximum(end_S, 1)[:, None].astype(jnp.float32)
    return sums_ND, jnp.where(averaged_S[:, None], mean_SD, hidden_TD[inputs.last_T_S])


def _no_scores(rows: int):
    return (
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.int32),
        jnp.zeros((rows, MAX_LOGPROBS), jnp.float32),
    )


def _score_prompt(params, spec, hidden_TD, inputs):
    """Log-probability of the known token after each position, a block of positions at a time."""
    block = min(_SCORE_BLOCK, hidden_TD.shape[0])

    def score(chunk):
        hidden_BD, next_B = chunk
        logits_BV = spec.family.logits(params, spec.model_config, hidden_BD)
        logits_BV = logit_transforms.mask_padded_vocabulary(logits_BV, spec.num_tokens)
        return sampling_op.top_logprobs(logits_BV, next_B, MAX_LOGPROBS)

    chunks = (
        hidden_TD.reshape(-1, block, hidden_TD.shape[1]),
        inputs.reading.next_token_T.reshape(-1, block),
    )
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(score, chunks))
