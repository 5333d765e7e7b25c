"""The scheduler: which tokens of which sequences the next device step computes.

Two doors for each step, `plan` and `absorb`, and one for each thing a client may do, `add`,
`abort`. It owns no clock and no randomness: time arrives as an argument, so the same calls give
the same plans, which is what replay, the simulator and multi-host lockstep rest on.

One sequence's life: add -> queue -> (admission: match prefix, count tokens, reserve pages) -> slot
-> prefill in chunks -> one token a step -> end. Running out of pages sends it back to the queue
with its tokens kept; coming back is the same admission again.

Plans run ahead: plan k+1 may be made before absorb k. Counters in SlotArray therefore say both what
is planned and what is known, and a row's token may be ON_DEVICE.

Why pages may be freed while a dispatched step still writes to them: steps run on the device in the
order of their plans. A page freed at plan or absorb time is handed out in a later plan at the
earliest, so its new owner's writes come after the stray ones, and it reads nothing that it has
not written itself. A published page is never hit by a stray write: only pages full of *computed*
tokens are published, and a step in flight writes at computed or later positions.
"""

from __future__ import annotations

import dataclasses
import heapq
import secrets
from collections.abc import Iterable

import numpy as np

from jaxserve.cache.page_pool import PagePool
from jaxserve.cache.prefix_cache import PrefixCache
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.scheduler import policy as policies
from jaxserve.scheduler.budget import share_prefill
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.plan import ON_DEVICE, Decision, StepPlan
from jaxserve.scheduler.queue import WaitingQueue
from jaxserve.scheduler.slots import SlotArray
from jaxserve.types import (
    FinishReason,
    PromptScores,
    Request,
    RequestRefused,
    Sequence,
    StepResult,
    TokenEvent,
)


