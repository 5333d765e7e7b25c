"""EngineCore: the loop. Three verbs a step: plan, dispatch, absorb.

No jax here: the runner is injected, so the simulator and the tests drive the same loop. One thread
owns a core.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxserve.engine.output import OutputStage
from jaxserve.scheduler.pace import Pace
from jaxserve.scheduler.plan import StepPlan
from jaxserve.scheduler.scheduler import Scheduler, Stats
from jaxserve.types import (
    EngineFailed,
    FinishReason,
    OutputDelta,
    Request,
    StepResult,
    TokenEvent,
)

if TYPE_CHECKING:
    from jaxserve.grammar import GrammarMatcher

logger = logging.getLogger("jaxserve")

# Masks are waited for so long even when the device has run out of work: most of a full batch takes
# less.
MASK_PATIENCE_S = 3e-3


class Runner(Protocol):
    """What computes a plan. Device runner: engine/runner.py. Fake one: sim/fake_runner.py."""

    def dispatch(self, plan: StepPlan) -> Any: ...

    def constrain(self, pending: Any, fill_masks: Callable[..., None]) -> None: ...

    def fetch(self, pending: Any) -> StepResult: ...

    def is_done(self, pending: Any) -> bool: ...

    def reset(self) -> None: ...

    @property
    def compilations(self) -> int: ...


class Observer(Protocol):
    """Told of each absorbed step; metrics and the decision log implement it."""

    def on_step(self, plan: StepPlan, seconds: float) -> None: ...


Outputs = list[tuple[str, OutputDelta]]  # (request id, news of one of its choices)


@dataclasses.dataclass(slots=True)
class EngineStats(Stats):
    """The scheduler's gauges and counts, and what the engine adds."""

    compilations: int = 0  # since the programs were warm: anything but 0 is a fault
    step_seconds: float = 0.0  # that steps have taken


@dataclasses.dataclass
class InFlight:
    """A dispatched step that has not been absorbed."""

    plan: StepPlan
    pending: Any
    dispatched: float


