"""The scheduler: which tokens of which sequences the next device step computes.

Two doors for each step, `plan` and `absorb`, and one for each thing a client may do, `add`,
`abort`. It owns no clock and no randomness: time arrives as an argument, so the same calls give
the same plans, which is what replay, the simulator and multi-host lockstep rest on.

One sequence's life: add -> queue -> (admission: match prefix, count tokens, reserve pages) -> slot
-> prefill in chunks -> one token a step -> end. Running out of pages sends it back to the queue
with its tokens kept; coming back is the same admission again.

Plans run ahead: plan k+1 may be made before absorb k. Counters in SlotArray therefore say both what
is planned and what is known, and a row's token may be ON_DEVICE.
"""

from __future__ import annotations

import dataclasses
import heapq
import secrets
from collections.abc import Iterable

import numpy as np

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.scheduler.batch import ActiveBatch
from jaxserve.scheduler.budget import ChunkBudget, oldest_first, share_prefill
from jaxserve.scheduler.fairness import ServiceLedger
from jaxserve.scheduler.gate import Gate
from jaxserve.scheduler.guard import Action, Guard
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.plan import Decision, StepPlan
from jaxserve.scheduler.policy import POLICIES
from jaxserve.scheduler.preemption import choose_victim, evictable, victims_for
from jaxserve.scheduler.queue import FairQueue, WaitingQueue
from jaxserve.scheduler.rows import assemble, attach_logprobs, attach_scores, choose_rows
from jaxserve.scheduler.stats import Stats
from jaxserve.scheduler.stops import StopRules
from jaxserve.scheduler.vitals import Vitals
from jaxserve.types import (
    FinishReason,
    Request,
    RequestRefused,
    Sequence,
    StepResult,
    TokenEvent,
)


