"""PagePool: who holds which KV page.

A page is in exactly one of three states: free, referenced (by one or more sequences), or idle
(unreferenced, but its content is a prefix worth keeping until the room is needed). Page 0 is the
null page: it stands in every unused place of a page table and is never handed out.

The pool knows nothing of tokens or hashes; `PrefixCache` decides which pages are worth keeping.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable

import numpy as np

NULL_PAGE = 0


class PagePool:
    """Ids 1..num_pages-1 with reference counts. All methods cost O(pages named)."""

    def __init__(self, num_pages: int, on_evict: Callable[[int], None] | None = None):
        assert num_pages >= 2, "a pool needs the null page and one more"
        self.num_pages = num_pages
        self.on_evict = on_evict  # told of each idle page that is about to get another content
        self.references_G = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))  # the end is handed out first
        self._kept: set[int] = set()  # pages to keep as idle when their last reference goes
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()  # oldest first

    @property
    def capacity(self) -> int:
        """Pages that sequences can hold at most: all but the null page."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that reserve() can hand out now: free ones and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def reserve(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and no change) when there are fewer.

        Free pages go first; then idle ones, least recently released first.
        """
        if count > self.num_available:
            return None
        cut = len(self._free) - count
        if cut >= 0:
            pages = self._free[cut:]
            del self._free[cut:]
        else:
            pages, self._free = self._free, []
            pages += [self._evict() for _ in range(-cut)]
        self.references_G[pages] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """One more reference on each page. The pages are distinct, referenced or idle."""
        if not pages:
            return
        for page in pages:
            self._idle.pop(page, None)
        self.references_G[pages] += 1

    def release(self, pages: list[int]) -> None:
        """One reference less on each page; the pages are distinct and in order of position.

        Kept pages become idle last page first, so that a prefix loses its tail before its head:
        a head without a tail is still of use, a tail without its head is not.
        """
        if not pages:
            return
        index = np.array(pages)
        left = self.references_G[index] - 1
        assert left.min() >= 0, f"released more often than held: {pages}"
        self.references_G[index] = left
        unheld = pages[::-1]
        if left.any():
            unheld = [
                page for page, references in zip(unheld, left[::-1].tolist()) if not references
            ]
        if not self._kept:
            self._free += unheld
            return
        for page in unheld:
            if page in self._kept:
                self._idle[page] = None
            else:
                self._free.append(page)

    def keep(self, pages: list[int]) -> None:
        """The pages' contents are final and worth keeping: they become idle instead of free."""
        assert self.references_G[pages].all(), f"of pages {pages} some are nobody's"
        self._kept.update(pages)

    def forget_all(self) -> None:
        """Nothing is worth keeping any more (the pages' contents are lost)."""
        self._kept.clear()
        self._free.extend(self._idle)
        self._idle.clear()

    def _evict(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._kept.discard(page)
        if self.on_evict is not None:
            self.on_evict(page)
        return page

    def check_invariants(self, held: Iterable[list[int]] = ()) -> None:
        """Asserts that every page is in one state and that `held` explains every reference.

        held: the page list of each sequence that holds any.
        """
        counts_G = np.zeros(self.num_pages, np.int32)
        for pages in held:
            assert len(set(pages)) == len(pages), f"a page twice in one table: {pages}"
            counts_G[pages] += 1
        assert counts_G[NULL_PAGE] == 0, "a sequence holds the null page"
        np.testing.assert_array_equal(self.references_G, counts_G)
        free, idle = set(self._free), set(self._idle)
        referenced = set(np.flatnonzero(counts_G).tolist())
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free & idle or free & referenced or idle & referenced)
        assert free | idle | referenced == set(range(1, self.num_pages)), "a page is lost"
        assert idle <= self._kept and not self._kept & free
