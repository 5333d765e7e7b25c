"""The decision log: one JSON line for each plan, with all that led to it.

The first line is the manifest: versions, model, configuration. Every other line holds the calls the
scheduler received since the line before, in order, and the plan that followed:

    {"calls": [["add", {...}], ["absorb", step, now, [tokens]], ...], "now": 12.5, "plan": {...}}

Where all work had ended, a line has calls alone: its "now" and "plan" are null.

The scheduler owns no clock and no randomness, so these lines are all it takes to make every plan
again (`replay`), to tell one request's life (`explain`), and to learn what a step costs
(`calibrate`). The log holds the token ids of prompts and outputs: keep it as you keep those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import time
import zlib
from collections.abc import Callable, Iterator

import numpy as np
import orjson

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits, step_sizes
from jaxserve.scheduler.plan import Decision, StepPlan
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.cost_model import PARTS, CostModel, features
from jaxserve.types import (
    FinishReason,
    PromptScores,
    Request,
    RequestRefused,
    SamplingParams,
    StepResult,
)

logger = logging.getLogger("jaxserve")

FORMAT = 1


class RecordingScheduler:
    """A Scheduler that writes down what it is asked and what it decides.

    Same doors as Scheduler, so an engine takes either. Writes are buffered; close() when done. A
    write that fails, as on a full disk, ends the log and nothing else.
    """

    def __init__(self, scheduler: Scheduler, path: pathlib.Path, manifest: dict | None = None):
        """The file is created or overwritten, readable by its owner only."""
        self._scheduler = scheduler
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._calls: list[list] = []
        self._write(_manifest(scheduler, manifest or {}))

    def __getattr__(self, name):
        """Gauges and settings are the scheduler's own."""
        return getattr(self._scheduler, name)

    def add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except RequestRefused as refusal:
            self._calls.append(["refused", _request_record(request), str(refusal)])
            raise
        self._calls.append(["add", _request_record(request)])

    def abort(self, request_id: str):
        self._calls.append(["abort", request_id])
        events = self._scheduler.abort(request_id)
        self._settle()
        return events

    def finish(self, sequence, reason: FinishReason, stop_reason=None) -> None:
        self._calls.append(["finish", *sequence.id, reason.value, stop_reason])
        self._scheduler.finish(sequence, reason, stop_reason)
        self._settle()

    def hold(self, sequence) -> None:
        self._calls.append(["hold", *sequence.id])
        self._scheduler.hold(sequence)

    def release(self, sequence) -> None:
        self._calls.append(["release", *sequence.id])
        self._scheduler.release(sequence)

    def leave_out(self, plan: StepPlan, row: int) -> None:
        self._calls.append(["leave_out", plan.step, row, *plan.sequences[row].id])
        self._scheduler.leave_out(plan, row)

    def fail_all(self, error: Exception):
        self._calls.append(["fail_all", str(error)])
        return self._scheduler.fail_all(error)

    def fail_running(self, error: Exception):
        self._calls.append(["fail_running", str(error)])
        return self._scheduler.fail_running(error)

    def requeue_all(self) -> None:
        self._calls.append(["requeue_all"])
        self._scheduler.requeue_all()

    def take_events(self):
        events = self._scheduler.take_events()
        if events:
            self._calls.append(["ended", _ends(events)])
            self._settle()
        return events

    def plan(self, now: float) -> StepPlan | None:
        plan = self._scheduler.plan(now)
        record = None if plan is None else plan_record(plan)
        predicted = None if plan is None else self._scheduler.predict(plan)
        line = {"calls": self._calls, "now": now, "plan": record, "predicted_s": predicted}
        self._write(line)
        self._calls = []
        return plan

    def absorb(self, plan: StepPlan, result: StepResult, now: float):
        events = self._scheduler.absorb(plan, result, now)
        tokens = np.ascontiguousarray(result.token_S, np.int32)
        scores = {row: [s.start, len(s.logprob)] for row, s in result.prompt_scores.items()}
        self._calls.append(["absorb", plan.step, now, tokens, _ends(events), scores])
        self._settle()
        return events

    def _settle(self) -> None:
        """With nothing left to do no plan follows soon, or ever: the file gets all there is."""
        if not self._scheduler.has_work:
            self._write_calls()
            with self._ending_at_faults():
                if not self._file.closed:
                    self._file.flush()

    def _write_calls(self) -> None:
        """Those that no plan has followed."""
        if self._calls:
            self._write({"calls": self._calls, "now": None, "plan": None})
            self._calls = []

    def close(self) -> None:
        self._write_calls()
        with self._ending_at_faults():
            self._file.close()

    def _write(self, record: dict) -> None:
        with self._ending_at_faults():
            if not self._file.closed:
                self._file.write(_line(record))

    @contextlib.contextmanager
    def _ending_at_faults(self):
        try:
            yield
        except OSError as error:
            logger.error("the decision log ends here: %s", error.strerror)
            with contextlib.suppress(OSError):  # what is still buffered has no place either
                self._file.close()


