"""Policies: who is served first, and who gives way. Pure functions of a sequence.

A key orders a queue, smallest first; it ends in the order of arrival, so two sequences never tie
and plans are repeatable. A standing groups sequences: one that waits may take the place of a
running one of a higher standing, never of its own or a lower one.

Where prompts share, two keys take turns at free slots: the policy's own at one in four, and at the
other three one that puts the shortest first among those that the policy has no reason to tell
apart. So a short prompt does not queue for a slot behind long ones; and whoever has k sequences
ahead by the policy's own key is admitted after 4k + 3 others at most, however many arrive.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from jaxserve.types import Sequence

SHORT = 512  # tokens: prompts below are all short


def by_arrival(sequence: Sequence) -> tuple:
    return (sequence.request.arrival, sequence.serial)


def by_length(sequence: Sequence) -> tuple:
    """Those that lost their place first, for somebody reads what they have so far. Lengths between
    two powers of two are alike, and so are all short ones: a few tokens less are no reason to
    overtake, and who is overtaken pays for it in the tail of waiting times."""
    begun = sequence.num_preemptions > 0
    length = max(len(sequence.tokens), SHORT - 1).bit_length()
    return (not begun, length, sequence.request.arrival, sequence.serial)


def by_priority(sequence: Sequence) -> tuple:
    request = sequence.request
    return (request.priority, request.arrival, sequence.serial)


def by_priority_and_length(sequence: Sequence) -> tuple:
    return (sequence.request.priority, *by_length(sequence))


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
    """short_key: takes turns with key where prompts share. None: key leaves nothing open.
    fair: tenants take turns by the service they had (fairness.py); keys order within one."""

    key: Callable[[Sequence], tuple]
    short_key: Callable[[Sequence], tuple] | None = None
    standing: Callable[[Sequence], int] = no_standing
    fair: bool = False

    @property
    def evicts(self) -> bool:
        """Whether one that waits may ever take the place of one that runs."""
        return self.standing is not no_standing


POLICIES = {
    "fcfs": Policy(by_arrival, by_length),
    "priority": Policy(by_priority, by_priority_and_length, standing=priority_standing),
    "deadline": Policy(by_deadline),
    "vtc": Policy(by_arrival, by_length, fair=True),
}
