"""FakeRunner: a device step without a device, for tests of everything around it.

It keeps what a real one keeps: a KV pool of pages, and the last token of each slot. Its "KV" of a
token is the token itself, and the token that a row samples is a checksum of everything the row can
see through its page table. So one page handed to two rows, a stale page table, a position off by
one, a prefix page published too early or a token of another slot all change some output, and
`expected_output` says what it should have been.
"""

from __future__ import annotations

import zlib

import numpy as np

from jaxserve.scheduler.plan import ON_DEVICE, StepPlan
from jaxserve.types import Request, StepResult

NEVER_WRITTEN = -7


def next_token(
    history: np.ndarray, request: Request, index: int, vocab_size: int, eos_ids=frozenset()
) -> int:
    """The token after `history` (int32, prompt and output so far) in choice `index`."""
    params = request.params
    token = zlib.crc32(history.tobytes(), (request.seed + index) & 0xFFFFFFFF) % vocab_size
    if len(history) - len(request.prompt_ids) < params.min_tokens:
        while token in eos_ids or token in params.stop_token_ids:
            token = (token + 1) % vocab_size
    return token


def expected_output(
    request: Request, index: int, max_total: int, vocab_size: int, eos_ids=frozenset()
) -> list[int]:
    """Output tokens of one choice served alone, worked out without pages or slots."""
    params, tokens = request.params, list(request.prompt_ids)
    while len(tokens) < max_total:
        history = np.array(tokens, np.int32)
        token = next_token(history, request, index, vocab_size, eos_ids)
        tokens.append(token)
        ends = (token in eos_ids and not params.ignore_eos) or token in params.stop_token_ids
        if ends and len(tokens) - len(request.prompt_ids) > params.min_tokens:
            break
    return tokens[len(request.prompt_ids) :]


class FakeRunner:
    """dispatch(plan) -> pending, fetch(pending) -> StepResult; steps run in order of dispatch."""

    def __init__(self, num_slots: int, num_pages: int, page_size: int, vocab_size: int, eos_ids=()):
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._kv_GK = np.empty((num_pages, page_size), np.int32)
        self._last_token_N = np.empty(num_slots, np.int32)
        self.reset()

    def reset(self) -> None:
        """An empty device: nothing is known of what was written before, nor of what a failed step
        was to copy to the host."""
        self._host: dict[int, np.ndarray] = {}  # host page -> what was copied there
        self._kv_GK[:] = NEVER_WRITTEN
        self._last_token_N[:] = NEVER_WRITTEN

    def dispatch(self, plan: StepPlan) -> StepResult:
        for page, host_page in plan.swap_out:
            self._host[host_page] = self._kv_GK[page].copy()
        for host_page, page in plan.swap_in:
            self._kv_GK[page] = self._host[host_page]
        token_S = np.full(plan.num_rows, NEVER_WRITTEN, np.int32)
        ends = plan.cu_q_len_S1
        for row, sequence in enumerate(plan.sequences):
            tokens = plan.token_ids_T[ends[row] : ends[row + 1]]
            history = self._write(plan, row, tokens)
            if plan.samples_S[row]:
                token_S[row] = next_token(
                    history, sequence.request, sequence.index, self._vocab_size, self._eos_ids
                )
        sampled = plan.slot_S[plan.samples_S]
        self._last_token_N[sampled] = token_S[plan.samples_S]
        return StepResult(token_S=token_S)

    def constrain(self, pending: StepResult, fill_masks) -> None:
        """Nothing: what it samples follows from the history alone."""

    def is_done(self, pending: StepResult) -> bool:
        return True

    def fetch(self, pending: StepResult) -> StepResult:
        return pending

    def _write(self, plan: StepPlan, row: int, tokens: np.ndarray) -> np.ndarray:
        """Writes the row's tokens to its pages; returns all that the row can see afterwards."""
        tokens = np.where(tokens == ON_DEVICE, self._last_token_N[plan.slot_S[row]], tokens)
        first = int(plan.start_S[row])
        position = np.arange(first + len(tokens))
        page = plan.page_table_SP[row, position // self._page_size]
        assert page.all(), f"row {row} of step {plan.step} computes into the null page"
        self._kv_GK[page[first:], position[first:] % self._page_size] = tokens
        return self._kv_GK[page, position % self._page_size]
