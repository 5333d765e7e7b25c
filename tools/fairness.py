"""What a tenant feels of another that sends ten times as much, on the real engine.

    python tools/fairness.py --model=demo

Serves the light tenant alone, then beside the heavy one, under each policy; both together are more
than a small machine can serve. Promise of vtc: the light tenant's median time to the first token
stays within twice what it is alone. Times in the table are to the first token.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import time

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.start import build
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim.realtime import serve_workload
from jaxserve.sim.report import Report
from jaxserve.sim.workload import merge, owned_by, poisson


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache_dir")
    parser.add_argument("--rate", type=float, default=2.0, help="the light tenant's, per second")
    parser.add_argument("--greed", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--policies", default="fcfs,vtc")
    args = parser.parse_args()
    cache = pathlib.Path(args.cache_dir) if args.cache_dir else None
    parts = build(EngineConfig(model=args.model), clock=time.monotonic, cache_dir=cache)
    parts.warm_up()
    core, limits = parts.core, parts.core.scheduler.limits

    def tenant(name: str, rate: float, seed: int):
        count = int(rate * args.seconds)
        return owned_by(name, poisson(rate, count, prompt=100, output=30, spread=0.5, seed=seed))

    def serve(policy: str, *workloads) -> Report:
        core.scheduler = Scheduler(limits, SchedulerConfig(policy=policy), cache_key=b"tool")
        return serve_workload(core, merge(*workloads), vocab_size=limits.vocab_size)

    light = lambda: tenant("light", args.rate, 1)
    serve("fcfs", itertools.islice(tenant("light", 5.0, 9), 10))  # warms caches up
    alone = serve("fcfs", light())
    print(
        f"light sends {args.rate:g} requests a second, heavy {args.greed * args.rate:g}, for "
        f"{args.seconds:g} s\n{HEADER}\n{row('light alone', alone, alone)}",
        flush=True,
    )
    for policy in args.policies.split(","):
        beside = serve(policy, light(), tenant("heavy", args.greed * args.rate, 2))
        print(row(f"both, {policy}", beside, alone), flush=True)
    if policy == "vtc":
        times = median(beside, "light") / median(alone, "light")
        print(
            f"the promise of vtc, at most 2.00 times alone, is {'kept' if times <= 2 else 'broken'}"
        )
        return 0 if times <= 2 else 1
    return 0


HEADER = (
    f"{'':14} {'served/s':>9} {'light p50':>10} {'p90':>8} {'times alone':>12} {'heavy p50':>10}"
    f" {'preempted':>10}"
)


def median(report: Report, tenant: str) -> float:
    """Seconds to the first token."""
    return report.group(tenant).ttft.quantile(0.5)


def row(name: str, report: Report, alone: Report) -> str:
    light = report.group("light").ttft
    times = median(report, "light") / median(alone, "light")
    return (
        f"{name:14} {len(report.group('all').e2e) / report.seconds:9.2f} "
        f"{light.quantile(0.5):9.3f}s {light.quantile(0.9):7.3f}s {times:12.2f} "
        f"{median(report, 'heavy'):9.3f}s {report.preemptions:10}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
