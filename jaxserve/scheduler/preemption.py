"""Whose place is taken when pages or slots run out."""

from __future__ import annotations

import numpy as np

from jaxserve.cache.page_pool import PagePool
from jaxserve.scheduler.policy import Policy
from jaxserve.scheduler.slots import SlotArray


def evictable(slots: SlotArray, policy: Policy, above: int | None = None) -> list[int]:
    """Slots that may be taken away.

    above: only from sequences of a higher standing than this. Without it, everyone but the one that
    the policy serves first, so that something always gets done.
    """
    open_to_it = open_to_eviction(slots)
    if above is not None:
        return open_to_it[slots.standing_N[open_to_it] > above].tolist()
    running = np.flatnonzero(slots.active_N)
    first = min(running.tolist(), key=lambda slot: policy.key(slots.sequence_N[slot]))
    return open_to_it[open_to_it != first].tolist()


def open_to_eviction(slots: SlotArray) -> np.ndarray:
    """Nobody is evicted twice for nothing: a sequence that came back keeps its slot until it has a
    token more. It can get that far without a new page, having come back with pages for all it had.
    Nor is one whose last token is on its way: all its pages come free with that."""
    settled_N = slots.known_N > slots.must_pass_N
    return np.flatnonzero(slots.active_N & settled_N & ~slots.ending_N)


def pages_freed(slots: SlotArray, pool: PagePool, slot: int) -> int:
    """Pages that come free when the slot is emptied: those that nobody shares."""
    held = slots.page_table_NP[slot, : slots.num_pages_N[slot]]
    return int(np.count_nonzero(pool.references_G[held] == 1))


def choose_victim(slots: SlotArray, pool: PagePool, candidates: list[int]) -> int | None:
    """The candidate of the highest standing number whose eviction costs least.

    Cost is tokens to compute again for each page that comes free: a long prompt that has just begun
    gives many pages for little work; pages shared with others give nothing. Between equals, the
    last admitted. None when no candidate frees a page.
    """
    best, best_rank = None, None
    for slot in candidates:
        freed = pages_freed(slots, pool, slot)
        if not freed:
            continue
        rank = (-slots.standing_N[slot], slots.planned_N[slot] / freed, -slots.order_N[slot])
        if best is None or rank < best_rank:
            best, best_rank = slot, rank
    return best


def victims_for(
    slots: SlotArray, pool: PagePool, candidates: list[int], num_slots: int, num_pages: int
) -> list[int]:
    """Candidates to evict so that so many slots and pages are free; none at all when even all of
    them would not do."""
    candidates, victims = list(candidates), []
    available = pool.num_available
    while available < num_pages or slots.num_free + len(victims) < num_slots:
        victim = choose_victim(slots, pool, candidates)
        if victim is None:
            return []
        candidates.remove(victim)
        victims.append(victim)
        available += pages_freed(slots, pool, victim)
    return victims
