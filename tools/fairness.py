"""What a tenant feels of another that sends ten times as much, on the real engine.

    python tools/fairness.py --model=demo

Serves the light tenant alone and then beside the heavy one, under each policy, several rounds in
turn; both together are more than twice what this machine serves, which is measured first. A round's
arrivals are the same with company and without, and what else the machine does meets both alike.

Promise of vtc: the light tenant's median time to the first token stays within twice what it is
alone. It is kept when that holds for all rounds together; the table gives the rounds' own medians
as well, for one round says little. Times are to the first token.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import statistics
import time

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.start import build
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.realtime import serve_workload
from jaxserve.sim.report import Histogram, Report
from jaxserve.sim.workload import merge, owned_by, poisson

PROMISE = 2.0  # times alone
LIGHT = 0.2  # of the capacity: less than the half that is the light tenant's share
AT_ONCE = 64  # requests that capacity is measured with


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache_dir")
    parser.add_argument("--rate", type=float, help="the light tenant's; default: 1/5 of capacity")
    parser.add_argument("--greed", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--policies", default="vtc", help="the last one is held to the promise")
    args = parser.parse_args()
    cache = pathlib.Path(args.cache_dir) if args.cache_dir else None
    parts = build(EngineConfig(model=args.model), clock=time.monotonic, cache_dir=cache)
    parts.warm_up()
    core, limits = parts.core, parts.core.scheduler.limits
    policies = args.policies.split(",")

    def serve(policy: str, count: int, *workloads) -> Report:
        """Until the light tenant's last answer; what the heavy one still has then is dropped."""
        core.scheduler = Scheduler(limits, SchedulerConfig(policy=policy), cache_key=b"tool")
        enough = lambda report: len(report.group("light").e2e) == count
        return serve_workload(core, merge(*workloads), vocab_size=limits.vocab_size, until=enough)

    at_once = serve("fcfs", AT_ONCE, tenant("light", 1e6, AT_ONCE, 0))  # and warms caches up
    capacity = AT_ONCE / at_once.seconds
    rate = args.rate or LIGHT * capacity
    count = round(rate * args.seconds)
    print(
        f"capacity {capacity:.1f} requests a second; light sends {rate:.2f}, heavy "
        f"{args.greed * rate:.2f}, for {args.seconds:g} s in each of {args.rounds} rounds"
    )
    alone, beside = [], {policy: [] for policy in policies}
    for number in range(1, args.rounds + 1):
        light = functools.partial(tenant, "light", rate, count, 2 * number)
        heavy = functools.partial(
            tenant, "heavy", args.greed * rate, round(args.greed * count), 2 * number + 1
        )
        alone.append(serve("fcfs", count, light()))
        told = f"round {number}: light alone {median(alone[-1]):.3f} s"
        for policy in policies:
            beside[policy].append(serve(policy, count, light(), heavy()))
            told += f", {policy} {median(beside[policy][-1]):.3f} s"
        print(told, flush=True)
    print(f"{HEADER}\n{row('light alone', alone, alone)}")
    for policy in policies:
        print(row(f"both, {policy}", beside[policy], alone))
    times = pooled(beside[policy]).quantile(0.5) / pooled(alone).quantile(0.5)
    verdict = "kept" if times <= PROMISE else "broken"
    print(f"the promise, at most {PROMISE:.2f} times alone: {verdict}, {times:.2f} under {policy}")
    return 0 if times <= PROMISE else 1


def tenant(name: str, rate: float, count: int, seed: int):
    return owned_by(name, poisson(rate, count, prompt=100, output=30, spread=0.5, seed=seed))


HEADER = (
    f"{'':14} {'served/s':>9} {'light p50':>10} {'p90':>8} {'times alone':>12} "
    f"{'in the rounds':>14} {'preempted':>10}"
)


def median(report: Report) -> float:
    """Seconds to the light tenant's first token."""
    return report.group("light").ttft.quantile(0.5)


def pooled(reports: list[Report]) -> Histogram:
    """The light tenant's times of all rounds."""
    times = Histogram()
    for report in reports:
        times.counts += report.group("light").ttft.counts
    return times


def row(name: str, reports: list[Report], alone: list[Report]) -> str:
    light = pooled(reports)
    rounds = [median(ours) / median(other) for ours, other in zip(reports, alone)]
    served = statistics.mean(len(r.group("all").e2e) / r.seconds for r in reports)
    return (
        f"{name:14} {served:9.2f} {light.quantile(0.5):9.3f}s {light.quantile(0.9):7.3f}s "
        f"{light.quantile(0.5) / pooled(alone).quantile(0.5):12.2f} "
        f"{f'{min(rounds):.2f} to {max(rounds):.2f}':>14} {sum(r.preemptions for r in reports):10}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
