"""Who has had how much: the virtual token counters of fair scheduling.

Source: Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588, algorithm 2
(VTC). Each tenant has a counter of the service it received: input_weight per prompt token that was
computed for it, output_weight per token generated. The tenant with the smallest counter is served
first. A tenant that comes back after a pause is lifted to the others' level: pauses earn no credit.

Service is counted for every policy, so that the unfairness of any of them can be seen; only the
`vtc` policy acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduler.stats import Standing
from jaxserve.types import Sequence

MAX_IDLE_TENANTS = 4096  # counters kept for tenants that have nothing here


class ServiceLedger:
    """Tenants by number, their counters, and how many of their sequences wait and are open."""

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0):
        self.input_weight = input_weight
        self.output_weight = output_weight
        self.service_U = np.zeros(64)  # by tenant number
        self.waiting_U = np.zeros(64, np.int64)
        self.open_U = np.zeros(64, np.int64)
        self.names: list[str | None] = []
        self._number_of: dict[str, int] = {}
        self._unused: list[int] = []
        self._last_left = 0.0  # counter of the tenant that last left the queue

    def number(self, tenant: str) -> int:
        """The tenant's number; new tenants begin at zero and are lifted when they queue."""
        number = self._number_of.get(tenant)
        if number is None:
            number = self._new_number(tenant)
        return number

    def opened(self, number: int, count: int) -> None:
        self.open_U[number] += count

    def closed(self, number: int) -> None:
        self.open_U[number] -= 1

    def enter(self, number: int) -> None:
        """A sequence of the tenant queues. Its first one lifts the counter (lines 4-10): to the
        smallest among those that wait, or, with nobody waiting, to that of the last to leave."""
        if not self.waiting_U[number]:
            waiting = self.service_U[self.waiting_U > 0]
            level = waiting.min() if len(waiting) else self._last_left
            self.service_U[number] = max(self.service_U[number], level)
        self.waiting_U[number] += 1

    def leave(self, number: int) -> None:
        """One of the tenant's sequences left the queue, admitted or ended."""
        self.waiting_U[number] -= 1
        if not self.waiting_U[number]:
            self._last_left = self.service_U[number]

    def charge_input(self, number: int, tokens: int) -> None:
        self.service_U[number] += self.input_weight * tokens

    def charge_outputs(self, number_S: np.ndarray) -> None:
        """One generated token for each row, given the rows' tenant numbers."""
        if len(self.names) == 1:  # as wherever nobody tells tenants apart
            self.service_U[0] += self.output_weight * len(number_S)
            return
        counts = np.bincount(number_S, minlength=len(self.service_U))
        self.service_U += self.output_weight * counts

    def gap(self) -> float:
        """Largest difference of service between two tenants that wait. Other threads may ask: the
        columns are replaced when they grow, so each is looked at once."""
        service_U, waiting_U = self.service_U, self.waiting_U
        known = min(len(service_U), len(waiting_U))
        waiting = service_U[:known][waiting_U[:known] > 0]
        return float(np.ptp(waiting)) if len(waiting) else 0.0

    def standings(self, most: int = 32) -> list[Standing]:
        """Of the tenants that have something here, those that had most service first. Other threads
        may ask, as of `gap`; what they see of a moment in which it changes may not add up."""
        service_U, waiting_U, open_U = self.service_U, self.waiting_U, self.open_U
        known = min(len(service_U), len(waiting_U), len(open_U), len(self.names))
        here = np.flatnonzero(open_U[:known])
        least = service_U[here].min(initial=np.inf)
        return [
            Standing(
                self.names[number] or "",
                running=max(0, int(open_U[number] - waiting_U[number])),
                waiting=int(waiting_U[number]),
                service=float(service_U[number] - least),
            )
            for number in here[np.argsort(-service_U[here], kind="stable")][:most].tolist()
        ]

    def waiting(self) -> np.ndarray:
        """Tenants that have something in the queue, by number."""
        return np.flatnonzero(self.waiting_U)

    @property
    def num_present(self) -> int:
        """Tenants that have something here, waiting or running."""
        return int(np.count_nonzero(self.open_U))

    def is_greediest(self, tenant: str) -> bool:
        """Whether none that has anything here had more service. A tenant alone is not greedy."""
        here_U = self.open_U > 0
        number = self.number(tenant)
        return here_U.sum() > 1 and self.service_U[number] >= self.service_U[here_U].max()

    def check_invariants(self, everyone: list[Sequence], waiting: Iterable[Sequence]) -> None:
        open_U, waiting_U = np.zeros_like(self.open_U), np.zeros_like(self.waiting_U)
        for sequence in everyone:
            open_U[self._number_of[sequence.request.tenant]] += 1
        for sequence in waiting:
            waiting_U[self._number_of[sequence.request.tenant]] += 1
        np.testing.assert_array_equal(self.open_U, open_U)
        np.testing.assert_array_equal(self.waiting_U, waiting_U)

    def _new_number(self, tenant: str) -> int:
        if len(self._number_of) >= MAX_IDLE_TENANTS and not self._unused:
            self._forget_idle()
        if self._unused:
            number = self._unused.pop()
            self.names[number] = tenant
        else:
            number = len(self.names)
            self.names.append(tenant)
            if number == len(self.service_U):
                grow = lambda column: np.concatenate([column, np.zeros_like(column)])
                self.service_U = grow(self.service_U)
                self.waiting_U = grow(self.waiting_U)
                self.open_U = grow(self.open_U)
        self._number_of[tenant] = number
        return number

    def _forget_idle(self) -> None:
        """Drops tenants that have nothing here and that a return would lift anyway."""
        waiting = self.service_U[self.waiting_U > 0]
        level = waiting.min() if len(waiting) else self._last_left
        known = len(self.names)
        idle_U = (self.open_U[:known] == 0) & (self.service_U[:known] <= level)
        for number in np.flatnonzero(idle_U)[::-1].tolist():
            if self.names[number] is not None:
                del self._number_of[self.names[number]]
                self.names[number] = None
                self.service_U[number] = 0.0
                self._unused.append(number)
