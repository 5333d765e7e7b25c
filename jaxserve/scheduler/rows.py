"""From chosen rows to the arrays of a StepPlan, and from a step's results to events."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.scheduler.plan import ON_DEVICE, StepPlan
from jaxserve.scheduler.slots import SlotArray
from jaxserve.types import PromptScores, StepResult, TokenEvent


def choose_rows(slots: SlotArray):
    """(decode, prefill): slots with one token left to compute, and those with more, by admission.

    A decoding row without a page for its next token is in neither: it sits this step out. So does
    one that is held.
    """
    pending_N = slots.tokens_N - slots.planned_N
    runs_N = (slots.planned_N < slots.room_N) & (slots.tokens_N < slots.stop_at_N) & ~slots.held_N
    decode = (runs_N & (pending_N == 1)).nonzero()[0]
    prefill = (runs_N & (pending_N > 1)).nonzero()[0]
    if len(prefill) > 1:
        prefill = prefill[slots.order_N[prefill].argsort()]
    return decode, prefill


def assemble(
    slots: SlotArray,
    decode: np.ndarray,
    prefill: np.ndarray,
    chunks: np.ndarray,
    *,
    on_paper: bool = False,
    **decisions,
) -> StepPlan:
    """The plan that computes one token of each decode slot and a chunk of each prefill slot.

    decisions: the plan's other fields.
    Changes the slots: from here on these tokens count as planned, and a sampled one as existing.
    """
    num_decode = len(decode)
    row_S = np.concatenate([decode, prefill]) if len(prefill) else decode
    start_S = slots.planned_N[row_S]
    total_S = slots.tokens_N[row_S]
    cu_q_len_S1 = np.arange(len(row_S) + 1, dtype=np.int32)
    end_S = start_S + 1
    if len(chunks):
        cu_q_len_S1[num_decode + 1 :] = num_decode + chunks.cumsum()
        end_S[num_decode:] += chunks - 1
    samples_S = (end_S == total_S) & (total_S < slots.max_total_N[row_S])
    if on_paper:
        token_ids_T, page_table_SP = np.empty(0, np.int32), np.empty((len(row_S), 0), np.int32)
    else:
        token_ids_T = _token_ids(slots, row_S, num_decode, start_S, end_S, total_S)
        page_table_SP = slots.page_table_NP[row_S, : slots.num_pages_N[row_S].max()]
    slots.planned_N[row_S] = end_S
    slots.tokens_N[row_S] = total_S + samples_S
    slots.turn += 1
    slots.served_N[prefill] = slots.turn
    return StepPlan(
        sequences=tuple(slots.sequence_N[row_S].tolist()),
        slot_S=row_S.astype(np.int32),
        generation_S=slots.generation_N[row_S],
        start_S=start_S,
        cu_q_len_S1=cu_q_len_S1,
        samples_S=samples_S,
        token_ids_T=token_ids_T,
        page_table_SP=page_table_SP,
        num_decode=num_decode,
        **decisions,
    )


def _token_ids(slots: SlotArray, row_S, num_decode: int, start_S, end_S, total_S) -> np.ndarray:
    """token_ids_T of rows that compute tokens [start_S, end_S)."""
    decode = row_S[:num_decode]
    known = slots.last_token_N[decode]
    known[total_S[:num_decode] > slots.known_N[decode]] = ON_DEVICE
    parts = [known]
    spans = zip(row_S[num_decode:], start_S[num_decode:], end_S[num_decode:])
    parts += [
        np.array(slots.sequence_N[row].tokens[start:end], np.int32) for row, start, end in spans
    ]
    return np.concatenate(parts)


def attach_logprobs(event: TokenEvent, result: StepResult, row: int) -> None:
    best = event.sequence.request.params.logprobs
    event.logprob = float(result.logprob_S[row])
    ids = result.top_ids_SK[row, :best].tolist()
    event.top = list(zip(ids, result.top_logprobs_SK[row, :best].tolist()))


def attach_scores(
    plan: StepPlan,
    result: StepResult,
    live_S: np.ndarray,
    sampled: np.ndarray,
    events: list[TokenEvent],
    first_event: int,
) -> None:
    """Passes on prompt log-probabilities, each position once, with the row's token if it has one.

    sampled: rows whose events stand in `events` from first_event on.
    """
    event_of_row = dict(zip(sampled.tolist(), events[first_event:]))
    for row, scores in result.prompt_scores.items():
        sequence = plan.sequences[row]
        fresh = _scores_from(scores, max(sequence.num_scored, 1))
        if not live_S[row] or fresh is None:
            continue
        sequence.num_scored = fresh.start + len(fresh.logprob)
        event = event_of_row.get(row)
        if event is None:
            event = TokenEvent(sequence, None)
            events.append(event)
        event.prompt_scores = fresh


def _scores_from(scores: PromptScores, first: int) -> PromptScores | None:
    """The part of the scores at positions >= first, None when there is none."""
    skip = max(0, first - scores.start)
    if skip >= len(scores.logprob):
        return None
    return dataclasses.replace(
        scores,
        start=scores.start + skip,
        logprob=scores.logprob[skip:],
        top_ids=scores.top_ids[skip:],
        top_logprobs=scores.top_logprobs[skip:],
    )
