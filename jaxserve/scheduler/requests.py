"""OpenRequests: every request that has not ended, and those of its choices that do not run.

The first choice of a request queues when it comes. The others follow when its prompt is computed:
then they find its pages in the prefix cache.
"""

from __future__ import annotations

import heapq

import numpy as np

from jaxserve.scheduler.fairness import ServiceLedger
from jaxserve.scheduler.gate import Gate
from jaxserve.scheduler.queue import FairQueue, WaitingQueue
from jaxserve.types import Request, Sequence


class OpenRequests:
    """Keeps queue, ledger and gate in step with who is here."""

    def __init__(self, queue: WaitingQueue | FairQueue, ledger: ServiceLedger, gate: Gate):
        self.queue = queue
        self._ledger = ledger
        self._gate = gate
        self._open: dict[str, list[Sequence]] = {}  # request id -> choices that have not ended
        self._followers: dict[str, list[Sequence]] = {}  # choices 2..n, until the first's prompt
        self._num_followers = 0
        self._deadlines: list[tuple[float, int, Request]] = []  # heap; may outlive its requests
        self._serial = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def ids(self) -> list[str]:
        return list(self._open)

    @property
    def num_waiting(self) -> int:
        """Sequences without a slot, followers included."""
        return len(self.queue) + self._num_followers

    def add(self, request: Request, max_total: int) -> None:
        """Makes the request's choices, of max_total tokens at most, and queues the first."""
        choices = []
        for index in range(request.params.n):
            choices.append(Sequence(request, index, max_total, self._serial))
            self._serial += 1
        self._open[request.id] = choices
        self._gate.opened(request)
        self._ledger.opened(self._ledger.number(request.tenant), len(choices))
        self.enqueue(choices[0])
        if len(choices) > 1:
            self._followers[request.id] = choices[1:]
            self._num_followers += len(choices) - 1
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, choices[0].serial, request))
            # Most requests end long before their deadlines: those must not keep them in memory.
            if len(self._deadlines) > 2 * len(self._open) + 64:
                self._deadlines = [entry for entry in self._deadlines if self._is_open(entry[2])]
                heapq.heapify(self._deadlines)

    def choices(self, request_id: str) -> list[Sequence]:
        """Those that have not ended; none of an unknown request."""
        return list(self._open.get(request_id, ()))

    def take_expired(self, now: float) -> list[str]:
        """Ids of the requests whose deadline has passed since this was last asked."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if self._is_open(request):
                expired.append(request.id)
        return expired

    def _is_open(self, request: Request) -> bool:
        choices = self._open.get(request.id)
        return bool(choices) and choices[0].request is request  # an id may be in use again

    def enqueue(self, sequence: Sequence) -> None:
        self._ledger.enter(self._ledger.number(sequence.request.tenant))
        self.queue.push(sequence)

    def serve(self, sequence: Sequence) -> None:
        """The sequence leaves the queue for a slot."""
        self.queue.take(sequence)
        self._ledger.leave(self._ledger.number(sequence.request.tenant))

    def dequeue(self, sequence: Sequence) -> None:
        """The sequence leaves the queue because it ends."""
        self.queue.remove(sequence)
        self._ledger.leave(self._ledger.number(sequence.request.tenant))

    def queue_followers(self, computed_N: np.ndarray) -> None:
        """Queues the followers of those whose prompt is computed, by tokens computed a slot."""
        for request_id in list(self._followers):
            first = self._open[request_id][0]
            if first.slot is not None and computed_N[first.slot] >= first.num_prompt:
                for sequence in self.drop_followers(request_id):
                    self.enqueue(sequence)

    def drop_followers(self, request_id: str) -> list[Sequence]:
        """Followers that follow no longer: they are queued or ended next."""
        followers = self._followers.pop(request_id, [])
        self._num_followers -= len(followers)
        return followers

    def close(self, sequence: Sequence) -> None:
        """The sequence has ended and is in neither queue nor slot."""
        request = sequence.request
        self._ledger.closed(self._ledger.number(request.tenant))
        for follower in self.drop_followers(request.id):
            self.enqueue(follower)  # the first choice ended before its prompt was computed
        choices = self._open[request.id]
        choices.remove(sequence)
        if not choices:
            del self._open[request.id]
            self._gate.closed(request)

    def check_invariants(self, running: list[Sequence]) -> None:
        placed = [*running, *self.queue]
        for followers in self._followers.values():
            placed += followers
        everyone = [sequence for choices in self._open.values() for sequence in choices]
        assert sorted(s.id for s in placed) == sorted(s.id for s in everyone)
        assert all(s.finish is None for s in everyone)
        self._ledger.check_invariants(everyone, self.queue)
