"""Host time of one scheduler step: plan + absorb, at a steady state.

    python tools/bench_scheduler.py                       # 256 running, 2,000 waiting, all decoding
    python tools/bench_scheduler.py --running 64 --waiting 0 --profile

Prints medians in microseconds and, with --profile, where they go.
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

from jaxserve.config import SchedulerConfig
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--max_model_len", type=int, default=8192)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--log", help="write the decision log to this file meanwhile")
    args = parser.parse_args()
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
    if args.profile:
        profile = cProfile.Profile()
        profile.runcall(measure, scheduler, args.steps)
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
