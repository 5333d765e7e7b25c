"""ActiveBatch: the sequences on the device, with their slots, their pages and what pages hold.

The scheduler decides who; this does it, and keeps three things in step: the SlotArray, the PagePool
and the PrefixCache.

Why pages may be freed while a dispatched step still writes to them: steps run on the device in the
order of their plans. A page freed at plan or absorb time is handed out in a later plan at the
earliest, so its new owner's writes come after the stray ones, and it reads nothing that it has
not written itself. A published page is never hit by a stray write: only pages full of *computed*
tokens are published, and a step in flight writes at computed or later positions.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.cache.page_pool import PagePool
from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.slots import SlotArray
from jaxserve.types import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """slot None: it does not fit, and why_not says so. num_cached: tokens found in the cache."""

    slot: int | None
    num_cached: int = 0
    why_not: str = ""


class ActiveBatch:
    """Slots and pages. Every method leaves slots, pool and cache consistent with each other."""

    def __init__(self, limits: Limits, cache_key: bytes):
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(self.pool, limits.page_size, cache_key)
        self.slots = SlotArray(limits.num_slots, limits.pages_per_row)

    def admit(self, sequence: Sequence, spare: int, tenant: int, standing: int) -> Admission:
        """Match prefix, count tokens, reserve pages: here and nowhere else.

        Pages for every token it has come with the slot, so a prompt once begun is never held up by
        a shortage. spare: pages that must be left over for the rows that run already.
        """
        if not self.slots.num_free:
            return Admission(None, why_not="every slot is taken")
        hits = self._match(sequence)
        needed = self.limits.pages_for(len(sequence.tokens)) - len(hits)
        self.pool.share(hits)  # first: reserving could evict them
        available = self.pool.num_available
        if needed + spare > available:
            self.pool.release(hits)
            why_not = f"needs {needed} pages beside {spare} to spare; {available} are free"
            return Admission(None, why_not=why_not)
        pages = hits + self.pool.reserve(needed)
        num_cached = len(hits) * self.limits.page_size
        slot = self.slots.admit(sequence, pages, num_cached, tenant, standing)
        return Admission(slot, num_cached)

    def _match(self, sequence: Sequence) -> list[int]:
        """Pages that hold its beginning already; its last token at least is left to compute."""
        if not self.limits.prefix_caching:
            return []
        if sequence.request.params.pooling == "mean":
            return []  # a hidden state must be computed to be counted
        scored = sequence.index == 0 and sequence.request.params.prompt_logprobs is not None
        if scored and sequence.num_scored < sequence.num_prompt:
            return []  # a position must be computed to be scored, and choice 0 scores for all
        most = (len(sequence.tokens) - 1) // self.limits.page_size
        salt = sequence.request.cache_salt
        return self.cache.match(sequence.page_chain, sequence.tokens, salt, most)

    def grow(self) -> list[int]:
        """A page for each decoding row whose next token begins one. When there are too few, none is
        given, and the slots in need are returned."""
        slots = self.slots
        needs_N = (
            (slots.tokens_N - slots.planned_N == 1)
            & (slots.planned_N == slots.num_pages_N * self.limits.page_size)
            & (slots.tokens_N < slots.stop_at_N)
        )
        needy = needs_N.nonzero()[0]
        if not len(needy):
            return []
        pages = self.pool.reserve(len(needy))
        if pages is None:
            return needy.tolist()
        slots.attach_page(needy, pages)
        return []

    def grow_one(self, slot: int) -> bool:
        """One page for one row; False when there is none."""
        page = self.pool.reserve(1)
        if page is None:
            return False
        self.slots.attach_page([slot], page)
        return True

    def vacate(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        self.pool.release(self.slots.leave(sequence.slot))

    def advance(self, plan: StepPlan, rows: np.ndarray) -> int:
        """The KV of these rows is written now; pages that became full are published.

        Returns how many tokens that was.
        """
        slots, size = self.slots, self.limits.page_size
        slot_S = plan.slot_S[rows]
        end_S = plan.end_S[rows]
        before_S = slots.computed_N[slot_S]
        slots.computed_N[slot_S] = end_S
        first_S, last_S = before_S // size, end_S // size
        filled = (last_S > first_S).nonzero()[0]
        if self.limits.prefix_caching:
            self._publish(slot_S[filled], first_S[filled], last_S[filled])
        return int((end_S - before_S).sum())

    def _publish(self, slot_S: np.ndarray, first_S: np.ndarray, last_S: np.ndarray) -> None:
        """Pages [first, last) of each row's table are full of computed tokens."""
        slots = self.slots
        for slot, first, last in zip(slot_S.tolist(), first_S.tolist(), last_S.tolist()):
            sequence = slots.sequence_N[slot]
            chain = sequence.page_chain
            self.cache.extend(chain, sequence.tokens, sequence.request.cache_salt, last)
            pages = slots.page_table_NP[slot, first:last].tolist()
            self.cache.publish(chain[first + 1 : last + 1], pages)

    def check_invariants(self) -> None:
        self.slots.check_invariants(self.limits.page_size)
        running = np.flatnonzero(self.slots.active_N).tolist()
        self.pool.check_invariants([self.slots.pages(slot) for slot in running])
        self.cache.check_invariants()
