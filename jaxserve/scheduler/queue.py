"""Queues of sequences without a slot: one in a policy's order, and one fair between tenants."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from jaxserve.scheduler.fairness import ServiceLedger
from jaxserve.types import Sequence

Key = Callable[[Sequence], tuple]
Entry = tuple[tuple, int, Sequence]  # (key, number of the entry, sequence)

SHORT_TURNS = 3  # of four: in bursts more than half of a chat's prompts may be short ones


class WaitingQueue:
    """A heap by key; with a short_key another by that one, and the two take turns: one is served by
    key, SHORT_TURNS by short_key. Leaving from the middle is lazy: a ghost stays until it surfaces.

    Some may be set aside for a while: they stay in the queue and the next one is served instead.
    """

    def __init__(self, key: Key, short_key: Key | None = None):
        self._keys = (key,) if short_key is None else (key, short_key)
        self._heaps: list[list[Entry]] = [[] for _ in self._keys]
        self._turn = 0
        self._waiting: dict[int, tuple[int, Sequence]] = {}  # serial -> (entry, sequence)
        self._aside: set[int] = set()  # serials
        self._withheld: list[tuple[list[Entry], Entry]] = []  # of those aside, out of their heaps
        self._entries = 0  # a preempted sequence enters again while its ghost may still be there
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        """In order of entry, not of service."""
        return (sequence for _, sequence in self._waiting.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.serial in self._waiting

    def entered_first(self) -> Iterator[Sequence]:
        """The one that has been in the queue longest, if any."""
        return itertools.islice(self, 1)

    def push(self, sequence: Sequence) -> None:
        assert sequence.serial not in self._waiting
        self._entries += 1
        self._waiting[sequence.serial] = (self._entries, sequence)
        self.num_tokens += len(sequence.tokens)
        for key, heap in zip(self._keys, self._heaps):
            heapq.heappush(heap, (key(sequence), self._entries, sequence))

    def peek(self) -> Sequence | None:
        """The next to be served."""
        return self._first(self._heaps[min(self._turn, len(self._heaps) - 1)])

    def overtakes(self, sequence: Sequence) -> bool:
        """Whether others come before it by key."""
        return self._turn > 0 and sequence is not self._first(self._heaps[0])

    def _first(self, heap: list[Entry]) -> Sequence | None:
        while heap:
            _, _, sequence = entry = heap[0]
            if not self._is_waiting(entry):
                heapq.heappop(heap)
            elif sequence.serial in self._aside:
                self._withheld.append((heap, heapq.heappop(heap)))
            else:
                return sequence
        return None

    def take(self, sequence: Sequence) -> None:
        """It is served: it leaves, and the turn passes on."""
        self.remove(sequence)
        self._turn = (self._turn + 1) % (1 + SHORT_TURNS)

    def set_aside(self, sequence: Sequence) -> None:
        """Passes it over until bring_back()."""
        self._aside.add(sequence.serial)

    def bring_back(self) -> None:
        """Those set aside take their places again."""
        for heap, entry in self._withheld:
            heapq.heappush(heap, entry)
        self._withheld.clear()
        self._aside.clear()

    def remove(self, sequence: Sequence) -> None:
        del self._waiting[sequence.serial]
        self.num_tokens -= len(sequence.tokens)
        for heap in self._heaps:
            if len(heap) > 2 * len(self._waiting) + 64:  # mostly ghosts: sweep them out
                heap[:] = filter(self._is_waiting, heap)
                heapq.heapify(heap)

    def _is_waiting(self, entry: Entry) -> bool:
        _, number, sequence = entry
        return self._waiting.get(sequence.serial, (None,))[0] == number


class FairQueue:
    """A WaitingQueue for each tenant; the tenant that has had the least service is next.

    Of equals it is the one whose last turn is the longest ago; for one that never had any, counted
    from when it came. Whoever returns is lifted to the level of those that wait, and would often
    stand behind all of them otherwise.

    A waiting tenant's counter only grows, so its entry in the heap of tenants may be too low but
    never too high: it is brought up to date when it surfaces.
    """

    def __init__(self, ledger: ServiceLedger, key: Key, short_key: Key | None = None):
        self._keys = (key, short_key)
        self._ledger = ledger
        self._queues: dict[int, WaitingQueue] = {}  # by tenant number; never empty ones
        # (service when pushed, last turn, tenant, entry)
        self._heap: list[tuple[float, int, int, int]] = []
        self._aside: list[WaitingQueue] = []  # those that passed somebody over
        self._entry_of: dict[int, int] = {}  # tenant -> its valid entry; others are ghosts
        self._turn_of: dict[int, int] = {}  # tenant -> its last turn
        self._numbers = itertools.count()  # of entries and turns
        self._length = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def entered_first(self) -> Iterator[Sequence]:
        """Of each tenant, the one that has been in the queue longest."""
        for queue in self._queues.values():
            yield from queue.entered_first()

    def __contains__(self, sequence: Sequence) -> bool:
        queue = self._queues.get(self._ledger.number(sequence.request.tenant))
        return queue is not None and sequence in queue

    def push(self, sequence: Sequence) -> None:
        tenant = self._ledger.number(sequence.request.tenant)
        if tenant not in self._queues:
            self._queues[tenant] = WaitingQueue(*self._keys)
            self._turn_of.setdefault(tenant, next(self._numbers))
            self._enter(tenant)
        self._queues[tenant].push(sequence)
        self._length += 1
        self.num_tokens += len(sequence.tokens)

    def _enter(self, tenant: int) -> None:
        entry = self._entry_of[tenant] = next(self._numbers)
        turn = self._turn_of[tenant]
        heapq.heappush(self._heap, (self._ledger.service_U[tenant], turn, tenant, entry))

    def peek(self) -> Sequence | None:
        """The first of the tenant with the smallest counter; None when all it has is set aside:
        another tenant's turn has not come."""
        while self._heap:
            service, _, tenant, entry = self._heap[0]
            if self._entry_of.get(tenant) != entry:
                heapq.heappop(self._heap)
            elif service < self._ledger.service_U[tenant]:
                heapq.heappop(self._heap)
                self._enter(tenant)
            else:
                return self._queues[tenant].peek()
        return None

    def first_of(self, tenant: int) -> Sequence | None:
        """The next of this tenant's, which must have something here; None when all that is set
        aside."""
        return self._queues[tenant].peek()

    def overtakes(self, sequence: Sequence) -> bool:
        """Whether others of its tenant come before it by key."""
        return self._of_tenant(sequence).overtakes(sequence)

    def take(self, sequence: Sequence) -> None:
        """It is served: it leaves, and the turn within its tenant passes on."""
        tenant = self._ledger.number(sequence.request.tenant)
        self._turn_of[tenant] = next(self._numbers)
        queue = self._queues[tenant]
        queue.take(sequence)
        self._left(queue, sequence)
        if len(queue):
            self._enter(tenant)

    def set_aside(self, sequence: Sequence) -> None:
        """Passes it over until bring_back()."""
        queue = self._of_tenant(sequence)
        queue.set_aside(sequence)
        self._aside.append(queue)

    def bring_back(self) -> None:
        """Those set aside take their places again."""
        for queue in self._aside:
            queue.bring_back()
        self._aside.clear()

    def remove(self, sequence: Sequence) -> None:
        queue = self._of_tenant(sequence)
        queue.remove(sequence)
        self._left(queue, sequence)

    def _of_tenant(self, sequence: Sequence) -> WaitingQueue:
        return self._queues[self._ledger.number(sequence.request.tenant)]

    def _left(self, queue: WaitingQueue, sequence: Sequence) -> None:
        """The sequence is out of its tenant's queue; an empty one is dropped."""
        self._length -= 1
        self.num_tokens -= len(sequence.tokens)
        if not len(queue):
            tenant = self._ledger.number(sequence.request.tenant)
            del self._queues[tenant], self._entry_of[tenant]
            if len(self._heap) > 2 * len(self._queues) + 64:
                self._heap = [e for e in self._heap if self._entry_of.get(e[2]) == e[3]]
                heapq.heapify(self._heap)
