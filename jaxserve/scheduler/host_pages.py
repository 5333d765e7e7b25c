"""HostPages: which pages of the host's memory hold the KV of which preempted sequence.

Only the numbers are kept here; the device runner holds the memory and copies what a plan says, all
pages out, then all pages in, then the step. So a host page that a plan stops needing may be written
to by the next plan, not by the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.types import Sequence

Copies = tuple[tuple[int, int], ...]  # (from page, to page)


class HostPages:
    """num_pages pages, each free or held by one waiting sequence; and the copies for the next plan.

    s_per_page: seconds that a page takes there and back.
    """

    def __init__(self, num_pages: int, s_per_page: float):
        self.num_pages = num_pages
        self.num_kept = 0  # pages copied here since the start
        self._s_per_page = s_per_page
        self._free = list(range(num_pages - 1, -1, -1))
        self._leaving: list[int] = []  # free from the next plan on
        self._out: list[tuple[int, int]] = []
        self._in: list[tuple[int, int]] = []

    def keep(self, sequence: Sequence, num_tokens: int, pages: list[int], again_s: float) -> str:
        """Keeps the KV of the sequence's first num_tokens tokens, which lies in `pages`, if there
        is room and fetching it takes no longer than again_s, computing it again.

        Returns what was weighed, to go behind the reason of a preemption.
        """
        if not self.num_pages:
            return ""
        fetched_s = len(pages) * self._s_per_page
        weighed = f"{1e3 * fetched_s:.3g} ms to fetch, {1e3 * again_s:.3g} ms to compute again"
        if fetched_s > again_s:
            return f"; not kept: {weighed}"
        if len(pages) > len(self._free):
            return "; not kept: the host has no room"
        sequence.host_pages = [self._free.pop() for _ in pages]
        sequence.host_tokens = num_tokens
        self._out += zip(pages, sequence.host_pages)
        self.num_kept += len(pages)
        return f"; {len(pages)} page{'s' * (len(pages) > 1)} kept on the host: {weighed}"

    def fetch(self, sequence: Sequence, copies: Copies) -> None:
        """The sequence has a slot again, and of its host pages these are copied back."""
        self._in += copies
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The sequence needs its copy no longer. Harmless when it has none."""
        self._leaving += sequence.host_pages
        sequence.host_pages, sequence.host_tokens = [], 0

    def take_copies(self) -> tuple[Copies, Copies]:
        """(out, in) for the plan that is being made."""
        copies = tuple(self._out), tuple(self._in)
        self._out, self._in = [], []
        self._free += self._leaving
        self._leaving.clear()
        return copies

    def forget(self, waiting: Iterable[Sequence]) -> None:
        """A step failed: the copies that it was to make may never have been made."""
        for sequence in waiting:
            self.drop(sequence)
        self.take_copies()

    def check_invariants(self, waiting: Iterable[Sequence], running: Iterable[Sequence]) -> None:
        held = [page for sequence in waiting for page in sequence.host_pages]
        everything = sorted(held + self._free + self._leaving)
        assert everything == list(range(self.num_pages)), "a host page is lost, or held twice"
        assert not any(sequence.host_pages for sequence in running)
