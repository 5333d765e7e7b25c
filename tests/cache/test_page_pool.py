"""PagePool against a model of it: plain sets, and a list for the order of eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

from jaxserve.cache.page_pool import NULL_PAGE, PagePool


class PoolMachine(RuleBasedStateMachine):
    """Holders reserve, share, keep and release pages at random."""

    holders = Bundle("holders")

    @initialize(num_pages=st.integers(2, 20))
    def start(self, num_pages):
        self.evicted = []
        self.pool = PagePool(num_pages, on_evict=self.evicted.append)
        self.held = []  # page lists of holders
        self.kept = set()
        self.idle = []  # kept and unreferenced, next to go first

    @rule(target=holders, count=st.integers(0, 8))
    def reserve(self, count):
        available = self.pool.num_available
        before = len(self.evicted)
        pages = self.pool.reserve(count)
        if count > available:
            assert pages is None and self.pool.num_available == available
            return []
        assert len(set(pages)) == count and NULL_PAGE not in pages
        assert not any(page in held for held in self.held for page in pages)
        gone = self.evicted[before:]
        assert gone == self.idle[: len(gone)], "the least recently released goes first"
        del self.idle[: len(gone)]
        self.kept -= set(gone)
        if gone:
            assert not set(pages) - set(gone) - self._unkept(), "idle pages go only after free ones"
        self.held.append(pages)
        return pages

    def _unkept(self):
        return set(range(1, self.pool.num_pages)) - self.kept

    @rule(pages=holders)
    def keep(self, pages):
        if pages in self.held:
            for page in pages:
                self.pool.keep([page])
            self.kept |= set(pages)

    @rule(target=holders, pages=holders, data=st.data())
    def share(self, pages, data):
        known = pages if pages in self.held else list(self.idle)
        shared = known[: data.draw(st.integers(0, len(known)))]
        self.pool.share(shared)
        self.idle = [page for page in self.idle if page not in shared]
        self.held.append(shared)
        return shared

    @rule(pages=consumes(holders))
    def release(self, pages):
        if pages not in self.held:
            return
        self.held.remove(pages)
        self.pool.release(pages)
        left = {page for held in self.held for page in held}
        self.idle += [page for page in reversed(pages) if page not in left and page in self.kept]

    @rule()
    def forget_all(self):
        self.pool.forget_all()
        self.kept.clear()
        self.idle.clear()

    @invariant()
    def consistent(self):
        if hasattr(self, "pool"):
            self.pool.check_invariants(self.held)
            assert self.pool.num_idle == len(self.idle)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_refuses_more_than_there_is_and_changes_nothing():
    pool = PagePool(5)
    assert pool.capacity == 4
    assert pool.reserve(5) is None
    assert sorted(pool.reserve(4)) == [1, 2, 3, 4]
    assert pool.reserve(1) is None


def test_a_prefix_loses_its_tail_first():
    evicted = []
    pool = PagePool(4, on_evict=evicted.append)
    pages = pool.reserve(3)
    for page in pages:
        pool.keep([page])
    pool.release(pages)
    pool.reserve(2)
    assert evicted == [pages[2], pages[1]]


def test_releasing_twice_is_found_out():
    pool = PagePool(4)
    pages = pool.reserve(2)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(pages)
