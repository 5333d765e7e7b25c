"""A StepPlan as the arrays of one bucket.

On CPU a device array may alias the numpy array it came from, so an array is never written after it
was handed over. int32 and float32 on purpose: int64 would pass silently and select no compiled
program.
"""

from __future__ import annotations

import functools

import numpy as np

from jaxserve.engine.state import SETTINGS, ChoiceInputs, ReadingInputs, StepInputs
from jaxserve.pallas_kernels.ragged_paged_attention.api import RaggedBatch
from jaxserve.scheduler.plan import PADDING, StepPlan
from jaxserve.types import POOLINGS, Sequence

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd (golden ratio): choices of a request get distinct seeds


class RowParams:
    """Sampling parameters by slot, filled when a sequence is admitted, indexed by row each step.

    The columns of SETTINGS are views of one table, whose last row stays that of a plain greedy
    sequence: padding rows, which hold the slot N, find it there.
    """

    def __init__(self, num_slots: int):
        self.settings_NF = np.zeros((num_slots + 1, len(SETTINGS)), np.int32)
        for at, (name, dtype) in enumerate(SETTINGS.items()):
            setattr(self, name, self.settings_NF[:, at].view(dtype))
        self.top_p[:] = self.repetition[:] = 1
        self.plain = np.ones(num_slots, bool)
        self.takes_best = np.ones(num_slots, bool)
        self.prompt_logprobs = np.zeros(num_slots, bool)
        self.grammar = np.zeros(num_slots, bool)
        self.pooling = np.zeros(num_slots, np.int32)
        self.reads = np.zeros(num_slots, bool)  # it wants to know something of its prompt

    def admit(self, slot: int, sequence: Sequence) -> None:
        params = sequence.request.params
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        seed = (sequence.request.seed + sequence.index * _SEED_STRIDE) % 2**64
        self.seed_high[slot], self.seed_low[slot] = seed >> 32, seed & 0xFFFFFFFF
        self.num_prompt[slot] = sequence.num_prompt
        self.min_tokens[slot] = params.min_tokens
        self.biased[slot] = bool(params.logit_bias)
        self.logprobs[slot] = params.logprobs is not None
        self.plain[slot] = params.plain
        self.takes_best[slot] = params.takes_best
        self.grammar[slot] = params.grammar is not None
        self.pooling[slot] = (None, *POOLINGS).index(params.pooling)
        self.prompt_logprobs[slot] = params.prompt_logprobs is not None and sequence.index == 0
        self.reads[slot] = self.prompt_logprobs[slot] or self.pooling[slot]


def pack(
    plan: StepPlan,
    rows: RowParams,
    bucket_T: int,
    num_slots: int,
    max_pages: int,
    *,
    sampled: bool | None = None,
) -> tuple[StepInputs, ChoiceInputs | None]:
    """The inputs in numpy for the bucket; no ChoiceInputs for the greedy-only program, and no
    settings in them when every row takes the best of what it may.

    sampled: which programs' inputs; None asks the rows: greedy-only when every one is plain.
    """
    num_S, num_T = min(num_slots, bucket_T), plan.num_tokens
    q_len = np.diff(plan.cu_q_len_S1)
    token_ids_T = np.full(bucket_T, PADDING, np.int32)
    token_ids_T[:num_T] = plan.token_ids_T
    token_ids_T[num_T : plan.size] = 0  # idle rows: computed, for nothing
    positions_T = np.zeros(bucket_T, np.int32)
    positions_T[:num_T] = np.arange(num_T, dtype=np.int32) + np.repeat(
        plan.start_S - plan.cu_q_len_S1[:-1], q_len
    )
    slot_T = np.zeros(bucket_T, np.int32)
    slot_T[:num_T] = np.repeat(plan.slot_S, q_len)
    end_S = plan.start_S + q_len
    if sampled is None:
        sampled = not rows.plain[plan.slot_S].all()
    inputs = StepInputs(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        slot_T=slot_T,
        slot_S=_padded(plan.slot_S, num_S, num_slots),
        last_T_S=_padded(plan.cu_q_len_S1[1:] - 1, num_S, 0),
        new_position_S=_padded(end_S, num_S, 0),
        samples_S=_padded(plan.samples_S, num_S, False, bool),
        batch=_batch(plan, end_S, num_S, max_pages),
        reading=_reading(plan, rows, num_S, bucket_T) if sampled else None,
    )
    if not sampled:
        return inputs, None
    takes_best = rows.takes_best[plan.slot_S].all()
    settings_SF = None if takes_best else rows.settings_NF[inputs.slot_S]
    return inputs, ChoiceInputs(inputs.slot_S, inputs.new_position_S, inputs.samples_S, settings_SF)