def _ends(events) -> list:
    return [[*event.sequence.id, event.finish.value] for event in events if event.finish]


def _line(record) -> bytes:
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
    return orjson.dumps(record, option=options)


def _manifest(scheduler: Scheduler, more: dict) -> dict:
    return {
        "format": FORMAT,
        "limits": dataclasses.asdict(scheduler.limits),
        "config": dataclasses.asdict(scheduler.config),
        "manifest": more,
    }


# What the scheduler looks at in a request's parameters; the rest decides tokens, not plans.
_PLANNED_PARAMS = (
    "n",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "pooling",
)
_DEFAULTS = SamplingParams()


def _request_record(request: Request) -> dict:
    """A request's fields; of its parameters, those that matter here and are not the defaults."""
    record = {field: getattr(request, field) for field in Request.__slots__ if field != "params"}
    params = {name: getattr(request.params, name) for name in _PLANNED_PARAMS}
    chosen = {k: value for k, value in params.items() if value != getattr(_DEFAULTS, k)}
    return record | {"params": chosen}


def _request_of(record: dict) -> Request:
    params = SamplingParams(**record["params"])
    return Request(**{**record, "params": params, "prompt_ids": tuple(record["prompt_ids"])})


def plan_record(plan: StepPlan) -> dict:
    """A plan as plain values. `check` covers the arrays that are too large to write out."""
    arrays = (plan.generation_S, plan.samples_S, plan.token_ids_T, plan.page_table_SP)
    check = 0
    for array in arrays:
        check = zlib.crc32(np.ascontiguousarray(array), check)
    record = {
        "step": plan.step,
        "num_decode": plan.num_decode,
        "slot": plan.slot_S,
        "start": plan.start_S,
        "count": plan.count_S[plan.num_decode :],  # decoding rows have one each
        "admits": [[slot, *sequence.id] for slot, sequence in plan.admits],
        "admitted": _decisions(plan.admitted),
        "preempted": _decisions(plan.preempted),
        "waiting": _decisions(plan.waiting),
        "guard": plan.guard,
        "budget": plan.budget,
        "check": check,
    }
    if plan.swap_out or plan.swap_in:
        record["swap_out"], record["swap_in"] = plan.swap_out, plan.swap_in
    if plan.idle:
        record["idle"] = plan.idle
    return record


def _decisions(decisions: tuple[Decision, ...]) -> list:
    return [[*decision.sequence_id, decision.reason] for decision in decisions]


