"""ActiveBatch: the sequences on the device, with their slots, their pages and what pages hold.

The scheduler decides who; this does it, and keeps four things in step: the SlotArray, the PagePool,
the PrefixCache and the pages that are to come into it.

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
from jaxserve.scheduler.coming import ComingPages
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.slots import SlotArray
from jaxserve.types import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """slot None: not now, and why_not says why. num_cached: tokens whose KV is there, in the prefix
    cache or brought back from the host: swap_in says which (host page, page) to copy.

    waits: it would fit, but a running sequence computes its beginning; needed: the pages to keep
    for it until then.
    """

    slot: int | None
    num_cached: int = 0
    why_not: str = ""
    waits: bool = False
    needed: int = 0
    swap_in: tuple[tuple[int, int], ...] = ()


NO_SLOT = Admission(None, why_not="every slot is taken")


@dataclasses.dataclass(slots=True)
class Kept:
    """What is kept for those at the head of the queue that wait for their beginning: others pass,
    and still each of them gets its slot as soon as it can use it."""

    slots: int = 0
    pages: int = 0

    def add(self, admission: Admission) -> None:
        self.slots += 1
        self.pages += admission.needed


class ActiveBatch:
    """Slots and pages. Every method leaves slots, pool and cache consistent with each other."""

    def __init__(self, limits: Limits, cache_key: bytes):
        self.limits = limits
        self.pool = PagePool(limits.num_pages)
        self.cache = PrefixCache(self.pool, limits.page_size, cache_key)
        self.slots = SlotArray(limits.num_slots, limits.pages_per_row, limits.page_size)
        self.coming = ComingPages(self.cache)

    def admit(
        self,
        sequence: Sequence,
        kept: Kept,
        spare: int,
        tenant: int,
        standing: int,
        *,
        may_wait: bool,
    ) -> Admission:
        """Match prefix, count tokens, reserve pages: here and nowhere else.

        Pages for every token it has come with the slot, so a prompt once begun is never held up by
        a shortage. spare: pages to leave over for the rows that run already. may_wait: let it in
        later when a running sequence computes its beginning.
        """
        if not self.slots.num_free and not self.coming:
            return NO_SLOT
        most = self._shareable(sequence)
        hits = self._match(sequence, most)
        needed = self.limits.pages_for(len(sequence.tokens)) - len(hits)
        may_wait = may_wait and not sequence.host_pages
        source = self._source(sequence, len(hits), most) if may_wait else None
        if source is not None:
            why_not = f"{source.request.id} computes the prefix they share"
            return Admission(None, why_not=why_not, waits=True, needed=needed)
        if self.slots.num_free <= kept.slots:
            return NO_SLOT
        self.pool.share(hits)  # first: reserving could evict them
        available, spare = self.pool.num_available, spare + kept.pages
        if needed + spare > available:
            self.pool.release(hits)
            why_not = f"needs {needed} pages beside {spare} to spare; {available} are free"
            return Admission(None, why_not=why_not)
        pages = hits + self.pool.reserve(needed)
        num_cached = max(len(hits) * self.limits.page_size, sequence.host_tokens)
        swap_in = tuple(zip(sequence.host_pages, pages))[len(hits) :]
        slot = self.slots.admit(sequence, pages, num_cached, tenant, standing)
        if self.limits.prefix_caching:
            own = (len(sequence.tokens) - 1) // self.limits.page_size
            self.coming.begin(sequence, num_cached // self.limits.page_size, own)
        return Admission(slot, num_cached, swap_in=swap_in)

    def _shareable(self, sequence: Sequence) -> int:
        """Pages that it may take from others; its last token at least is left to compute."""
        if not self.limits.prefix_caching:
            return 0
        if sequence.request.params.pooling == "mean":
            return 0  # a hidden state must be computed to be counted
        scored = sequence.index == 0 and sequence.request.params.prompt_logprobs is not None
        if scored and sequence.num_scored < sequence.num_prompt:
            return 0  # a position must be computed to be scored, and choice 0 scores for all
        return (len(sequence.tokens) - 1) // self.limits.page_size

    def _match(self, sequence: Sequence, most: int) -> list[int]:
        """Pages that hold its beginning already, `most` of them at most."""
        if not most:
            return []
        salt = sequence.request.cache_salt
        return self.cache.match(sequence.page_chain, sequence.tokens, salt, most)

    def _source(self, sequence: Sequence, num_hits: int, most: int) -> Sequence | None:
        """The running sequence that computes the pages after its hits. Only one that had tokens of
        the last step: so it is waited for no longer than it takes to compute a prompt."""
        source = self.coming.source(sequence, num_hits, most)
        return source if source is not None and self.slots.was_served(source.slot) else None

    def grow(self) -> list[int]:
        """A page for each decoding row whose next token begins one. When there are too few, none is
        given, and the slots in need are returned."""
        slots = self.slots
        full = (slots.planned_N == slots.room_N).nonzero()[0]
        if not len(full):
            return []
        tokens = slots.tokens_N[full]
        needy = full[(tokens > slots.planned_N[full]) & (tokens < slots.stop_at_N[full])]
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
        self.coming.stop(sequence)
        self.pool.release(self.slots.leave(sequence.slot))

    def advance(self, slot_S: np.ndarray, end_S: np.ndarray) -> int:
        """The KV of these slots is written now up to end_S; pages that became full are published.

        Returns how many tokens that was.
        """
        slots, size = self.slots, self.limits.page_size
        before_S = slots.computed_N[slot_S]
        slots.computed_N[slot_S] = end_S
        if self.limits.prefix_caching:
            first_S, last_S = before_S // size, end_S // size
            filled = (last_S > first_S).nonzero()[0]
            if len(filled):
                self._publish(slot_S[filled], first_S[filled], last_S[filled])
        return int((end_S - before_S).sum())

    def _publish(self, slot_S: np.ndarray, first_S: np.ndarray, last_S: np.ndarray) -> None:
        """Pages [first, last) of each row's table are full of computed tokens."""
        digests, pages, extend = [], [], self.cache.extend
        sequence_N, page_table_NP = self.slots.sequence_N, self.slots.page_table_NP
        for slot, first, last in zip(slot_S.tolist(), first_S.tolist(), last_S.tolist()):
            sequence = sequence_N[slot]
            chain = sequence.page_chain
            extend(chain, sequence.tokens, sequence.request.cache_salt, last)
            digests += chain[first + 1 : last + 1]
            pages += page_table_NP[slot, first:last].tolist()
        self.cache.publish(digests, pages)
        if self.coming:
            for slot, last in zip(slot_S.tolist(), last_S.tolist()):
                self.coming.filled(sequence_N[slot], last)

    def check_invariants(self) -> None:
        self.slots.check_invariants()
        running = np.flatnonzero(self.slots.active_N).tolist()
        self.pool.check_invariants([self.slots.pages(slot) for slot in running])
        for slot in running:  # a step's reads must not depend on when it writes
            first = self.slots.computed_N[slot] // self.limits.page_size
            references = self.pool.references_G[self.slots.pages(slot)[first:]]
            assert (references == 1).all(), "a page that is still to be written is shared"
        self.cache.check_invariants()
        self.coming.check_invariants(self.slots.running())
