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
import secrets
from collections.abc import Iterable

import numpy as np

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.scheduler.batch import ActiveBatch
from jaxserve.scheduler.budget import MIN_CHUNK, ChunkBudget, oldest_first, share_prefill
from jaxserve.scheduler.fairness import ServiceLedger
from jaxserve.scheduler.gate import Gate
from jaxserve.scheduler.guard import Action, Guard
from jaxserve.scheduler.host_pages import HostPages
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.plan import Decision, StepPlan
from jaxserve.scheduler.policy import POLICIES
from jaxserve.scheduler.preemption import choose_victim, evictable
from jaxserve.scheduler.queue import FairQueue, WaitingQueue
from jaxserve.scheduler.refill import Refill
from jaxserve.scheduler.requests import OpenRequests
from jaxserve.scheduler.rows import assemble, attach_logprobs, attach_scores, choose_rows
from jaxserve.scheduler.shares import right_of_way
from jaxserve.scheduler.stats import Standing, Stats
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
    on_paper: for a simulation. The same decisions, but plans come without token ids and page
      tables, and absorb tells of ends only: nobody reads the rest, and it is half of the work.
    """

    def __init__(
        self,
        limits: Limits,
        config: SchedulerConfig | None = None,
        *,
        cache_key: bytes = b"",
        on_paper: bool = False,
    ):
        config = config or SchedulerConfig()
        self.limits = limits
        self.config = config
        self._on_paper = on_paper
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
        keys = (self._policy.key, self._policy.short_key if config.prefill_sharing else None)
        fair = self._policy.fair
        self._queue = FairQueue(self._ledger, *keys) if fair else WaitingQueue(*keys)
        self._requests = OpenRequests(self._queue, self._ledger, self._gate)
        self._events: list[TokenEvent] = []  # ends decided outside absorb
        self._preempted: list[Decision] = []  # since the last plan
        self._changes: list[str] = []  # of the guard, since the last plan
        self._host = HostPages(limits.host_pages, limits.swap_s_per_page)
        self._stops = StopRules(limits.vocab_size, limits.eos_ids)
        self._vitals = Vitals()
        self._batch_width = 0  # rows that a static batch began with
        self._refill = Refill(
            limits=limits,
            policy=self._policy,
            batch=self._batch,
            requests=self._requests,
            ledger=self._ledger,
            gate=self._gate,
            guard=self._guard,
            host=self._host,
            stops=self._stops,
            stats=self._stats,
            preempt=self._preempt,
        )

    @classmethod
    def from_config(
        cls,
        engine: EngineConfig,
        config: SchedulerConfig | None = None,
        *,
        eos_ids: Iterable[int],
        vocab_size: int,
        page_bytes: int = 0,
        cache_key: bytes | None = None,
    ) -> Scheduler:
        """The scheduler of an engine whose num_pages and max_model_len are worked out, and whose KV
        pages have page_bytes.

        cache_key None draws one. No plan depends on its value: only on which digests are equal.
        """
        limits = Limits.of_engine(engine, eos_ids, vocab_size, page_bytes)
        key = secrets.token_bytes(32) if cache_key is None else cache_key
        return cls(limits, config, cache_key=key)

    # Gauges

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        return self._requests.num_waiting

    @property
    def has_work(self) -> bool:
        """Whether calling plan or take_events is of any use."""
        return bool(self._requests or self._events)

    @property
    def admits_arrivals(self) -> bool:
        """Whether one that arrives now may be in the next plan: a slot is free or comes free with
        it, or one that runs may have to give its own."""
        if self.limits.batching == "static":
            return False
        slots, policy = self._slots, self._policy
        return bool(slots.num_free or policy.fair or policy.evicts or slots.num_ending)

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
            host_pages_kept=self._host.num_kept,
        )

    def standings(self) -> list[Standing]:
        """Who has had how much service, of the tenants here; other threads may ask."""
        return self._ledger.standings()

    def predict(self, plan: StepPlan) -> float | None:
        """Seconds that the step will take, judged by those before it; None without any."""
        return self._budget.predict(plan.size)

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
        self._requests.add(request, self.limits.max_total(request))

    def _check(self, request: Request) -> None:
        if request.id in self._requests:
            raise RequestRefused(f"request id {request.id!r} is in use", param="request_id")
        self.limits.check(request)
        self._gate.check(request, self.num_waiting, self._queue.num_tokens)
        if self._is_shed(request):
            raise RequestRefused(
                "the engine is overloaded; try again later",
                code="queue_full",
                retry_after=self.retry_after(request.arrival),
            )

    def retry_after(self, now: float) -> float:
        """Seconds after which a request that the full queue refuses may come again. Other threads
        may ask."""
        return self._gate.retry_after(self.num_waiting, now)

    def _is_shed(self, request: Request) -> bool:
        """Whether the guard turns this arrival away."""
        if self._guard.wants(Action.SHED_GREEDIEST) and self._ledger.is_greediest(request.tenant):
            return True
        if not self._guard.wants(Action.SHED_LOWEST) or not len(self._queue):
            return False  # with nobody waiting there is nothing to relieve, however long it was
        worst = max(map(self._policy.standing, self._queue))
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

    def hold(self, sequence: Sequence) -> None:
        """Plans nothing for a running sequence until release: the engine cannot choose its next
        token yet. One that has no slot is left as it is, here and there."""
        if sequence.slot is not None:
            self._slots.held_N[sequence.slot] = True

    def release(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._slots.held_N[sequence.slot] = False

    def leave_out(self, plan: StepPlan, row: int) -> None:
        """Takes a row out of the last plan and holds its sequence. The step computes it all the
        same, but absorb drops that, and once released the same tokens are planned again."""
        slot = plan.slot_S[row]
        if self._slots.generation_N[slot] == plan.generation_S[row]:
            self._slots.take_back(slot, plan.start_S[row], plan.samples_S[row])
            self.hold(plan.sequences[row])

    def fail_all(self, error: Exception) -> list[TokenEvent]:
        """Ends everything, queued or running, with ERROR."""
        events = []
        for request_id in self._requests.ids:
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
        self._host.forget(self._queue)
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
        self._watch_signs(now)
        in_need = self._batch.grow()
        for slot in self._in_policy_order(in_need) if in_need else ():
            self._grow_in_shortage(slot, now)
        refilled = self._refill(now)
        decode, prefill = choose_rows(self._slots)
        if not len(decode) and not len(prefill):
            return None
        idle = self._num_idle(len(refilled.admits), len(decode) + len(prefill))
        budget, chunks = self._tokens_of_step(len(decode) + idle), prefill
        if len(prefill):
            chunks = self._chunks(prefill, budget - len(decode) - idle)
            prefill, chunks = prefill[chunks > 0], chunks[chunks > 0]
        self._stats.steps += 1
        self._vitals.planned(self._stats.steps, now)
        preempted, self._preempted = tuple(self._preempted), []
        changes, self._changes = tuple(self._changes), []
        swap_out, swap_in = self._host.take_copies()
        return assemble(
            self._slots,
            decode,
            prefill,
            chunks,
            on_paper=self._on_paper,
            step=self._stats.steps,
            admits=tuple(refilled.admits),
            admitted=tuple(refilled.admitted),
            preempted=preempted,
            swap_out=swap_out,
            swap_in=swap_in,
            waiting=tuple(refilled.waiting),
            guard=changes,
            budget=budget,
            idle=idle,
        )

    def _expire(self, now: float) -> None:
        for request_id in self._requests.take_expired(now):
            self._events += self._end_all(request_id, FinishReason.TIMEOUT)

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
            self._vitals.preempted(now)

    def _preempt(self, slot: int, reason: str, now: float | None = None) -> None:
        """Back to the queue, tokens kept; when it returns, its KV is found, fetched or computed
        again. now None: the KV is lost, so there is nothing to fetch."""
        sequence = self._slots.sequence_N[slot]
        if now is not None:
            computed = int(self._slots.computed_N[slot])
            pages = self._slots.pages(slot)[: self.limits.pages_for(computed)]
            reason += self._host.keep(sequence, computed, pages, self._budget.recompute_s(computed))
        self._vacate(sequence)
        sequence.must_pass = len(sequence.tokens)
        sequence.num_preemptions += 1
        self._stats.preemptions += 1
        self._requests.enqueue(sequence)
        self._preempted.append(Decision(sequence.id, reason))

    def _num_idle(self, num_admitted: int, num_rows: int) -> int:
        """Rows that have nothing to compute and take their part of the step all the same: of a
        static batch, those that wait for its slowest one."""
        if self.limits.batching != "static":
            return 0
        self._batch_width = num_admitted or self._batch_width  # nobody joins a batch that runs
        return self._batch_width - num_rows

    def _tokens_of_step(self, num_decode: int) -> int:
        budget = self._budget.tokens(num_decode)
        if self._guard.wants(Action.SMALLER_CHUNKS):
            budget = num_decode + -(-(budget - num_decode) // 2)
        return max(budget, min(num_decode + 1, self.limits.token_budget))

    def _chunks(self, prefill: np.ndarray, budget: int) -> np.ndarray:
        """Tokens for the prompt in each of these slots."""
        pending = self._slots.pending(prefill)
        if self._policy.fair and len(prefill) > 1:
            first = right_of_way(self._slots, prefill, self._ledger.num_present)
            if first.any() and not first.all():
                chunks = np.zeros_like(pending)
                chunks[first] = self._share(pending[first], budget)
                left = min(budget - int(chunks.sum()), MIN_CHUNK)
                chunks[~first] = self._share(pending[~first], left)
                return chunks
        return self._share(pending, budget)

    def _watch_signs(self, now: float) -> None:
        if not self._guard.is_due(now):
            return
        readings = {
            "queue_age_s": lambda: now - self._oldest_arrival(now),
            "itl_p99_s": self._vitals.take_itl_p99,
            "fairness_gap": self._ledger.gap,
            "preemptions_per_min": lambda: self._vitals.preemptions_per_min(now),
            "page_pressure": lambda: 1 - self._pool.num_available / self._pool.capacity,
        }
        self._changes += map(str, self._guard.look(readings, now))

    def _oldest_arrival(self, now: float) -> float:
        return min((s.request.arrival for s in self._queue.entered_first()), default=now)

    # Absorbing

    def absorb(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Takes in what a step brought: appends tokens, publishes pages, ends what has ended.

        Rows whose sequence ended or was preempted since the plan are dropped: a token that nobody
        awaits is nobody's.
        """
        self._budget.observe(plan.size, self._vitals.absorbed(plan, now))
        events = self.take_events()
        slot_S, live_S = self._slots.find(plan.slot_S, plan.generation_S)
        rows = live_S.nonzero()[0]
        self._stats.computed_tokens += self._batch.advance(slot_S[rows], plan.end_S[rows])
        sampled = (live_S & plan.samples_S).nonzero()[0]
        first_event = len(events)
        ended = self._append(plan, result, slot_S[sampled], sampled, events)
        if result.prompt_scores:
            attach_scores(plan, result, live_S, sampled, events, first_event)
        for event, (reason, stop_reason) in ended:
            event.finish = reason
            self._end(event.sequence, reason, stop_reason)
        if len(sampled) < len(rows):
            for row in rows[~plan.samples_S[rows]].tolist():  # prompt chunks; few
                self._end_if_scored(plan.sequences[row], result.pooled.get(row), events)
        self._requests.queue_followers(self._slots.computed_N)
        return events

    def _append(self, plan: StepPlan, result: StepResult, slot_S, rows, events: list[TokenEvent]):
        """A token and an event for each sampled row, given these rows and their slots.

        Returns the events of those that have ended, each with (reason, stop id).
        """
        slots = self._slots
        token_S = result.token_S[rows]
        known_S = slots.known_N[slot_S] + 1
        slots.known_N[slot_S] = known_S
        slots.last_token_N[slot_S] = token_S
        self._stats.generation_tokens += len(rows)
        self._ledger.charge_outputs(slots.tenant_N[slot_S])
        tokens, sequences = token_S.tolist(), plan.sequences
        if len(rows) < len(sequences):
            sequences = [sequences[row] for row in rows.tolist()]
        for sequence, token in zip(sequences, tokens):
            sequence.tokens.append(token)
        full_S = known_S >= slots.max_total_N[slot_S]
        ends = self._stops.find_ends(sequences, token_S, tokens, full_S)
        if self._on_paper:
            last = [TokenEvent(sequences[at], tokens[at]) for at in ends]
            events += last
            return list(zip(last, ends.values()))
        first = len(events)
        events += map(TokenEvent, sequences, tokens)
        if result.logprob_S is not None:
            for at in slots.scores_N[slot_S].nonzero()[0].tolist():
                attach_logprobs(events[first + at], result, rows[at])
        return [(events[first + at], end) for at, end in ends.items()]

    def _end_if_scored(self, sequence: Sequence, pooled, events: list[TokenEvent]) -> None:
        """A request for no tokens ends when its prompt is computed, with what was pooled of it."""
        computed = self._slots.computed_N[sequence.slot]
        if sequence.max_total == sequence.num_prompt and computed == sequence.num_prompt:
            events.append(TokenEvent(sequence, None, FinishReason.LENGTH, pooled=pooled))
            self._end(sequence, FinishReason.LENGTH)

    # Ends

    def _end_all(
        self, request_id: str, reason: FinishReason, error: Exception | None = None
    ) -> list[TokenEvent]:
        events = []
        self._requests.drop_followers(request_id)
        for sequence in self._requests.choices(request_id):
            self._end(sequence, reason)
            events.append(TokenEvent(sequence, None, reason, error=error))
        return events

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason=None) -> None:
        """The one place where a sequence ends."""
        assert sequence.finish is None, f"{sequence} ended twice"
        if sequence.slot is not None:
            self._vacate(sequence)
        elif sequence in self._queue:
            self._requests.dequeue(sequence)
        self._host.drop(sequence)
        sequence.finish = reason
        sequence.stop_reason = stop_reason
        self._requests.close(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        self._stops.leave(sequence)
        self._batch.vacate(sequence)

    def check_invariants(self) -> None:
        """Asserts everything that must hold between two calls. For tests and debugging."""
        self._batch.check_invariants()
        running = self._slots.running()
        self._requests.check_invariants(running)
        self._stops.check_invariants(running)
        self._host.check_invariants(list(self._queue), running)
        if not self._requests:
            assert self._pool.num_available == self._pool.capacity, "pages leaked"
