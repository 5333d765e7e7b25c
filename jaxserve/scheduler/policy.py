"""Policies: who is served first. Pure functions of a sequence, smallest key first.

A key ends in the order of arrival, so two sequences never tie and plans are repeatable.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxserve.types import Sequence


def fcfs(sequence: Sequence) -> tuple:
    """First come, first served."""
    return (sequence.request.arrival, sequence.serial)


def priority(sequence: Sequence) -> tuple:
    """Lower Request.priority first; within one, first come."""
    request = sequence.request
    return (request.priority, request.arrival, sequence.serial)


def deadline(sequence: Sequence) -> tuple:
    """Earliest deadline first; requests without one after all that have one."""
    request = sequence.request
    due = math.inf if request.deadline is None else request.deadline
    return (due, request.arrival, sequence.serial)


KEYS: dict[str, Callable[[Sequence], tuple]] = {
    "fcfs": fcfs,
    "priority": priority,
    "deadline": deadline,
}
