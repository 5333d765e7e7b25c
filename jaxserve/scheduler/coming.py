"""ComingPages: the pages that nobody can share yet because a running sequence computes them now.

When many requests with one beginning arrive together, the prefix cache helps none of them: a page
is found only when it is full. Whoever would compute the same pages as a running sequence can wait
for them instead; this tells for whom.
"""

from __future__ import annotations

from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.types import Sequence

WORTH_WAITING = 4  # pages in common; computing fewer again costs less than an empty slot


class ComingPages:
    """For each running prompt the page that it fills next, by digest.

    One entry a sequence is enough: who shares more than that page finds the pages before it in the
    cache, and waits for the next one when this one has become full.
    """

    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._next: dict[bytes, Sequence] = {}  # digest of the page being filled -> by whom
        self._spans: dict[int, tuple[int, int, int]] = {}  # serial -> (first, next, end), pages

    def __len__(self) -> int:
        return len(self._spans)

    def begin(self, sequence: Sequence, first: int, end: int) -> None:
        """The sequence starts to compute pages [first, end) of its own, all of them full."""
        if end - first >= WORTH_WAITING:
            self._extend(sequence, first + WORTH_WAITING)
            self._fill(sequence, first, first, end)

    def filled(self, sequence: Sequence, last: int) -> None:
        """Its pages before `last` are full and published."""
        span = self._spans.get(sequence.serial)
        if span is not None:
            first, _, end = span
            self.stop(sequence)
            if last < end:
                self._fill(sequence, first, last, end)

    def stop(self, sequence: Sequence) -> None:
        """Nothing more comes from it. Harmless when nothing did."""
        span = self._spans.pop(sequence.serial, None)
        if span is not None:
            digest = sequence.page_chain[span[1] + 1]
            if self._next.get(digest) is sequence:
                del self._next[digest]

    def source(self, sequence: Sequence, num_hits: int, end: int) -> Sequence | None:
        """Who computes page num_hits of this sequence, whose pages before that are in the cache
        and whose shareable ones end at `end`. None when nobody does, or too few are in common."""
        if not self._next or num_hits >= end:
            return None
        chain = sequence.page_chain
        self._extend(sequence, num_hits + 1)
        source = self._next.get(chain[num_hits + 1])
        if source is None:
            return None
        common = self._spans[source.serial][0] + WORTH_WAITING
        if common > end:
            return None
        self._extend(sequence, common)
        return source if chain[common] == source.page_chain[common] else None

    def _extend(self, sequence: Sequence, num_pages: int) -> None:
        salt = sequence.request.cache_salt
        self._cache.extend(sequence.page_chain, sequence.tokens, salt, num_pages)

    def _fill(self, sequence: Sequence, first: int, page: int, end: int) -> None:
        self._extend(sequence, page + 1)
        self._spans[sequence.serial] = (first, page, end)
        self._next[sequence.page_chain[page + 1]] = sequence

    def check_invariants(self, running: list[Sequence]) -> None:
        at_work = {sequence.serial: sequence for sequence in running}
        for serial, (first, page, end) in self._spans.items():
            assert first <= page < end and serial in at_work
        for digest, sequence in self._next.items():
            assert sequence.page_chain[self._spans[sequence.serial][1] + 1] == digest
