"""Host time of one scheduler step: plan + absorb, at a steady state.

    python tools/bench_scheduler.py                       # 256 running, 2,000 waiting, all decoding
    python tools/bench_scheduler.py --running 64 --waiting 0
    python tools/bench_scheduler.py --model=demo          # beside the steps of a real engine

Prints medians in microseconds and where they go: own time by function, under the profiler, which
makes calls dearer than they are. With --model, plan + absorb as a part of the step, one row alone
and every slot taken.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pathlib
import pstats
import statistics
import time

import numpy as np

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.start import build
from jaxserve.obs.decision_log import RecordingScheduler
from jaxserve.scheduler.limits import Limits
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import Request, SamplingParams, StepResult

VOCAB_SIZE = 50_000
STEP_S = 0.02  # of the clock that the scheduler sees


def loaded_scheduler(args) -> Scheduler:
    """A scheduler whose slots all decode and whose queue holds args.waiting requests."""
    pages = args.running * (-(-args.max_model_len // 16)) + 1
    limits = Limits(
        num_slots=args.running,
        num_pages=pages,
        page_size=16,
        token_budget=max(2 * args.running, 512),
        max_model_len=args.max_model_len,
        vocab_size=VOCAB_SIZE,
        eos_ids=(2,),
        max_queued=args.running + args.waiting,
        max_queued_tokens=10**9,
    )
    scheduler = Scheduler(limits, SchedulerConfig(policy=args.policy), cache_key=b"bench")
    draw = np.random.default_rng(0)
    for number in range(args.running + args.waiting):
        prompt = tuple(draw.integers(3, VOCAB_SIZE, draw.integers(16, 256)).tolist())
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        scheduler.add(
            Request(f"r{number}", prompt, params, tenant=f"t{number % 8}", arrival=float(number))
        )
    while True:
        plan = scheduler.plan(0.0)
        scheduler.absorb(plan, tokens_of(plan, draw), 0.0)
        if plan.num_decode == args.running:
            return scheduler


def tokens_of(plan, draw) -> StepResult:
    return StepResult(token_S=draw.integers(3, VOCAB_SIZE, plan.num_rows, np.int32))


def measure(scheduler: Scheduler, steps: int):
    """Seconds of each plan and each absorb over pipelined decode steps."""
    draw = np.random.default_rng(1)
    plans, absorbs = [], []
    previous = scheduler.plan(0.0)
    for step in range(steps):
        start = time.perf_counter()
        plan = scheduler.plan(step * STEP_S)
        middle = time.perf_counter()
        result = tokens_of(previous, draw)
        resumed = time.perf_counter()
        scheduler.absorb(previous, result, step * STEP_S)
        end = time.perf_counter()
        plans.append(middle - start)
        absorbs.append(end - resumed)
        previous = plan
    scheduler.absorb(previous, tokens_of(previous, draw), steps * STEP_S)
    return plans, absorbs


def where_it_goes(scheduler: Scheduler, steps: int, lines: int = 14) -> None:
    """Prints the functions that take most of a step."""
    profile = cProfile.Profile()
    profile.runcall(measure, scheduler, steps)
    own = {
        key: (calls, seconds)
        for key, (_, calls, seconds, *_) in pstats.Stats(profile).stats.items()
        if key[2] not in ("measure", "tokens_of") and "Generator" not in key[2]
    }
    total = sum(seconds for _, seconds in own.values())
    print(f"where it goes, of {total / steps * 1e6:.0f} us under the profiler:")
    most = sorted(own.items(), key=lambda item: -item[1][1])[:lines]
    for (file, line, name), (calls, seconds) in most:
        place = f"{pathlib.Path(file).name}:{line} {name}" if line else name
        print(
            f"{seconds / steps * 1e6:9.1f} us {seconds / total:5.0%} {calls / steps:7.1f} calls  "
            f"{place}"
        )


class Timed:
    """A scheduler whose plan and absorb add up their seconds."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self.seconds = scheduler, 0.0

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def plan(self, now):
        return self._timed(self._scheduler.plan, now)

    def absorb(self, plan, result, now):
        return self._timed(self._scheduler.absorb, plan, result, now)

    def _timed(self, door, *arguments):
        start = time.perf_counter()
        done = door(*arguments)
        self.seconds += time.perf_counter() - start
        return done


def part_of_the_step(model: str, steps: int) -> None:
    """Prints what plan + absorb take of the steps of a real engine that decodes."""
    parts = build(EngineConfig(model=model), clock=time.monotonic)
    parts.warm_up()
    core = parts.core
    core.scheduler = timed = Timed(core.scheduler)
    draw = np.random.default_rng(0)
    for rows in (1, core.scheduler.limits.num_slots):
        for number in range(rows):
            prompt = tuple(draw.integers(10, core.scheduler.limits.vocab_size, 50).tolist())
            params = SamplingParams(max_tokens=steps + 100, ignore_eos=True, temperature=0.0)
            core.add(Request(f"r{rows}.{number}", prompt, params, arrival=core.clock()))
        for _ in range(50):
            core.step()
        timed.seconds, start = 0.0, time.perf_counter()
        for _ in range(steps):
            core.step()
        step_s = (time.perf_counter() - start) / steps
        host_s = timed.seconds / steps
        print(
            f"{model}, {rows} decoding: step {step_s * 1e3:.2f} ms, plan + absorb "
            f"{host_s * 1e6:.0f} us, {host_s / step_s:.1%} of it"
        )
        while core.has_work:
            core.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--max_model_len", type=int, default=8192)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--model", help="measure beside this model's steps instead")
    parser.add_argument("--log", help="write the decision log to this file meanwhile")
    args = parser.parse_args()
    if args.model:
        part_of_the_step(args.model, min(args.steps, 200))
        return
    scheduler = loaded_scheduler(args)
    if args.log:
        scheduler = RecordingScheduler(scheduler, pathlib.Path(args.log))
    print(f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, {args.policy}")
    measure(scheduler, 50)
    gc.collect()
    plans, absorbs = measure(scheduler, args.steps)
    totals = [plan + absorb for plan, absorb in zip(plans, absorbs)]
    for name, seconds in (("plan", plans), ("absorb", absorbs), ("plan + absorb", totals)):
        cuts = statistics.quantiles(seconds, n=100)
        print(f"{name:>14}: median {cuts[49] * 1e6:6.0f} us   p99 {cuts[98] * 1e6:6.0f} us")
    where_it_goes(scheduler, args.steps)


if __name__ == "__main__":
    main()