@dataclasses.dataclass(slots=True)
class Stats:
    """Gauges as of now, and counts since the start."""

    slots: int = 0
    running: int = 0
    waiting: int = 0  # sequences, choices that wait for their first one included
    waiting_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0  # free, or idle in the prefix cache
    pages_idle: int = 0
    steps: int = 0
    requests: int = 0
    refusals: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0  # prompt tokens of admitted sequences, each sequence once
    prefix_hit_tokens: int = 0  # of those, served by the prefix cache
    computed_tokens: int = 0  # prompt and output, recomputation included
    generation_tokens: int = 0


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
        self._stats = Stats(slots=limits.num_slots, pages_total=limits.num_pages - 1)
        self._key = policies.KEYS[config.policy]
        self._pool = PagePool(limits.num_pages)
        self._cache = PrefixCache(self._pool, limits.page_size, cache_key)
        self._slots = SlotArray(limits.num_slots, limits.pages_per_row)
        self._queue = WaitingQueue(self._key)
        self._open: dict[str, list[Sequence]] = {}  # request id -> choices that have not ended
        self._followers: dict[str, list[Sequence]] = {}  # choices 2..n, until the first's prompt
        self._deadlines: list[tuple[float, int, Request]] = []  # heap; outlives its requests
        self._events: list[TokenEvent] = []  # ends decided outside absorb
        self._preempted: list[Decision] = []  # since the last plan
        self._serial = 0
        # How many running sequences end at each token id; end-of-text ids count always.
        self._watched_V = np.zeros(limits.vocab_size, np.int32)
        self._eos = frozenset(limits.eos_ids)
        self._watched_V[list(self._eos)] = 1

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
        limits = Limits(
            num_slots=engine.num_slots,
            num_pages=engine.num_pages,
            page_size=engine.page_size,
            token_budget=engine.token_budget,
            max_model_len=engine.max_model_len,
            vocab_size=vocab_size,
            eos_ids=tuple(sorted(eos_ids)),
            prefix_caching=engine.prefix_caching,
            batching=engine.batching,
            max_queued=engine.max_queued,
            max_queued_tokens=engine.max_queued_tokens,
        )
        if cache_key is None:
            cache_key = secrets.token_bytes(32)
        return cls(limits, config, cache_key=cache_key)

    # Gauges

    @property
    def num_running(self) -> int:
        return self._slots.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + sum(map(len, self._followers.values()))

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
        )

    # What clients do

    def add(self, request: Request) -> None:
        """Queues the request's n choices. Raises RequestRefused, with the request untouched, when
        it can never run here or the queue is full."""
        try:
            if request.id in self._open:
                raise RequestRefused(f"request id {request.id!r} is in use", param="request_id")
            self.limits.check(request)
            self._check_queue(request)
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
        self._queue.push(choices[0])
        if len(choices) > 1:
            self._followers[request.id] = choices[1:]
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, choices[0].serial, request))

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
        return events

    def requeue_all(self) -> None:
        """The KV pool is lost: everything running goes back to the queue with its tokens, and
        nothing in the prefix cache is true any more. Plans in flight come to nothing."""
        for slot in np.flatnonzero(self._slots.active_N).tolist():
            self._preempt(slot, "the KV pool was rebuilt")
        self._cache.clear()

    def take_events(self) -> list[TokenEvent]:
        """Ends that no step brought (deadlines that passed in plan). absorb returns them too, so
        an engine needs this only when plan returned None."""
        events, self._events = self._events, []
        return events

    # Planning

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when no row has anything to compute."""
        self._expire(now)
        self._grow()
        admits, admitted, waiting = self._admit()
        decode, prefill, chunks = self._choose_rows()
        if not len(decode) and not len(prefill):
            return None
        preempted, self._preempted = tuple(self._preempted), []
        return self._assemble(decode, prefill, chunks, admits, admitted, preempted, waiting)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            choices = self._open.get(request.id)
            if choices and choices[0].request is request:  # an id may be in use again
                self._events += self._end_all(request.id, FinishReason.TIMEOUT)

    def _grow(self) -> None:
        """A page for each decoding row whose next token begins one."""
        slots, size = self._slots, self.limits.page_size
        pending_N = slots.tokens_N - slots.planned_N
        needs_N = (
            (pending_N == 1)
            & (slots.planned_N == slots.num_pages_N * size)
            & (slots.tokens_N < slots.stop_at_N)
        )
        needy = np.flatnonzero(needs_N)
        if not len(needy):
            return
        pages = self._pool.reserve(len(needy))
        if pages is not None:
            self._attach(needy, pages)
            return
        for slot in sorted(needy.tolist(), key=lambda slot: self._key(slots.sequence_N[slot])):
            self._grow_in_shortage(slot)

    def _grow_in_shortage(self, slot: int) -> None:
        """One page for one row, at others' cost. A row that gets none sits this step out."""
        while self._slots.active_N[slot]:  # it may be a victim itself
            page = self._pool.reserve(1)
            if page is not None:
                self._attach([slot], page)
                return
            victim = self._choose_victim()
            if victim is None:
                return
            self._preempt(victim, "another row needed its pages")

    def _attach(self, slots, pages: list[int]) -> None:
        self._slots.page_table_NP[slots, self._slots.num_pages_N[slots]] = pages
        self._slots.num_pages_N[slots] += 1

    def _choose_victim(self) -> int | None:
        """The slot whose eviction costs the least recomputation for each page it frees.

        Never the row that the policy serves first, so something always gets done; never a row that
        came back and has not advanced since, so nobody is evicted twice for nothing. Such a row has
        pages for every token it has, hence can advance without a new one.
        """
        slots = self._slots
        running = np.flatnonzero(slots.active_N).tolist()
        first = min(running, key=lambda slot: self._key(slots.sequence_N[slot]))
        best, best_cost = None, None
        for slot in running:
            if slot == first or slots.known_N[slot] <= slots.must_pass_N[slot]:
                continue
            if slots.tokens_N[slot] >= slots.stop_at_N[slot]:
                continue  # its last token is on its way, and all its pages come free with it
            held = slots.page_table_NP[slot, : slots.num_pages_N[slot]]
            freed = np.count_nonzero(self._pool.references_G[held] == 1)
            if not freed:
                continue
            cost = (slots.planned_N[slot] / freed, -slots.order_N[slot])
            if best is None or cost < best_cost:
                best, best_cost = slot, cost
        return best

    def _preempt(self, slot: int, reason: str) -> None:
        sequence = self._slots.sequence_N[slot]
        self._vacate(sequence)
        sequence.must_pass = len(sequence.tokens)
        sequence.num_preemptions += 1
        self._stats.preemptions += 1
        self._queue.push(sequence)
        self._preempted.append(Decision(sequence.id, reason))

    def _admit(self):
        """Fills free slots from the queue, in the policy's order, while pages last.

        Nobody overtakes the head of the queue: a large request that waits for pages gets them.
        Returns the plan's (admits, admitted, waiting).
        """
        admits, admitted = [], []
        head = self._queue.peek()
        if head is None:
            return (), (), ()
        if self.limits.batching == "static" and self._slots.num_running:
            return (), (), (Decision(head.id, "the static batch is still running"),)
        why_not = None
        while head is not None and why_not is None:
            if not self._slots.num_free:
                why_not = "every slot is taken"
                break
            why_not = self._admit_one(head, admits, admitted)
            if why_not is None:
                head = self._queue.peek()
        waiting = () if head is None else (Decision(head.id, why_not),)
        return tuple(admits), tuple(admitted), waiting

    def _admit_one(self, sequence: Sequence, admits: list, admitted: list) -> str | None:
        """Match prefix, count tokens, reserve pages: here and nowhere else. Returns why not."""
        known = len(sequence.tokens)
        hits = self._match(sequence)
        needed = self.limits.pages_for(known) - len(hits)
        self._pool.share(hits)  # first: reserving could evict them
        # A page for each running row to grow into, lest this admission end in a preemption.
        if needed + self._slots.num_running > self._pool.num_available:
            self._pool.release(hits)
            return (
                f"needs {needed} pages and leaves {self._slots.num_running} to running rows; "
                f"{self._pool.num_available} are free"
            )
        pages = hits + self._pool.reserve(needed)
        cached = len(hits) * self.limits.page_size
        self._queue.remove(sequence)
        slot = self._slots.admit(sequence, pages, cached)
        self._watch(sequence, 1)
        if not sequence.num_preemptions:
            sequence.num_cached = cached
            self._stats.prefix_query_tokens += known
            self._stats.prefix_hit_tokens += cached
        admits.append((slot, sequence))
        verb = "resumed" if sequence.num_preemptions else "admitted"
        admitted.append(Decision(sequence.id, f"{verb}, {cached} of {known} tokens cached"))
        return None

    def _match(self, sequence: Sequence) -> list[int]:
        """Pages that hold its beginning already; its last token at least is left to compute."""
        if not self.limits.prefix_caching:
            return []
        scored = sequence.index == 0 and sequence.request.params.prompt_logprobs is not None
        if scored and sequence.num_scored < sequence.num_prompt:
            return []  # a position must be computed to be scored, and choice 0 scores for all
        most = (len(sequence.tokens) - 1) // self.limits.page_size
        return self._cache.match(
            sequence.page_chain, sequence.tokens, sequence.request.cache_salt, most
        )

    def _choose_rows(self):
        """Every row with one token left to compute, then chunks of longer ones in what is left."""
        slots = self._slots
        pending_N = slots.tokens_N - slots.planned_N
        covered_N = slots.planned_N < slots.num_pages_N * self.limits.page_size
        runs_N = covered_N & (slots.tokens_N < slots.stop_at_N)
        decode = np.flatnonzero(runs_N & (pending_N == 1))
        prefill = np.flatnonzero(runs_N & (pending_N > 1))
        if not len(prefill):
            return decode, prefill, prefill
        prefill = prefill[np.argsort(slots.order_N[prefill], kind="stable")]
        chunks = share_prefill(pending_N[prefill], self.limits.token_budget - len(decode))
        return decode, prefill[chunks > 0], chunks[chunks > 0]

    def _assemble(self, decode, prefill, chunks, admits, admitted, preempted, waiting) -> StepPlan:
        """The plan of these rows; from here on their tokens count as planned."""
        slots = self._slots
        num_decode = len(decode)
        row_S = np.concatenate([decode, prefill])
        count_S = np.concatenate([np.ones(num_decode, np.int32), chunks]).astype(np.int32)
        start_S = slots.planned_N[row_S]
        total_S = slots.tokens_N[row_S]
        cu_q_len_S1 = np.zeros(len(row_S) + 1, np.int32)
        np.cumsum(count_S, out=cu_q_len_S1[1:])
        end_S = start_S + count_S
        samples_S = (end_S == total_S) & (total_S < slots.max_total_N[row_S])

        token_ids_T = np.empty(cu_q_len_S1[-1], np.int32)
        in_flight = total_S[:num_decode] > slots.known_N[decode]
        token_ids_T[:num_decode] = np.where(in_flight, ON_DEVICE, slots.last_token_N[decode])
        for row in range(num_decode, len(row_S)):
            tokens = slots.sequence_N[row_S[row]].tokens[start_S[row] : end_S[row]]
            token_ids_T[cu_q_len_S1[row] : cu_q_len_S1[row + 1]] = tokens

        slots.planned_N[row_S] = end_S
        slots.tokens_N[row_S] = total_S + samples_S
        self._stats.steps += 1
        return StepPlan(
            step=self._stats.steps,
            sequences=tuple(slots.sequence_N[row_S].tolist()),
            slot_S=row_S.astype(np.int32),
            generation_S=slots.generation_N[row_S],
            start_S=start_S,
            cu_q_len_S1=cu_q_len_S1,
            samples_S=samples_S,
            token_ids_T=token_ids_T,
            page_table_SP=slots.page_table_NP[row_S],
            num_decode=num_decode,
            admits=admits,
            admitted=admitted,
            preempted=preempted,
            waiting=waiting,
        )

    # Absorbing

    def absorb(self, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        """Takes in what a step brought: appends tokens, publishes pages, ends what has ended.

        Rows whose slot changed hands since the plan are dropped: their sequence ended or was
        preempted, and a token that nobody awaits is nobody's.
        """
        del now  # the doors of a step take the time; only policies that measure look at it
        slots = self._slots
        events = self.take_events()
        live_S = slots.generation_N[plan.slot_S] == plan.generation_S
        rows = np.flatnonzero(live_S)
        self._advance(plan, rows)
        sampled = np.flatnonzero(live_S & plan.samples_S)
        first_event = len(events)
        ended = self._append(plan, result, sampled, events)
        if result.prompt_scores:
            self._attach_scores(plan, result, live_S, sampled, events, first_event)
        for event, reason, stop_reason in ended:
            event.finish = reason
            self._end(event.sequence, reason, stop_reason)
        for row in rows[~plan.samples_S[rows]].tolist():  # prompt chunks; few
            self._end_if_scored(plan.sequences[row], events)
        if self._followers:
            self._queue_followers()
        return events

    def _advance(self, plan: StepPlan, rows: np.ndarray) -> None:
        """The KV of these rows is written now; pages that became full are published."""
        slots, size = self._slots, self.limits.page_size
        slot_S = plan.slot_S[rows]
        end_S = plan.start_S[rows] + np.diff(plan.cu_q_len_S1)[rows]
        before_S = slots.computed_N[slot_S]
        slots.computed_N[slot_S] = end_S
        self._stats.computed_tokens += int((end_S - before_S).sum())
        if not self.limits.prefix_caching:
            return
        first_S, last_S = before_S // size, end_S // size
        filled = np.flatnonzero(last_S > first_S)
        for slot, first, last in zip(
            slot_S[filled].tolist(), first_S[filled].tolist(), last_S[filled].tolist()
        ):
            sequence = slots.sequence_N[slot]
            chain = sequence.page_chain
            self._cache.extend(chain, sequence.tokens, sequence.request.cache_salt, last)
            pages = slots.page_table_NP[slot, first:last].tolist()
            self._cache.publish(chain[first + 1 : last + 1], pages)

    def _append(self, plan: StepPlan, result: StepResult, rows, events: list[TokenEvent]):
        """A token and an event for each sampled row. Returns (event, reason, stop id) of ends."""
        slots = self._slots
        slot_S = plan.slot_S[rows]
        token_S = result.token_S[rows]
        known_S = slots.known_N[slot_S] + 1
        slots.known_N[slot_S] = known_S
        slots.last_token_N[slot_S] = token_S
        self._stats.generation_tokens += len(rows)
        first = len(events)
        sequences = plan.sequences
        for row, token in zip(rows.tolist(), token_S.tolist()):
            sequence = sequences[row]
            sequence.tokens.append(token)
            events.append(TokenEvent(sequence, token))
        if result.logprob_S is not None:
            for at in np.flatnonzero(slots.scores_N[slot_S]).tolist():
                _attach_logprobs(events[first + at], result, rows[at])
        full_S = known_S >= slots.max_total_N[slot_S]
        ended = []
        for at in np.flatnonzero(full_S | (self._watched_V[token_S] > 0)).tolist():
            event = events[first + at]
            if self._stops(event.sequence, event.token):
                # An end token at the very last place is still the model's own end.
                ended.append((event, FinishReason.STOP, event.token))
            elif full_S[at]:
                ended.append((event, FinishReason.LENGTH, None))
        return ended

    def _stops(self, sequence: Sequence, token: int) -> bool:
        params = sequence.request.params
        if sequence.num_output <= params.min_tokens:
            return False
        return (token in self._eos and not params.ignore_eos) or token in params.stop_token_ids

    def _attach_scores(self, plan, result, live_S, sampled, events, first_event) -> None:
        """Passes on prompt log-probabilities, each position once, with the row's token if any."""
        event_of_row = dict(zip(sampled.tolist(), events[first_event:]))
        for row, scores in result.prompt_scores.items():
            sequence = plan.sequences[row]
            fresh = _scores_from(scores, max(sequence.num_scored, 1))
            if not live_S[row] or fresh is None:
                continue
            sequence.num_scored = fresh.start + len(fresh.logprob)
            event = event_of_row.get(row)
            if event is None:
                event = TokenEvent(sequence, None)
                events.append(event)
            event.prompt_scores = fresh

    def _end_if_scored(self, sequence: Sequence, events: list[TokenEvent]) -> None:
        """A request for no tokens ends when its prompt is computed."""
        computed = self._slots.computed_N[sequence.slot]
        if sequence.max_total == sequence.num_prompt and computed == sequence.num_prompt:
            events.append(TokenEvent(sequence, None, FinishReason.LENGTH))
            self._end(sequence, FinishReason.LENGTH)

    def _queue_followers(self) -> None:
        """Choices 2..n enter when the first one's prompt is computed: they share its pages."""
        for request_id, followers in list(self._followers.items()):
            first = self._open[request_id][0]
            if first.index == 0 and (
                first.slot is None or self._slots.computed_N[first.slot] < first.num_prompt
            ):
                continue
            del self._followers[request_id]
            for sequence in followers:
                self._queue.push(sequence)

    # Ends

    def _end_all(
        self, request_id: str, reason: FinishReason, error: Exception | None = None
    ) -> list[TokenEvent]:
        events = []
        self._followers.pop(request_id, None)
        for sequence in list(self._open.get(request_id, ())):
            self._end(sequence, reason)
            events.append(TokenEvent(sequence, None, reason, error=error))
        return events

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason=None) -> None:
        """The one place where a sequence ends."""
        assert sequence.finish is None, f"{sequence} ended twice"
        if sequence.slot is not None:
            self._vacate(sequence)
        elif sequence in self._queue:
            self._queue.remove(sequence)
        sequence.finish = reason
        sequence.stop_reason = stop_reason
        for follower in self._followers.pop(sequence.request.id, ()):
            self._queue.push(follower)  # the first choice failed before its prompt was computed
        choices = self._open[sequence.request.id]
        choices.remove(sequence)
        if not choices:
            del self._open[sequence.request.id]

    def _vacate(self, sequence: Sequence) -> None:
        """Takes slot and pages from a running sequence."""
        self._watch(sequence, -1)
        self._pool.release(self._slots.leave(sequence.slot))

    def _watch(self, sequence: Sequence, change: int) -> None:
        for token in sequence.request.params.stop_token_ids:
            self._watched_V[token] += change

    def _check_queue(self, request: Request) -> None:
        waiting, tokens = self.num_waiting, self._queue.num_tokens
        limits = self.limits
        if waiting + request.params.n > limits.max_queued:
            full = f"{waiting} sequences wait and at most {limits.max_queued} may"
        elif tokens and tokens + len(request.prompt_ids) > limits.max_queued_tokens:
            full = f"{tokens} prompt tokens wait and at most {limits.max_queued_tokens} may"
        else:
            return
        raise RequestRefused(f"{full}; try again later", code="queue_full", retry_after=1.0)

    def check_invariants(self) -> None:
        """Asserts everything that must hold between two calls. For tests and debugging."""
        slots = self._slots
        slots.check_invariants(self.limits.page_size)
        running = np.flatnonzero(slots.active_N).tolist()
        self._pool.check_invariants([slots.pages(slot) for slot in running])
        self._cache.check_invariants()
        placed = [*slots.running(), *self._queue]
        for followers in self._followers.values():
            placed += followers
        everyone = [sequence for choices in self._open.values() for sequence in choices]
        assert sorted(s.id for s in placed) == sorted(s.id for s in everyone)
        assert all(s.finish is None for s in everyone)
        assert (self._watched_V >= 0).all()
        if not self._open:
            assert self._pool.num_available == self._pool.capacity, "pages leaked"


def _attach_logprobs(event: TokenEvent, result: StepResult, row: int) -> None:
    best = event.sequence.request.params.logprobs
    event.logprob = float(result.logprob_S[row])
    ids = result.top_ids_SK[row, :best].tolist()
    event.top = list(zip(ids, result.top_logprobs_SK[row, :best].tolist()))


def _scores_from(scores: PromptScores, first: int) -> PromptScores | None:
    """The part of the scores at positions >= first, None when there is none."""
    skip = max(0, first - scores.start)
    if skip >= len(scores.logprob):
        return None
    return PromptScores(
        scores.start + skip,
        scores.logprob[skip:],
        scores.top_ids[skip:],
        scores.top_logprobs[skip:],
    )
