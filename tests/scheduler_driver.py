"""Drives a Scheduler with a FakeRunner, step by step, and checks whatever can be checked."""

import collections
import random

import numpy as np

from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.fake_runner import FakeRunner, expected_output
from jaxserve.types import FinishReason, Request, SamplingParams

VOCAB_SIZE = 97
EOS = 3


def small_limits(**changes) -> Limits:
    """Four slots, pages of four tokens, room for everything; change what a test is about."""
    settings = dict(
        num_slots=4,
        num_pages=4 * 16 + 1,
        page_size=4,
        token_budget=16,
        max_model_len=64,
        vocab_size=VOCAB_SIZE,
        eos_ids=(EOS,),
    )
    return Limits(**{**settings, **changes})


class Driver:
    """One step of time per step. Keeps every token and every end, and refuses a second end."""

    def __init__(self, limits=None, config=None, *, pipelined=True, check=True, wrap=None):
        """wrap: makes what is driven from the scheduler, a recorder for example."""
        self.limits = limits or small_limits()
        self.scheduler = Scheduler(self.limits, config, cache_key=b"test")
        if wrap is not None:
            self.scheduler = wrap(self.scheduler)
        limits = self.limits
        self.runner = FakeRunner(
            limits.num_slots, limits.num_pages, limits.page_size, limits.vocab_size, limits.eos_ids
        )
        self.pipelined = pipelined
        self.check = check
        self.lateness = 0.0  # chance that a row cannot choose its token when its step comes to that
        self.held = []
        self.draw = random.Random(0)
        self.now = 0.0
        self.in_flight = None
        self.plans = []
        self.requests = {}
        self.sequences = {}
        self.outputs = collections.defaultdict(list)
        self.token_times = collections.defaultdict(list)
        self.ends = {}

    def send(
        self, prompt, request_id=None, *, priority=0, tenant="", salt="", deadline=None, **params
    ):
        request_id = request_id or f"r{len(self.requests)}"
        params.setdefault("max_tokens", 8)
        request = Request(
            request_id,
            tuple(prompt),
            SamplingParams(**params),
            seed=len(prompt),
            tenant=tenant,
            priority=priority,
            arrival=self.now,
            deadline=deadline,
            cache_salt=salt,
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request_id

    def abort(self, request_id):
        self.take(self.scheduler.abort(request_id))

    def lose_device(self, *, keep_running):
        """A step failed: the pages are gone; what ran is computed anew, or fails with them."""
        if keep_running:
            self.scheduler.requeue_all()
        else:
            self.take(self.scheduler.fail_running(RuntimeError("lost")))
        self.runner.reset()
        self.in_flight = None

    def step(self):
        """One turn of the engine's loop. Returns the plan, None when nothing could run."""
        self.now += 1.0
        self.release_some()
        plan = self.scheduler.plan(self.now)
        pending = None
        if plan is not None:
            self.plans.append(plan)
            pending = (plan, self.runner.dispatch(plan))
        self.take(self.scheduler.take_events())
        if self.pipelined:
            ready, self.in_flight = self.in_flight, pending
        else:
            ready = pending
            self.leave_some_out(plan)
        if ready is not None:
            self.take(self.scheduler.absorb(ready[0], self.runner.fetch(ready[1]), self.now))
        if self.pipelined:
            self.leave_some_out(plan)
        if self.check:
            self.scheduler.check_invariants()
        return plan

    def leave_some_out(self, plan):
        """As an engine does with rows whose grammars take long."""
        if not self.lateness or plan is None:
            return
        for row in np.flatnonzero(plan.samples_S).tolist():
            sequence = plan.sequences[row]
            if sequence.finish is None and self.draw.random() < self.lateness:
                if self.draw.random() < 0.3:
                    self.scheduler.hold(sequence)  # in this plan, and not in the next
                else:
                    self.scheduler.leave_out(plan, row)
                self.held.append(sequence)

    def release_some(self):
        still = []
        for sequence in self.held:
            if self.draw.random() < 0.5:
                self.scheduler.release(sequence)
            else:
                still.append(sequence)
        self.held = still

    def run(self, max_steps=10_000):
        """Steps until nothing is left, and that must come."""
        for _ in range(max_steps):
            if not self.scheduler.has_work and self.in_flight is None:
                return self
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps: {self.scheduler.stats()}")

    def take(self, events):
        for event in events:
            key = event.sequence.id
            assert key not in self.ends, f"{key} went on after its end"
            self.sequences[key] = event.sequence
            if event.token is not None:
                self.outputs[key].append(event.token)
                self.token_times[key].append(self.now)
            if event.finish is not None:
                assert event.sequence.finish is event.finish
                self.ends[key] = event.finish

    def output(self, request_id, index=0):
        return self.outputs[request_id, index]

    def check_outputs(self):
        """Every request ended once, with the tokens that it would have got alone."""
        for request_id, request in self.requests.items():
            for index in range(request.params.n):
                reason = self.ends[request_id, index]
                got = self.outputs[request_id, index]
                alone = expected_output(
                    request,
                    index,
                    self.limits.max_total(request),
                    self.limits.vocab_size,
                    self.limits.eos_ids,
                )
                if reason in (FinishReason.STOP, FinishReason.LENGTH):
                    assert got == alone, (request_id, index, reason)
                    assert (reason is FinishReason.STOP) == self._ends_itself(request, alone)
                else:
                    assert got == alone[: len(got)], (request_id, index, reason)
        stats = self.scheduler.stats()
        assert stats.running == stats.waiting == 0
        assert stats.pages_free == stats.pages_total
        return self

    def _ends_itself(self, request, output):
        if not output or len(output) <= request.params.min_tokens:
            return False
        params = request.params
        eos = output[-1] == EOS and not params.ignore_eos
        return eos or output[-1] in params.stop_token_ids
