"""Policies: who is served first, and who gives way. Pure functions of a sequence.

A key orders a queue, smallest first; it ends in the order of arrival, so two sequences never tie
and plans are repeatable. A standing groups sequences: one that waits may take the place of a
running one of a higher standing, never of its own or a lower one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxserve.types import Sequence


def by_arrival(sequence: Sequence) -> tuple:
    return (sequence.request.arrival, sequence.serial)


def by_priority(sequence: Sequence) -> tuple:
    request = sequence.request
    return (request.priority, request.arrival, sequence.serial)


def by_deadline(sequence: Sequence) -> tuple:
    """Earliest deadline first; requests without one after all that have one."""
    request = sequence.request
    due = math.inf if request.deadline is None else request.deadline
    return (due, request.arrival, sequence.serial)


def no_standing(sequence: Sequence) -> int:
    return 0


def priority_standing(sequence: Sequence) -> int:
    return sequence.request.priority


@dataclasses.dataclass(frozen=True)
class Policy:
    """fair: tenants take turns by the service they had (fairness.py); key orders within one."""

    key: Callable[[Sequence], tuple]
    standing: Callable[[Sequence], int] = no_standing
    fair: bool = False

    @property
    def evicts(self) -> bool:
        """Whether one that waits may ever take the place of one that runs."""
        return self.standing is not no_standing


POLICIES = {
    "fcfs": Policy(by_arrival),
    "priority": Policy(by_priority, standing=priority_standing),
    "deadline": Policy(by_deadline),
    "vtc": Policy(by_arrival, fair=True),
}
