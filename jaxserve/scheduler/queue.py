"""WaitingQueue: sequences without a slot, in the policy's order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from jaxserve.types import Sequence


class WaitingQueue:
    """A heap by policy key. Leaving from the middle is lazy: a ghost stays until it surfaces."""

    def __init__(self, key: Callable[[Sequence], tuple]):
        self._key = key
        self._heap: list[tuple[tuple, int, Sequence]] = []  # (key, entry, sequence)
        self._waiting: dict[int, tuple[int, Sequence]] = {}  # serial -> (entry, sequence)
        self._entries = 0  # a preempted sequence enters again while its ghost may still be there
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of entry, not of service."""
        return (sequence for _, sequence in self._waiting.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.serial in self._waiting

    def push(self, sequence: Sequence) -> None:
        assert sequence.serial not in self._waiting
        self._entries += 1
        self._waiting[sequence.serial] = (self._entries, sequence)
        self.num_tokens += len(sequence.tokens)
        heapq.heappush(self._heap, (self._key(sequence), self._entries, sequence))

    def peek(self) -> Sequence | None:
        """The next to be served."""
        while self._heap:
            _, _, sequence = entry = self._heap[0]
            if self._is_waiting(entry):
                return sequence
            heapq.heappop(self._heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.serial]
        self.num_tokens -= len(sequence.tokens)
        if len(self._heap) > 2 * len(self._waiting) + 64:  # mostly ghosts: sweep them out
            self._heap = [entry for entry in self._heap if self._is_waiting(entry)]
            heapq.heapify(self._heap)

    def _is_waiting(self, entry: tuple[tuple, int, Sequence]) -> bool:
        _, number, sequence = entry
        return self._waiting.get(sequence.serial, (None,))[0] == number
