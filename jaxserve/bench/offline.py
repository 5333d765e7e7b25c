"""A workload on an engine in this process: no HTTP, no threads, one loop.

Arrivals are real: an item joins when its time has come. Each run gets a core of its own over the
engine's compiled programs, so that its queue, pages and prefix cache start empty.
"""

from __future__ import annotations

import dataclasses
import heapq
import sys
import time
from collections.abc import Callable

from jaxserve.bench.energy import Meter
from jaxserve.bench.metrics import Record, Targets, request_rows, summarise
from jaxserve.bench.settings import BenchConfig
from jaxserve.bench.steps import StepLog
from jaxserve.bench.workload import Item, Workload
from jaxserve.config import SchedulerConfig
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.progress import ending
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import Request, SamplingParams


def fresh_core(engine, scheduling: SchedulerConfig | None = None, **changes) -> EngineCore:
    """A new core on the programs and pages of `engine` (engine.start.Engine), with settings that
    need no other programs changed, e.g. batching="static"; its queue refuses nobody."""
    endless = {"max_queued": sys.maxsize, "max_queued_tokens": sys.maxsize}
    config = dataclasses.replace(engine.config, **endless | changes)
    runner = engine.core.runner
    scheduler = Scheduler.from_config(
        config, scheduling, eos_ids=engine.model.eos_ids, vocab_size=runner.spec.num_tokens
    )
    output = OutputStage(engine.tokenizer)
    return EngineCore(scheduler, runner, output, time.perf_counter, pipelined=config.pipelined)


def run(
    core: EngineCore,
    workload: Workload,
    *,
    sleep: Callable[[float], None] = time.sleep,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[list[Record], StepLog]:
    """Serves the workload to its end; records in the order of its items, and every step. on_end()
    is called after each request."""
    log = StepLog(core)
    core.observers.append(log)
    agenda = _Agenda(workload, core.clock())
    records: dict[str, Record] = {}
    while agenda.is_open or core.has_work:
        for item in agenda.due(core.clock()):
            records[item.id] = Record(
                item.id, core.clock(), item.max_tokens, prompt_tokens=len(item.prompt_ids)
            )
            core.add(_request(item, core.clock()))
        if core.has_work:
            outputs = core.step()
            for _ in range(_note(outputs, core.clock(), records, agenda)):
                on_end()
        elif agenda.is_open:
            sleep(max(agenda.next_time - core.clock(), 0.0))
    core.observers.remove(log)
    return [records[item.id] for item in workload.items], log


def _request(item: Item, now: float) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)
    return Request(item.id, item.prompt_ids, params, arrival=now)


def _note(outputs, now: float, records: dict[str, Record], agenda: _Agenda) -> int:
    """Takes a step's outputs in; how many requests they ended."""
    ended = 0
    for request_id, delta in outputs:
        record = records[request_id]
        if delta.token_ids:
            record.stamps.append(now)
            record.output_tokens += len(delta.token_ids)
        record.cached_tokens = max(record.cached_tokens, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            record.error = None if delta.error is None else str(delta.error)
            agenda.ended(request_id, now)
            ended += 1
    return ended


class _Agenda:
    """Which items are due: by their time, or by the end of the item they follow."""

    def __init__(self, workload: Workload, start: float):
        self._queue = []  # heap of (time, place in the workload, item)
        self._followers: dict[str, list[tuple[int, Item]]] = {}
        for place, item in enumerate(workload.items):
            if item.after is None:
                heapq.heappush(self._queue, (start + item.arrival, place, item))
            else:
                self._followers.setdefault(item.after, []).append((place, item))

    @property
    def is_open(self) -> bool:
        """Whether items are to come; those that follow a running one come only after its end."""
        return bool(self._queue)

    @property
    def next_time(self) -> float:
        return self._queue[0][0]

    def due(self, now: float):
        while self._queue and self._queue[0][0] <= now:
            yield heapq.heappop(self._queue)[2]

    def ended(self, item_id: str, now: float) -> None:
        for place, item in self._followers.pop(item_id, ()):
            heapq.heappush(self._queue, (now + item.arrival, place, item))


def measure(
    engine,
    scheduling: SchedulerConfig,
    workload: Workload,
    bench: BenchConfig,
    policies,
    meter: Meter,
    watch: Callable[[str, int, int], None] = lambda *_: None,
) -> dict[str, list[dict]]:
    """Summaries of --repeats runs of each batching policy, taking turns so that a machine that
    slows down slows all of them. watch(which run, requests ended, of how many) follows them."""
    warm_up = dataclasses.replace(workload, items=_first(workload, bench.warmup))
    run(fresh_core(engine, scheduling), warm_up)
    runs = {policy: [] for policy in policies}
    for number in range(bench.repeats):
        for policy, summaries in runs.items():
            run_name = f"{policy}, run {number + 1} of {bench.repeats}"
            on_end = ending(watch, run_name, len(workload.items))
            core = fresh_core(engine, scheduling, batching=policy)
            joules = meter.read()
            records, log = run(core, workload, on_end=on_end)
            used = meter.since(joules)
            summary = summarise(records, Targets.of(bench), joules=used) | log.summary()
            summary["request_columns"] = request_rows(records)
            summary["step_columns"] = log.columns()
            summaries.append(summary)
    return runs


def _first(workload: Workload, count: int):
    """The first items, all at once and short: enough to touch every program and page."""
    return tuple(
        dataclasses.replace(item, arrival=0.0, after=None, max_tokens=min(item.max_tokens, 8))
        for item in workload.items[:count]
    )