class Scheduler:
    """Owns the queue, the slots, the pages and the prefix cache. Single-threaded.

    cache_key: secret bytes for the prefix digests, drawn by the caller once a process.
    """

    def __init__(
        self, limits: Limits, config: SchedulerConfig | None = None, *, cache_key: bytes = b""
    ):
        config = config or SchedulerConfig()
        self.limits = limits
        self.config = config
        self._policy = POLICIES[config.policy]
        self._stats = Stats(slots=limits.num_slots, pages_total=limits.num_pages - 1)
        self._ledger = ServiceLedger(config.vtc_input_weight, config.vtc_output_weight)
        self._gate = Gate(limits, config)
        self._guard = Guard(config)
        target_ms = config.itl_target_ms
        self._budget = ChunkBudget(limits.token_budget, target_ms and target_ms / 1000)
        self._share = share_prefill if config.prefill_sharing else oldest_first
        self._batch = ActiveBatch(limits, cache_key)
        self._slots = self._batch.slots
        self._pool = self._batch.pool
        if self._policy.fair:
            self._queue = FairQueue(self._policy.key, self._ledger)
        else:
            self._queue = WaitingQueue(self._policy.key)
        self._open: dict[str, list[Sequence]] = {}  # request id -> choices that have not ended
        self._followers: dict[str, list[Sequence]] = {}  # choices 2..n, until the first's prompt
        self._num_followers = 0
        self._deadlines: list[tuple[float, int, Request]] = []  # heap; outlives its requests
        self._events: list[TokenEvent] = []  # ends decided outside absorb
        self._preempted: list[Decision] = []  # since the last plan
        self._serial = 0
        self._stops = StopRules(limits.vocab_size, limits.eos_ids)
        self._vitals = Vitals()

    @classmethod
    def from_config(
        cls,
        engine: EngineConfig,
        config: SchedulerConfig | None = None,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        cache_key: bytes | None = None,
    ) -> Scheduler:
        """The scheduler of an engine whose num_pages and max_model_len are worked out.

        cache_key None draws one. No plan depends on its value: only on which digests are equal.
        """
        limits = Limits.of_engine(engine, eos_ids, vocab_size)
        key = secrets.token_bytes(32) if cache_key is None else cache_key
        return cls(limits, config, cache_key=key)

    # Gauges

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + self._num_followers

    @property
    def has_work(self) -> bool:
        """Whether calling plan or take_events is of any use."""
        return bool(self._open or self._events)

    def stats(self) -> Stats:
        """A copy; other threads may ask for it."""
        return dataclasses.replace(
            self._stats,
            running=self.num_running,
            waiting=self.num_waiting,
            waiting_tokens=self._queue.num_tokens,
            pages_free=self._pool.num_available,
            pages_idle=self._pool.num_idle,
            fairness_gap=self._ledger.gap(),
            guard_actions=self._guard.in_force,
            guard_changes=self._guard.num_changes,
        )

    def predict(self, plan: StepPlan) -> float | None:
        """Seconds that the step will take, judged by those before it; None without any."""
        return self._budget.predict(plan.num_tokens)

    # What clients do

    def add(self, request: Request) -> None:
        """Queues the request's n choices. Raises RequestRefused, with the request untouched, when
        it can never run here, or not now."""
        try:
            self._check(request)
        except RequestRefused:
            self._stats.refusals += 1
            raise
        self._stats.requests += 1
        total = self.limits.max_total(request)
        choices = []
        for index in range(request.params.n):
            choices.append(Sequence(request, index, total, self._serial))
            self._serial += 1
        self._open[request.id] = choices
        self._gate.opened(request)
        self._ledger.opened(self._ledger.number(request.tenant), len(choices))
        self._enqueue(choices[0])
        if len(choices) > 1:
            self._followers[request.id] = choices[1:]
            self._num_followers += len(choices) - 1
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, choices[0].serial, request))

    def _check(self, request: Request) -> None:
        if request.id in self._open:
            raise RequestRefused(f"request id {request.id!r} is in use", param="request_id")
        self.limits.check(request)
        self._gate.check(request, self.num_waiting, self._queue.num_tokens)
        if self._is_shed(request):
            raise RequestRefused(
                "the engine is overloaded; try again later",
                code="queue_full",
                retry_after=self._gate.retry_after(self.num_waiting, request.arrival),
            )

    def _is_shed(self, request: Request) -> bool:
        """Whether the guard turns this arrival away."""
        if Action.SHED_GREEDIEST in self._guard.actions and self._ledger.is_greediest(
            request.tenant
        ):
            return True
        if Action.SHED_LOWEST not in self._guard.actions:
            return False
        worst = max(map(self._policy.standing, self._queue), default=0)
        return self._policy.standing(Sequence(request, 0, 0)) >= worst

    def abort(self, request_id: str) -> list[TokenEvent]:
        """Ends what is left of the request. An unknown or ended id is harmless."""
        return self._end_all(request_id, FinishReason.ABORT)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends one sequence on the engine's word (a stop string, a fault of its own). No event."""
        if sequence.finish is None:
            self._end(sequence, reason, stop_reason)

    def fail_all(self, error: Exception) -> list[TokenEvent]:
        """Ends everything, queued or running, with ERROR."""
        events = []
        for request_id in list(self._open):
            events += self._end_all(request_id, FinishReason.ERROR, error)
        self._forget_pool()
        return events

    def fail_running(self, error: Exception) -> list[TokenEvent]:
        """The KV pool is lost: ends what ran with ERROR; what waits goes on with the next pool."""
        events = []
        for sequence in self._slots.running():
            self._end(sequence, FinishReason.ERROR)
            events.append(TokenEvent(sequence, None, FinishReason.ERROR, error=error))
        self._forget_pool()
        return events

    def requeue_all(self) -> None:
        """The KV pool is lost: everything running goes back to the queue with its tokens, and
        nothing in the prefix cache is true any more. Plans in flight come to nothing."""
        for slot in np.flatnonzero(self._slots.active_N).tolist():
            self._preempt(slot, "the KV pool was rebuilt")
        self._forget_pool()

    def _forget_pool(self) -> None:
        self._batch.cache.clear()
        self._vitals.forget_steps()

    def take_events(self) -> list[TokenEvent]:
        """Ends that no step brought (deadlines that passed in plan). absorb returns them too, so
        an engine needs this only when plan returned None."""
        events, self._events = self._events, []
        return events

    # Planning

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when no row has anything to compute."""
        self._expire(now)
        changes = self._watch_signs(now)
        for slot in self._in_policy_order(self._batch.grow()):
            self._grow_in_shortage(slot, now)
        admits, admitted, waiting = self._admit(now)
        decode, prefill = choose_rows(self._slots, self.limits.page_size)
        if not len(decode) and not len(prefill):
            return None
        budget = self._tokens_of_step(len(decode))
        chunks = self._share(self._slots.pending(prefill), budget - len(decode))
        self._stats.steps += 1
        self._vitals.planned(self._stats.steps, now)
        preempted, self._preempted = tuple(self._preempted), []
        return assemble(
            self._slots,
            decode,
            prefill[chunks > 0],
            chunks[chunks > 0],
            step=self._stats.steps,
            admits=admits,
            admitted=admitted,
            preempted=preempted,
            waiting=waiting,
            guard=changes,
            budget=budget,
        )

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            choices = self._open.get(request.id)
            if choices and choices[0].request is request:  # an id may be in use again
                self._events += self._end_all(request.id, FinishReason.TIMEOUT)

    def _in_policy_order(self, slots: list[int]) -> list[int]:
        return sorted(slots, key=lambda slot: self._policy.key(self._slots.sequence_N[slot]))

    def _grow_in_shortage(self, slot: int, now: float) -> None:
        """One page for one row, at others' cost. A row that gets none sits this step out."""
        slots = self._slots
        while slots.active_N[slot]:  # it may be a victim itself
            if self._batch.grow_one(slot):
                return
            candidates = evictable(slots, self._policy)
            standing = slots.standing_N[slot]
            candidates = [c for c in candidates if slots.standing_N[c] >= standing]
            victim = choose_victim(slots, self._pool, candidates)
            if victim is None:
                return
            self._preempt(victim, f"slot {slot} needed its pages", now)

    def _preempt(self, slot: int, reason: str, now: float | None = None) -> None:
        """Back to the queue, tokens kept; its KV is computed again, or found, when it returns."""
        sequence = self._slots.sequence_N[slot]
        self._vacate(sequence)
        sequence.must_pass = len(sequence.tokens)
        sequence.num_preemptions += 1
        self._stats.preemptions += 1
        if now is not None:
            self._vitals.preempted(now)
        self._enqueue(sequence)
        self._preempted.append(Decision(sequence.id, reason))

    def _admit(self, now: float):
        """Fills free slots from the queue, in the policy's order, while pages last.

        Nobody overtakes the head of the queue: a large request that waits for pages gets them.
        Returns the plan's (admits, admitted, waiting).
        """
        admits, admitted = [], []
        head = self._queue.peek()
        if head is None:
            return (), (), ()
        why_not = self._why_closed()
        while head is not None and why_not is None:
            why_not = self._admit_one(head, admits, admitted)
            if why_not is not None and self._make_room(head, now):
                why_not = self._admit_one(head, admits, admitted)
            if why_not is None:
                head = self._queue.peek()
        if admits:
            self._gate.drained(len(admits), now)
        waiting = () if head is None else (Decision(head.id, why_not),)
        return tuple(admits), tuple(admitted), waiting

    def _why_closed(self) -> str | None:
        """Why nobody at all is admitted now."""
        if not self._slots.num_running:
            return None
        if self.limits.batching == "static":
            return "the static batch is still running"
        if Action.STATIC_BATCHING in self._guard.actions:
            return "the guard fell back to static batching"
        if Action.PAUSE_ADMISSION in self._guard.actions:
            return "the guard paused admission"
        return None

    def _admit_one(self, sequence: Sequence, admits: list, admitted: list) -> str | None:
        """Gives the head of the queue a slot and pages. Returns why not."""
        tenant = self._ledger.number(sequence.request.tenant)
        standing = self._policy.standing(sequence)
        admission = self._batch.admit(sequence, self._spare_pages(), tenant, standing)
        if admission.slot is None:
            return admission.why_not
        self._dequeue(sequence)
        self._stops.admit(sequence)
        known, cached, verb = len(sequence.tokens), admission.num_cached, "resumed"
        if not sequence.num_preemptions:
            verb = "admitted"
            sequence.num_cached = cached
            self._stats.prefix_query_tokens += known
            self._stats.prefix_hit_tokens += cached
            self._ledger.charge_input(tenant, known - cached)
        admits.append((admission.slot, sequence))
        admitted.append(Decision(sequence.id, f"{verb}, {cached} of {known} tokens cached"))
        return None

    def _spare_pages(self) -> int:
        """Pages an admission leaves free: one for each running row to grow into, lest it end in a
        preemption. With nothing running, all may go."""
        running = self._slots.num_running
        if running and Action.SPARE_PAGES in self._guard.actions:
            return max(running, self._pool.capacity // 10)
        return running

    def _make_room(self, head: Sequence, now: float) -> bool:
        """Evicts running sequences of a higher standing for the head of the queue, if it helps."""
        candidates = evictable(self._slots, self._policy, above=self._policy.standing(head))
        if not candidates:
            return False
        needed = self.limits.pages_for(len(head.tokens)) + self._spare_pages()
        victims = victims_for(self._slots, self._pool, candidates, needed)
        for victim in victims:
            self._preempt(victim, f"{head.request.id} goes first", now)
        return bool(victims)

    def _tokens_of_step(self, num_decode: int) -> int:
        budget = self._budget.tokens(num_decode)
        if Action.SMALLER_CHUNKS in self._guard.actions:
            budget = num_decode + -(-(budget - num_decode) // 2)
        return max(budget, min(num_decode + 1, self.limits.token_budget))

    def _watch_signs(self, now: float) -> tuple[str, ...]:
        if not self._guard.is_due(now):
            return ()
        arrival = min((s.request.arrival for s in self._queue.entered_first()), default=now)
        readings = {
            "queue_age_s": now - arrival,
            "itl_p99_s": self._vitals.take_itl_p99(),
            "fairness_gap": self._ledger.gap(),
            "preemptions_per_min": self._vitals.preemptions_per_min(now),
            "page_pressure": 1 - self._pool.num_available / self._pool.capacity,
        }
        return tuple(map(str, self._guard.look(readings, now)))

    # Absorbing

    def absorb(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Takes in what a step brought: appends tokens, publishes pages, ends what has ended.

        Rows whose slot changed hands since the plan are dropped: their sequence ended or was
        preempted, and a token that nobody awaits is nobody's.
        """
        self._budget.observe(plan.num_tokens, self._vitals.absorbed(plan, now))
        events = self.take_events()
        live_S = self._slots.generation_N[plan.slot_S] == plan.generation_S
        rows = live_S.nonzero()[0]
        self._stats.computed_tokens += self._batch.advance(plan, rows)
        sampled = (live_S & plan.samples_S).nonzero()[0]
        first_event = len(events)
        ended = self._append(plan, result, sampled, events)
        if result.prompt_scores:
            attach_scores(plan, result, live_S, sampled, events, first_event)
        for event, reason, stop_reason in ended:
            event.finish = reason
            self._end(event.sequence, reason, stop_reason)
        for row in rows[~plan.samples_S[rows]].tolist():  # prompt chunks; few
            self._end_if_scored(plan.sequences[row], result.pooled.get(row), events)
        if self._followers:
            self._queue_followers()
        return events

    def _append(self, plan: StepPlan, result: StepResult, rows, events: list[TokenEvent]):
        """A token and an event for each sampled row. Returns (event, reason, stop id) of ends."""
        slots = self._slots
        slot_S = plan.slot_S[rows]
        token_S = result.token_S[rows]
        known_S = slots.known_N[slot_S] + 1
        slots.known_N[slot_S] = known_S
        slots.last_token_N[slot_S] = token_S
        self._stats.generation_tokens += len(rows)
        self._ledger.charge_outputs(slots.tenant_N[slot_S])
        first = len(events)
        sequences = plan.sequences
        for row, token in zip(rows.tolist(), token_S.tolist()):
            sequence = sequences[row]
            sequence.tokens.append(token)
            events.append(TokenEvent(sequence, token))
        if result.logprob_S is not None:
            for at in np.flatnonzero(slots.scores_N[slot_S]).tolist():
                attach_logprobs(events[first + at], result, rows[at])
        full_S = known_S >= slots.max_total_N[slot_S]
        ended = []
        for at in (full_S | self._stops.suspects(token_S)).nonzero()[0].tolist():
            event = events[first + at]
            if self._stops.ends(event.sequence, event.token):
                # An end token at the very last place is still the model's own end.
                ended.append((event, FinishReason.STOP, event.token))
            elif full_S[at]:
                ended.append((event, FinishReason.LENGTH, None))
        return ended

    def _end_if_scored(self, sequence: Sequence, pooled, events: list[TokenEvent]) -> None:
        """A request for no tokens ends when its prompt is computed, with what was pooled of it."""
        computed = self._slots.computed_N[sequence.slot]
        if sequence.max_total == sequence.num_prompt and computed == sequence.num_prompt:
            events.append(TokenEvent(sequence, None, FinishReason.LENGTH, pooled=pooled))
            self._end(sequence, FinishReason.LENGTH)

    def _queue_followers(self) -> None:
        """Choices 2..n enter when the first one's prompt is computed: they share its pages."""
        for request_id in list(self._followers):
            first = self._open[request_id][0]
            if first.slot is None or self._slots.computed_N[first.slot] < first.num_prompt:
                continue
            for sequence in self._take_followers(request_id):
                self._enqueue(sequence)

    def _take_followers(self, request_id: str) -> list[Sequence]:
        followers = self._followers.pop(request_id, [])
        self._num_followers -= len(followers)
        return followers

    # Queue and ends

    def _enqueue(self, sequence: Sequence) -> None:
        self._ledger.enter(self._ledger.number(sequence.request.tenant))
        self._queue.push(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)
        self._ledger.leave(self._ledger.number(sequence.request.tenant))

    def _end_all(
        self, request_id: str, reason: FinishReason, error: Exception | None = None
    ) -> list[TokenEvent]:
        events = []
        self._take_followers(request_id)
        for sequence in list(self._open.get(request_id, ())):
            self._end(sequence, reason)
            events.append(TokenEvent(sequence, None, reason, error=error))
        return events

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason=None) -> None:
        """The one place where a sequence ends."""
        assert sequence.finish is None, f"{sequence} ended twice"
        request = sequence.request
        if sequence.slot is not None:
            self._vacate(sequence)
        elif sequence in self._queue:
            self._dequeue(sequence)
        sequence.finish = reason
        sequence.stop_reason = stop_reason
        self._ledger.closed(self._ledger.number(request.tenant))
        for follower in self._take_followers(request.id):
            self._enqueue(follower)  # the first choice ended before its prompt was computed
        choices = self._open[request.id]
        choices.remove(sequence)
        if not choices:
            del self._open[request.id]
            self._gate.closed(request)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        self._stops.leave(sequence)
        self._batch.vacate(sequence)

    def check_invariants(self) -> None:
        """Asserts everything that must hold between two calls. For tests and debugging."""
        self._batch.check_invariants()
        placed = [*self._slots.running(), *self._queue]
        for followers in self._followers.values():
            placed += followers
        everyone = [sequence for choices in self._open.values() for sequence in choices]
        assert sorted(s.id for s in placed) == sorted(s.id for s in everyone)
        assert all(s.finish is None for s in everyone)
        self._stops.check_invariants(self._slots.running())
        self._ledger.check_invariants(everyone, self._queue)
        if not self._open:
            assert self._pool.num_available == self._pool.capacity, "pages leaked"
