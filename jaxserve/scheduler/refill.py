"""Refill: freed slots, and those of sequences that are ending, go to those that wait, in the
policy's order, while pages last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxserve.scheduler.batch import ActiveBatch, Admission, Kept
from jaxserve.scheduler.fairness import ServiceLedger
from jaxserve.scheduler.gate import Gate
from jaxserve.scheduler.guard import Action, Guard
from jaxserve.scheduler.host_pages import HostPages
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.plan import BEFORE_LONGER, Decision
from jaxserve.scheduler.policy import Policy
from jaxserve.scheduler.preemption import evictable, victims_for
from jaxserve.scheduler.requests import OpenRequests
from jaxserve.scheduler.shares import below_their_share, most_to_come, over_their_share
from jaxserve.scheduler.stats import Stats
from jaxserve.scheduler.stops import StopRules
from jaxserve.types import Sequence


@dataclasses.dataclass(slots=True)
class Refilled:
    """What a plan tells of it: (slot, sequence) newly given a slot, why each of them got it, and
    why the first that got none did not."""

    admits: list[tuple[int, Sequence]] = dataclasses.field(default_factory=list)
    admitted: list[Decision] = dataclasses.field(default_factory=list)
    waiting: list[Decision] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, kw_only=True)
class Refill:
    """The scheduler's parts that an admission touches. preempt(slot, reason, now) sends a running
    sequence back to the queue."""

    limits: Limits
    policy: Policy
    batch: ActiveBatch
    requests: OpenRequests
    ledger: ServiceLedger
    gate: Gate
    guard: Guard
    host: HostPages
    stops: StopRules
    stats: Stats
    preempt: Callable[[int, str, float], None]

    def __call__(self, now: float) -> Refilled:
        """Nobody overtakes the head of the queue: a large request that waits for pages gets them.
        One that waits for a running sequence to compute their common prefix lets others pass, but
        its slot and pages are kept for it."""
        done, queue = Refilled(), self.requests.queue
        if not len(queue):
            return done
        if not self._is_static:
            self.batch.slots.move_out()
        head = self._next()
        closed = self._why_closed()
        if closed is not None:
            done.waiting.append(Decision(head.id, closed))
            return done
        kept = Kept()
        while head is not None and kept.slots < self.limits.num_slots:
            admission = self._admit(head, kept, done)
            if admission.slot is None and not admission.waits and self._make_room(head, kept, now):
                admission = self._admit(head, kept, done)
            if admission.slot is None:
                done.waiting.append(Decision(head.id, admission.why_not))
                if not admission.waits:
                    break
                kept.add(admission)
                queue.set_aside(head)
            head = self._next()
        queue.bring_back()
        if done.admits:
            self.gate.drained(len(done.admits), now)
        return done

    def _next(self) -> Sequence | None:
        """Whose turn it is. Under the fair policy a tenant that has its share of the slots leaves
        its turn to one that has not, unless that one could come too far ahead by it."""
        head = self.requests.queue.peek()
        if head is None or not self.policy.fair:
            return head
        waiting = self.ledger.waiting()
        if len(waiting) < 2:
            return head
        below = below_their_share(self.batch.slots, waiting, self.ledger.num_present)
        first = self.ledger.number(head.request.tenant)
        if first in below:
            return head
        for tenant in below[np.argsort(self.ledger.service_U[below], kind="stable")].tolist():
            sequence = self.requests.queue.first_of(tenant)
            if sequence is not None and self._keeps_the_bound(sequence, tenant, first):
                return sequence
        return head

    def _keeps_the_bound(self, sequence: Sequence, tenant: int, first: int) -> bool:
        """Whether this tenant's counter, with the sequence served, stays within the bound of fair
        scheduling above that of `first`, whose turn it is, whatever its sequences come to.

        Theorem 4.4 of arXiv 2401.00588 bounds the difference of the counters by what a running
        batch can hold: no turn given away may let it grow beyond that.
        """
        ledger, limits = self.ledger, self.limits
        tokens = len(sequence.tokens)
        outputs = most_to_come(self.batch.slots, tenant) + sequence.max_total - tokens
        inputs = 0 if sequence.num_preemptions else tokens
        ahead = ledger.service_U[tenant] - ledger.service_U[first]
        most = ahead + ledger.input_weight * inputs + ledger.output_weight * outputs
        return most <= ledger.output_weight * (limits.kv_tokens + limits.num_slots)

    @property
    def _is_static(self) -> bool:
        """Whether a batch is admitted at once and nobody joins it later."""
        return self.limits.batching == "static" or self.guard.wants(Action.STATIC_BATCHING)

    def _why_closed(self) -> str | None:
        """Why nobody at all is admitted now."""
        if not self.batch.slots.num_running:
            return None
        if self.limits.batching == "static":
            return "the static batch is still running"
        if self.guard.wants(Action.STATIC_BATCHING):
            return "the guard fell back to static batching"
        if self.guard.wants(Action.PAUSE_ADMISSION):
            return "the guard paused admission"
        return None

    def _admit(self, sequence: Sequence, kept: Kept, done: Refilled) -> Admission:
        """Gives the head of the queue a slot and pages, if it can have them."""
        tenant = self.ledger.number(sequence.request.tenant)
        standing = self.policy.standing(sequence)
        spare, may_wait = self._spare_pages(), not self._is_static
        admission = self.batch.admit(sequence, kept, spare, tenant, standing, may_wait=may_wait)
        if admission.slot is None:
            return admission
        verb = BEFORE_LONGER if self.requests.queue.overtakes(sequence) else "admitted"
        self.requests.serve(sequence)
        self.stops.admit(sequence)
        self.host.fetch(sequence, admission.swap_in)
        known, cached = len(sequence.tokens), admission.num_cached
        if sequence.num_preemptions:
            verb = "resumed"
        else:
            sequence.num_cached = cached
            self.stats.prefix_query_tokens += known
            self.stats.prefix_hit_tokens += cached
            self.ledger.charge_input(tenant, known - cached)
        done.admits.append((admission.slot, sequence))
        done.admitted.append(Decision(sequence.id, f"{verb}, {cached} of {known} tokens cached"))
        return admission

    def _spare_pages(self) -> int:
        """Pages an admission leaves free: one for each running row to grow into, lest it end in a
        preemption. With nothing running, all may go."""
        running = self.batch.slots.num_running
        if running and self.guard.wants(Action.SPARE_PAGES):
            return max(running, self.batch.pool.capacity // 10)
        return running

    def _make_room(self, head: Sequence, kept: Kept, now: float) -> bool:
        """Evicts running sequences for the head of the queue, if it helps: those of a higher
        standing, or of tenants with more than their share of the slots when its own has less."""
        slots, pool = self.batch.slots, self.batch.pool
        if self.policy.fair:
            tenant = self.ledger.number(head.request.tenant)
            candidates = over_their_share(slots, tenant, self.ledger.num_present)
        elif self.policy.evicts:
            candidates = evictable(slots, self.policy, above=self.policy.standing(head))
        else:
            return False
        if not candidates:
            return False
        pages = self.limits.pages_for(len(head.tokens)) + self._spare_pages() + kept.pages
        victims = victims_for(slots, pool, candidates, kept.slots + 1, pages)
        for victim in victims:
            self.preempt(victim, f"{head.request.id} goes first", now)
        return bool(victims)