def read(path: pathlib.Path) -> Iterator[dict]:
    """The log's lines, manifest first. An unfinished last line (a crash) is left out.

    Raises ValueError for anything else that is not a decision log.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if number and not line.endswith(b"\n"):
                    return
                raise ValueError(f"{path}, line {number + 1}: not JSON: {error}") from error
            if number == 0 and (not isinstance(record, dict) or record.get("format") != FORMAT):
                raise ValueError(f"{path} is not a decision log of format {FORMAT}")
            yield record
        if file.tell() == 0:
            raise ValueError(f"{path} is empty, not a decision log")


# Replay


@dataclasses.dataclass(frozen=True)
class Replay:
    """plans: how many were made again. differs: the first step whose plan is another, if any."""

    plans: int
    differs: int | None = None
    recorded: str = ""
    replayed: str = ""


class _Replayer:
    """Gives a fresh scheduler the recorded calls."""

    def __init__(self, manifest: dict):
        limits = Limits(**{**manifest["limits"], "eos_ids": tuple(manifest["limits"]["eos_ids"])})
        self.scheduler = Scheduler(limits, SchedulerConfig(**manifest["config"]))
        self._plans: dict[int, StepPlan] = {}
        self._sequences = {}

    def plan(self, now: float) -> StepPlan | None:
        plan = self.scheduler.plan(now)
        if plan is not None:
            self._plans[plan.step] = plan
            self._sequences.update({sequence.id: sequence for _, sequence in plan.admits})
        return plan

    def call(self, name: str, *arguments) -> None:
        getattr(self, f"_{name}")(*arguments)

    def _add(self, record):
        self.scheduler.add(_request_of(record))

    def _refused(self, record, _reason):
        try:
            self.scheduler.add(_request_of(record))
        except RequestRefused:
            return
        raise ValueError(f"request {record['id']} was refused in the log and is not now")

    def _absorb(self, step, now, tokens, _ends, scores):
        plan = self._plans.pop(step)
        result = StepResult(np.array(tokens, np.int32), prompt_scores=_blank_scores(scores))
        for event in self.scheduler.absorb(plan, result, now):
            if event.finish is not None:
                self._sequences.pop(event.sequence.id, None)

    def _ended(self, _ends):
        self.scheduler.take_events()

    def _abort(self, request_id):
        self.scheduler.abort(request_id)

    def _finish(self, request_id, index, reason, stop_reason):
        sequence = self._sequences.pop((request_id, index), None)
        if sequence is not None:
            self.scheduler.finish(sequence, FinishReason(reason), stop_reason)

    def _hold(self, request_id, index):
        self.scheduler.hold(self._sequences[request_id, index])

    def _release(self, request_id, index):
        sequence = self._sequences.get((request_id, index))
        if sequence is not None:
            self.scheduler.release(sequence)

    def _leave_out(self, step, row, _request_id, _index):
        self.scheduler.leave_out(self._plans[step], row)

    def _fail_all(self, message):
        self.scheduler.fail_all(RuntimeError(message))

    def _fail_running(self, message):
        self.scheduler.fail_running(RuntimeError(message))

    def _requeue_all(self):
        self.scheduler.requeue_all()


def _blank_scores(scores: dict):
    """Which prompt positions were scored decides who may use the prefix cache; values do not."""
    blank = lambda start, count: PromptScores(start, np.zeros(count), *[np.zeros((count, 0))] * 2)
    return {int(row): blank(*span) for row, span in scores.items()}


def replay(
    path: pathlib.Path,
    *,
    speed: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Replay:
    """Makes every plan of the log again and compares byte for byte.

    speed: 0 as fast as possible, 1 at the pace of the recording, 2 twice as fast: the scheduler
    sees the recorded times whatever the pace.
    """
    lines = read(path)
    replayer = _Replayer(next(lines))
    plans, previous = 0, None
    for line in lines:
        for call in line["calls"]:
            replayer.call(*call)
        if line["now"] is None:
            continue
        if speed > 0 and previous is not None:
            sleep((line["now"] - previous) / speed)
        previous = line["now"]
        plan = replayer.plan(line["now"])
        replayed = _line(None if plan is None else plan_record(plan))
        recorded = _line(line["plan"])
        if replayed != recorded:
            step = plans + 1 if plan is None else plan.step
            return Replay(plans, step, recorded.decode(), replayed.decode())
        plans += plan is not None
    return Replay(plans)


# Calibrate


def calibrate(path: pathlib.Path) -> CostModel:
    """Prices of a step's parts, from the steps of the log and the seconds they took.

    A step's seconds run from its dispatch, or from the end of the step before it when that was
    later. Raises ValueError when the log has too few steps.
    """
    lines = read(path)
    manifest = next(lines)
    limits = manifest["limits"]
    sizes = step_sizes(limits["token_budget"])
    pending, previous_end = {}, 0.0
    parts, seconds = [], []
    for line in lines:
        for call in line["calls"]:
            if call[0] == "absorb" and call[1] in pending:
                step, now = call[1], call[2]
                dispatched, part = pending.pop(step)
                parts.append(part)
                seconds.append(now - max(dispatched, previous_end))
                previous_end = now
        plan = line["plan"]
        if plan is not None:
            count_S = np.array([1] * plan["num_decode"] + plan["count"])
            num_copied = len(plan.get("swap_out", ())) + len(plan.get("swap_in", ()))
            idle = plan.get("idle", 0)
            part = features(np.array(plan["start"]), count_S, num_copied, sizes, idle)
            pending[plan["step"]] = (line["now"], part)
    model = manifest["manifest"].get("model", "an unnamed model")
    return CostModel.fit(
        np.array(parts).reshape(-1, len(PARTS)),
        np.array(seconds),
        sizes=sizes,
        page_s=limits["swap_s_per_page"] / 2,
        source=f"{len(seconds)} steps of {model}",
    )


# Verbs of the command line; each returns the exit status.


def run_replay(log: pathlib.Path, *, speed: float = 0.0, out=print) -> int:
    """`jaxserve replay LOG`: 0 when every plan came out the same, 1 otherwise."""
    result = replay(log, speed=speed)
    if result.differs is None:
        out(f"{result.plans} plans made again, byte for byte the same")
        return 0
    out(f"{result.plans} plans the same; step {result.differs} differs")
    out(f"recorded: {result.recorded.strip()}")
    out(f"replayed: {result.replayed.strip()}")
    return 1


def run_calibrate(log: pathlib.Path, *, cost_model: pathlib.Path, out=print) -> int:
    """`jaxserve calibrate LOG --cost_model=FILE`: writes what `jaxserve simulate` reads."""
    model = calibrate(log)
    model.save(pathlib.Path(cost_model))
    for part, price in zip(PARTS, model.price):
        out(f"{part:>9}: {price:.3g} s")
    out(f"{model.steps} steps, mean error {model.error:.1%}; written to {cost_model}")
    return 0