class EngineCore:
    """Queue and track, form the active group, advance it, remove the finished, refill at once."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        output: OutputStage,
        clock: Callable[[], float],
        *,
        pipelined: bool = True,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.output = output
        self.clock = clock
        self.observers: list[Observer] = []
        self.step = self.overlapped_step if pipelined else self.plain_step
        self.last_step = clock()  # when a step was last absorbed; a stuck device stops moving it
        self.step_seconds = 0.0
        self.in_flight: InFlight | None = None
        self._pace = Pace(scheduler.limits.token_budget)

    def add(self, request: Request, matchers: Sequence[GrammarMatcher] = ()) -> None:
        """Queues a request. Raises RequestRefused; then nothing is kept of it.

        matchers: the state of params.grammar, one for each choice, from OutputStage.matchers.
        """
        assert len(matchers) == (request.params.n if request.params.grammar else 0)
        self.output.open(request, matchers)
        try:
            self.scheduler.add(request)
        except Exception:  # whatever kept it out, nothing may stay behind; the caller hears of it
            self.output.close(request)
            raise

    def abort(self, request_id: str) -> Outputs:
        """Ends a request where it stands. Harmless for one that has ended."""
        return self.output.process(self.scheduler.abort(request_id), self.scheduler)

    @property
    def has_work(self) -> bool:
        return self.in_flight is not None or self.scheduler.has_work or self.output.waits

    def plan_due(self) -> float:
        """When the next step is to be planned, by the clock. Who steps the core may wait until then
        and let arrivals in meanwhile: they are in that step, and the device has work all the same.
        """
        step = self.in_flight
        if step is None or not self.scheduler.admits_arrivals:
            return -math.inf
        return self._begin(step) + self._pace.spare_s(step.plan.size)

    def _begin(self, step: InFlight) -> float:
        """When the device began with a step: the one before it was absorbed last."""
        return max(step.dispatched, self.last_step)

    def plain_step(self) -> Outputs:
        """One step from plan to outputs, nothing overlapped: the oracle of overlapped_step."""

        def advance():
            step = self._dispatch()
            self._constrain(step)
            return self._absorb(step)

        return self._guarded(advance)

    def overlapped_step(self) -> Outputs:
        """Dispatches the next step before it reads the last: the host's work hides behind it.

        What a grammar allows next depends on the token before, so the masks follow once the last
        step is read, and as a rule are there long before the device has come to its logits.
        """

        def advance():
            previous, self.in_flight = self.in_flight, self._dispatch()
            if previous is not None and self.in_flight is not None:
                self._pace.planned(too_late=self.runner.is_done(previous.pending))
            outputs = self._absorb(previous)
            self._constrain(self.in_flight)
            return outputs

        return self._guarded(advance)

    def _dispatch(self) -> InFlight | None:
        now = self.clock()
        plan = self.scheduler.plan(now)
        if plan is None:
            return None
        for change in plan.guard:
            logger.warning("guard: %s", change)
        return InFlight(plan, self.runner.dispatch(plan), now)

    def _constrain(self, step: InFlight | None) -> None:
        if step is not None:
            self.runner.constrain(step.pending, self._fill_masks)

    def _fill_masks(self, plan: StepPlan, allowed_SW: np.ndarray) -> None:
        self.output.fill_masks(plan, allowed_SW, self.scheduler, self._patience_s())

    def _patience_s(self) -> float:
        """How long grammars are waited for: for as long as the device has work, and a little."""
        step = self.in_flight
        if step is None:
            return MASK_PATIENCE_S
        end = self._begin(step) + self._pace.spare_s(step.plan.size)
        return max(MASK_PATIENCE_S, end - self.clock())

    def _absorb(self, step: InFlight | None) -> Outputs:
        events = self.scheduler.take_events()  # ends that needed no step: deadlines, empty outputs
        if step is None and self.in_flight is None and not events and self.output.waits:
            self.output.wait(MASK_PATIENCE_S)  # all that runs waits for its grammar
        if step is not None:
            result = self.runner.fetch(step.pending)
            now = self.clock()
            events += self._end_broken_rows(step.plan, result)
            events += self.scheduler.absorb(step.plan, result, now)
            seconds = now - self._begin(step)
            self.step_seconds += seconds
            self._pace.ran(step.plan.size, seconds)
            for observer in self.observers:
                observer.on_step(step.plan, seconds)
            self.last_step = now
        patience_s = self._patience_s() if self.output.has_grammars else 0.0
        return self.output.process(events, self.scheduler, patience_s)

    def _end_broken_rows(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Ends the rows whose logits were not finite (token -1) before absorb can see them."""
        events = []
        for row in np.flatnonzero(plan.samples_S & (result.token_S < 0)).tolist():
            sequence = plan.sequences[row]
            if sequence.finish is None:
                self.scheduler.finish(sequence, FinishReason.ERROR)
                failure = EngineFailed("the model's logits were not finite")
                events.append(TokenEvent(sequence, None, FinishReason.ERROR, error=failure))
        return events

    def _guarded(self, advance: Callable[[], Outputs]) -> Outputs:
        """A step that raises loses the donated KV pool: what ran ends with an error, and what waits
        goes on with a new pool."""
        try:
            return advance()
        except Exception as error:
            logger.exception("a device step failed")
            self.in_flight = None
            failure = EngineFailed("a device step failed and took this request with it")
            failure.__cause__ = error
            # With nothing running the fault is not a row's, and would come back for ever.
            events = self.scheduler.fail_running(failure) or self.scheduler.fail_all(failure)
            self.runner.reset()
            return self.output.process(events, self.scheduler)

    def stats(self) -> EngineStats:
        """A copy of gauges and counters; any thread may ask."""
        scheduling = dataclasses.asdict(self.scheduler.stats())
        return EngineStats(
            **scheduling, compilations=self.runner.compilations, step_seconds=self.step_seconds
        )
