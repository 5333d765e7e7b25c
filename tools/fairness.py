"""What a tenant feels of another that sends ten times as much, on the real engine.

    python tools/fairness.py --model=demo

Serves the light tenant alone, then beside the heavy one, under each policy. Promise of vtc: the
light tenant's median time to the first token stays within twice what it is alone.
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
from jaxserve.sim.workload import merge, owned_by, poisson


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache_dir")
    parser.add_argument("--rate", type=float, default=0.5, help="the light tenant's, per second")
    parser.add_argument("--greed", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--policies", default="fcfs,vtc")
    args = parser.parse_args()
    cache = pathlib.Path(args.cache_dir) if args.cache_dir else None
    parts = build(EngineConfig(model=args.model), clock=time.monotonic, cache_dir=cache)
    parts.warm_up()
    core, limits = parts.core, parts.core.scheduler.limits

    def tenant(name: str, rate: float, seed: int):
        count = int(rate * args.seconds)
        return owned_by(name, poisson(rate, count, prompt=100, output=30, spread=0.5, seed=seed))

    def serve(policy: str, *workloads) -> float:
        """The light tenant's median time to its first token."""
        core.scheduler = Scheduler(limits, SchedulerConfig(policy=policy), cache_key=b"tool")
        report = serve_workload(core, merge(*workloads), vocab_size=limits.vocab_size)
        print("\n".join(report.lines()[1:]), flush=True)
        return report.group("light").ttft.quantile(0.5)

    serve("fcfs", itertools.islice(tenant("light", 5.0, 9), 10))  # warms caches up
    print("light alone")
    alone = serve("fcfs", tenant("light", args.rate, 1))
    for policy in args.policies.split(","):
        print(f"light beside heavy, {policy}")
        beside = serve(
            policy, tenant("light", args.rate, 1), tenant("heavy", args.greed * args.rate, 2)
        )
        print(f"{policy}: light's median {beside:.3f} s, {beside / alone:.2f} times alone")


if __name__ == "__main__":
    main()