def empty(bucket_T: int, num_slots: int, max_pages: int, *, sampled: bool) -> StepInputs:
    """Inputs of the bucket's shapes with no rows in them."""
    none = np.zeros(0, np.int32)
    plan = StepPlan(
        step=0,
        sequences=(),
        slot_S=none,
        generation_S=none,
        start_S=none,
        cu_q_len_S1=np.zeros(1, np.int32),
        samples_S=np.zeros(0, bool),
        token_ids_T=none,
        page_table_SP=np.zeros((0, max_pages), np.int32),
        num_decode=0,
    )
    inputs, _ = pack(plan, RowParams(num_slots), bucket_T, num_slots, max_pages, sampled=sampled)
    return inputs


def empty_choice(num_S: int, *, takes_best: bool) -> ChoiceInputs:
    """ChoiceInputs of so many rows, all of them padding."""
    zeros_S = np.zeros(num_S, np.int32)
    settings_SF = None if takes_best else np.zeros((num_S, len(SETTINGS)), np.int32)
    return ChoiceInputs(zeros_S, zeros_S, zeros_S.astype(bool), settings_SF)


def _padded(values, size, fill, dtype=np.int32):
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out


def _batch(plan, end_S, num_S, max_pages) -> RaggedBatch:
    page_table_SP = np.zeros((num_S, max_pages), np.int32)
    page_table_SP[: plan.num_rows, : plan.page_table_SP.shape[1]] = plan.page_table_SP
    return RaggedBatch(
        page_table_SP=page_table_SP,
        kv_len_S=_padded(end_S, num_S, 0),
        cu_q_len_S1=_padded(plan.cu_q_len_S1, num_S + 1, plan.num_tokens),
        num_rows=np.array([plan.num_rows], np.int32),
        num_decode=np.array([plan.num_decode], np.int32),
    )


def _reading(plan, rows, num_S, bucket_T) -> ReadingInputs:
    slots = plan.slot_S
    if not rows.reads[slots].any():
        return _nothing_read(num_S, bucket_T)
    scored_S = rows.prompt_logprobs[slots] & (plan.start_S < rows.num_prompt[slots])
    return ReadingInputs(
        pooling_S=_padded(rows.pooling[slots], num_S, 0),
        next_token_T=_next_tokens(plan, scored_S, bucket_T),
        any_prompt_logprobs=_any(scored_S),
        any_pooling=_any(rows.pooling[slots] > 0),
    )


@functools.cache
def _nothing_read(num_S, bucket_T) -> ReadingInputs:
    """Nobody writes to it: the wire copies."""
    no = np.array(False)
    return ReadingInputs(np.zeros(num_S, np.int32), np.zeros(bucket_T, np.int32), no, no)


def _any(values) -> np.ndarray:
    return np.array(values.any())


def _next_tokens(plan, scored_S, bucket_T):
    """The prompt token after each one, in the rows whose prompt is scored."""
    next_token_T = np.zeros(bucket_T, np.int32)
    for row in np.flatnonzero(scored_S):
        first, last = plan.cu_q_len_S1[row], plan.cu_q_len_S1[row + 1]
        start = int(plan.start_S[row]) + 1
        tokens = plan.sequences[row].request.prompt_ids[start : start + int(last - first)]
        next_token_T[first : first + len(tokens)] = tokens
    return next_token_T
