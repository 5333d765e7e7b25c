"""Guard: notices trouble before users do, and does the least that helps.

Each sign is a reading with a threshold. A sign is raised when its reading has been at or above the
threshold for RAISE_S, and lowered when it has been below RECOVERED of it for LOWER_S: between the
two, nothing changes, so a reading that hovers does not flap. A raised sign calls for one action.
When two signs stay raised for long, the last and simplest action is static batching.

No action changes what a sequence computes, only when: outputs are the same with a guard or without.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping

from jaxserve.config import SchedulerConfig

INTERVAL_S = 1.0  # between two looks
RAISE_S = 2.0
LOWER_S = 10.0
RECOVERED = 0.7


class Action(enum.Enum):
    SMALLER_CHUNKS = "smaller chunks"
    PAUSE_ADMISSION = "pause admission"
    SHED_LOWEST = "refuse arrivals of the lowest priority"
    SHED_GREEDIEST = "refuse arrivals of the tenant that had the most"
    SPARE_PAGES = "leave pages free"
    STATIC_BATCHING = "static batching"


@dataclasses.dataclass(frozen=True)
class Change:
    """A sign raised or lowered. `action` starts or stops with it."""

    when: float
    sign: str
    raised: bool
    reading: float
    action: Action

    def __str__(self):
        verb = "raised" if self.raised else "lowered"
        then = "start" if self.raised else "stop"
        return f"{self.sign} {verb} at {self.reading:.4g}: {then}: {self.action.value}"


@dataclasses.dataclass
class Sign:
    """One reading's state. since: when the reading crossed to the side it has been on."""

    name: str
    threshold: float
    action: Action
    raised: bool = False
    since: float | None = None

    def look(self, reading: float, now: float) -> bool:
        """Takes a reading; True when the sign was raised or lowered by it."""
        if self.raised:
            crossed, hold_s = reading < RECOVERED * self.threshold, LOWER_S
        else:
            crossed, hold_s = reading >= self.threshold, RAISE_S
        if not crossed:
            self.since = None
            return False
        if self.since is None:
            self.since = now
        if now - self.since < hold_s:
            return False
        self.raised, self.since = not self.raised, None
        return True


class Guard:
    """Watches readings and keeps the set of actions in force."""

    def __init__(self, config: SchedulerConfig):
        itl_s = None
        if config.itl_target_ms is not None and config.guard_itl_ratio is not None:
            itl_s = config.itl_target_ms * config.guard_itl_ratio / 1000
        wanted = (
            ("queue_age_s", config.guard_queue_age_s, Action.SHED_LOWEST),
            ("itl_p99_s", itl_s, Action.SMALLER_CHUNKS),
            ("fairness_gap", config.guard_fairness_gap, Action.SHED_GREEDIEST),
            ("preemptions_per_min", config.guard_preemptions_per_min, Action.PAUSE_ADMISSION),
            ("page_pressure", config.guard_page_pressure, Action.SPARE_PAGES),
        )
        self.signs = [Sign(name, high, act) for name, high, act in wanted if high is not None]
        self.actions: frozenset[Action] = frozenset()
        self.num_changes = 0
        self._static_after_s = config.guard_static_after_s
        self._two_since: float | None = None
        self._next_look = 0.0

    @property
    def in_force(self) -> tuple[str, ...]:
        """The actions' names; other threads may ask."""
        return tuple(sorted(action.value for action in self.actions))

    def wants(self, action: Action) -> bool:
        """Whether the action is in force. Asked several times a step, nearly always in vain."""
        return bool(self.actions) and action in self.actions

    def is_due(self, now: float) -> bool:
        return bool(self.signs) and now >= self._next_look

    def look(self, readings: Mapping[str, Callable[[], float]], now: float) -> list[Change]:
        """Takes the readings of the signs that are watched, by name; returns what changed."""
        self._next_look = now + INTERVAL_S
        changes = []
        for sign in self.signs:
            reading = readings[sign.name]()
            if sign.look(reading, now):
                changes.append(Change(now, sign.name, sign.raised, reading, sign.action))
        raised = sum(sign.raised for sign in self.signs)
        changes += self._consider_static(raised, now)
        for change in changes:
            moved = {change.action}
            self.actions = self.actions | moved if change.raised else self.actions - moved
        self.num_changes += len(changes)
        return changes

    def _consider_static(self, raised: int, now: float) -> list[Change]:
        """Static batching starts when two signs have been up for long, stops when none is."""
        if self._static_after_s is None:
            return []
        static = Action.STATIC_BATCHING in self.actions
        if raised < 2:
            self._two_since = None
        elif self._two_since is None:
            self._two_since = now
        lasted = self._two_since is not None and now - self._two_since >= self._static_after_s
        if static != (lasted or (static and raised > 0)):
            return [Change(now, "signs_raised", not static, raised, Action.STATIC_BATCHING)]
        return []
