"""SlotArray: the rows of the running batch, as arrays.

Everything that changes in every step is a numpy column over the N slots, so that planning and
absorbing 256 decoding rows is a handful of array operations instead of 256 objects.

The counters of a slot chase each other, left to right:

    computed_N <= planned_N <= tokens_N      known_N <= tokens_N
    KV written    KV written    tokens that     tokens the
    for sure      when the      exist then      host has read
                  dispatched
                  steps are done

Chunked prefill, a prefix hit, a resumed sequence and plain decoding are all the same thing:
planned_N is below tokens_N.

A sequence whose last token is planned needs no slot any more, only what the step will bring: while
others wait for slots it moves out to a row behind them (move_out), and the next plan has its slot
refilled one step earlier than absorb could.
"""

from __future__ import annotations

import heapq

import numpy as np

from jaxserve.cache.page_pool import NULL_PAGE
from jaxserve.types import Sequence

NO_ROOM = -1  # of an empty slot: below any count of tokens, so no comparison takes it for a row


class SlotArray:
    """N slots, each empty or holding one sequence from its admission to its end or preemption, and
    N rows behind them for those that moved out. Whatever is planned has a slot.

    The lowest free slot is taken first: any rule would do for the device, which gathers the rows
    it needs, and this one keeps rows in admission order and plans easy to read and compare.
    """

    def __init__(self, num_slots: int, pages_per_row: int, page_size: int):
        self.num_slots = num_slots
        self.page_size = page_size
        rows = 2 * num_slots
        self.active_N = np.zeros(rows, bool)
        # Grows when a slot is left, or a row taken out of a plan: what that step brings is dropped.
        self.generation_N = np.zeros(rows, np.int32)
        self.computed_N = np.zeros(rows, np.int32)
        self.planned_N = np.zeros(rows, np.int32)
        self.tokens_N = np.zeros(rows, np.int32)
        self.known_N = np.zeros(rows, np.int32)
        self.max_total_N = np.zeros(rows, np.int32)
        self.stop_at_N = np.zeros(rows, np.int32)  # nothing to compute from here on
        self.last_token_N = np.zeros(rows, np.int32)
        self.must_pass_N = np.zeros(rows, np.int32)
        self.order_N = np.zeros(rows, np.int64)  # of admission
        self.served_N = np.zeros(rows, np.int64)  # turn in which its tokens were last planned
        self.held_N = np.zeros(rows, bool)  # nothing is planned for it
        self.scores_N = np.zeros(rows, bool)  # its log-probabilities are wanted
        self.standing_N = np.zeros(rows, np.int64)  # by the policy; lower ones go first
        self.tenant_N = np.zeros(rows, np.int32)  # its number in the ServiceLedger
        self.num_pages_N = np.zeros(rows, np.int32)
        self.room_N = np.full(rows, NO_ROOM, np.int32)  # tokens that its pages hold
        self.page_table_NP = np.full((rows, pages_per_row), NULL_PAGE, np.int32)
        self.sequence_N = np.full(rows, None, object)
        self._columns = [column for column in vars(self).values() if isinstance(column, np.ndarray)]
        self._free = list(range(num_slots))  # a heap
        self._free_behind = list(range(num_slots, rows))
        self._moved: dict[tuple[int, int], int] = {}  # (slot, generation) left -> row behind
        self._left: dict[int, tuple[int, int]] = {}  # and the other way round
        self._admissions = 0
        self.turn = 0  # plans made

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return self.num_slots - len(self._free)

    def admit(
        self, sequence: Sequence, pages: list[int], num_cached: int, tenant: int, standing: int
    ) -> int:
        """Gives the sequence the lowest free slot; its first num_cached tokens have KV already."""
        slot = heapq.heappop(self._free)
        sequence.slot = slot
        count = len(sequence.tokens)
        self.sequence_N[slot] = sequence
        self.active_N[slot] = True
        self.computed_N[slot] = self.planned_N[slot] = num_cached
        self.tokens_N[slot] = self.known_N[slot] = count
        self.max_total_N[slot] = sequence.max_total
        # A sequence of full length samples nothing more, so the KV of its last token is of no use;
        # only a request for no token at all (prompt scoring) computes everything it has.
        self.stop_at_N[slot] = sequence.max_total + (sequence.max_total == sequence.num_prompt)
        self.last_token_N[slot] = sequence.tokens[-1]
        self.must_pass_N[slot] = sequence.must_pass
        self.scores_N[slot] = sequence.request.params.logprobs is not None
        self.tenant_N[slot] = tenant
        self.standing_N[slot] = standing
        self.order_N[slot] = self._admissions
        self._admissions += 1
        self.served_N[slot] = self.turn
        self.page_table_NP[slot, : len(pages)] = pages
        self.num_pages_N[slot] = len(pages)
        self.room_N[slot] = len(pages) * self.page_size
        return slot

    @property
    def ending_N(self) -> np.ndarray:
        """Rows that have nothing left to compute: the steps in flight bring their end. bool."""
        done_N = (self.tokens_N >= self.stop_at_N) | (self.planned_N == self.tokens_N)
        return done_N & self.active_N

    @property
    def num_ending(self) -> int:
        """Slots that move_out would free."""
        return int(np.count_nonzero(self.ending_N[: self.num_slots]))

    def move_out(self) -> None:
        """Frees the slots of those that are ending; rows of earlier plans find them behind."""
        for slot in self.ending_N[: self.num_slots].nonzero()[0].tolist():
            if not self._free_behind:
                return
            row, left = self._free_behind.pop(), (slot, int(self.generation_N[slot]))
            self._moved[left], self._left[row] = row, left
            for column in self._columns:
                column[row] = column[slot]
            self.sequence_N[row].slot = row
            self._clear(slot)

    def leave(self, slot: int) -> list[int]:
        """Empties the slot, or row behind, and returns its pages in order of position."""
        pages = self.pages(slot)
        self.sequence_N[slot].slot = None
        self._clear(slot)
        return pages

    def _clear(self, slot: int) -> None:
        """From here on the generation tells rows of earlier plans apart, and the page table row is
        all null pages: whoever looks at an empty slot finds nothing of its last tenant."""
        self.sequence_N[slot] = None
        self.active_N[slot] = self.held_N[slot] = False
        self.generation_N[slot] += 1
        self.page_table_NP[slot, : self.num_pages_N[slot]] = NULL_PAGE
        for column_N in (
            self.computed_N, self.planned_N, self.tokens_N, self.known_N, self.num_pages_N,
        ):  # fmt: skip
            column_N[slot] = 0
        self.room_N[slot] = NO_ROOM
        if slot < self.num_slots:
            heapq.heappush(self._free, slot)
        else:
            self._free_behind.append(slot)
            del self._moved[self._left.pop(slot)]

    def find(self, slot_S: np.ndarray, generation_S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where rows planned for these slots stand now, and which of them still do (bool [S]): the
        sequences of the others ended or were preempted."""
        slot_S = slot_S.astype(np.intp)  # numpy's own kind of index: three times as fast
        live_S = self.generation_N[slot_S] == generation_S
        if self._moved:
            for at in (~live_S).nonzero()[0].tolist():
                row = self._moved.get((int(slot_S[at]), int(generation_S[at])))
                if row is not None:
                    slot_S[at], live_S[at] = row, True
        return slot_S, live_S

    def take_back(self, slot: int, start: int, sampled: bool) -> None:
        """Undoes the last plan of a slot: what it computes from position start on is dropped."""
        assert self.planned_N[slot] > start, "a later plan has been made"
        self.generation_N[slot] += 1
        self.planned_N[slot] = start
        self.tokens_N[slot] -= sampled

    def attach_page(self, slots, pages: list[int]) -> None:
        """One more page to each of the slots."""
        held = self.num_pages_N[slots]
        self.page_table_NP[slots, held] = pages
        self.num_pages_N[slots] = held + 1
        self.room_N[slots] += self.page_size

    def pending(self, slots: np.ndarray) -> np.ndarray:
        """Tokens that each of the slots has left to compute."""
        return self.tokens_N[slots] - self.planned_N[slots]

    def was_served(self, slot: int) -> bool:
        """Whether the last plan had tokens of the slot, or it was filled since."""
        return bool(self.served_N[slot] == self.turn)

    def pages(self, slot: int) -> list[int]:
        return self.page_table_NP[slot, : self.num_pages_N[slot]].tolist()

    def running(self) -> list[Sequence]:
        """The sequences that hold a slot or moved out of it."""
        return self.sequence_N[self.active_N].tolist()

    def check_invariants(self) -> None:
        empty_N = ~self.active_N
        free = self._free + self._free_behind
        assert sorted(free) == np.flatnonzero(empty_N).tolist()
        behind = set(range(self.num_slots, len(empty_N))) - set(self._free_behind)
        assert {row: left for left, row in self._moved.items()} == self._left
        assert set(self._left) == behind
        assert not self.page_table_NP[empty_N].any(), "an empty slot has pages"
        assert not self.held_N[empty_N].any()
        assert not self.tokens_N[empty_N].any() and not self.num_pages_N[empty_N].any()
        assert (self.computed_N <= self.planned_N).all() and (self.planned_N <= self.tokens_N).all()
        assert (self.known_N <= self.tokens_N).all()
        live_N = self.active_N
        assert (self.tokens_N <= self.max_total_N)[live_N].all(), "scheduled past its length"
        room_N = np.where(empty_N, NO_ROOM, self.num_pages_N * self.page_size)
        np.testing.assert_array_equal(self.room_N, room_N)
        assert (self.planned_N <= self.room_N)[live_N].all(), "KV without a page"
        assert self.ending_N[self.num_slots :][live_N[self.num_slots :]].all(), "moved out too soon"
        for slot in np.flatnonzero(live_N).tolist():
            sequence = self.sequence_N[slot]
            assert sequence.slot == slot and sequence.finish is None
            assert len(sequence.tokens) == self.known_N[slot]
            held = self.num_pages_N[slot]
            assert (self.page_table_NP[slot, :held] != NULL_PAGE).all()
            assert not self.page_table_NP[slot, held:].any()
