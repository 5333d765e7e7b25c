"""How well the simulator predicts this machine: calibrate on one workload, check on another.

    python tools/check_simulator.py --model=demo

Serves the skewed workload on the real engine with the decision log on, fits a cost model to the
log, then serves a second workload (random arrivals, other lengths) both for real and on paper.
The goal: throughput within 10 % and the median time to the first token within 15 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import tempfile
import time

from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine.start import build
from jaxserve.obs.decision_log import RecordingScheduler, calibrate, replay
from jaxserve.sim.cost_model import PARTS
from jaxserve.sim.realtime import serve_workload
from jaxserve.sim.simulator import VOCAB_SIZE, simulate
from jaxserve.sim.workload import poisson, skewed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--cache_dir")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second when checking")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--cost_model", help="file to keep the fitted model in")
    args = parser.parse_args()
    cache = pathlib.Path(args.cache_dir) if args.cache_dir else None
    parts = build(EngineConfig(model=args.model), clock=time.monotonic, cache_dir=cache)
    parts.warm_up()
    core, scheduler = parts.core, parts.core.scheduler
    vocab_size = scheduler.limits.vocab_size

    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "decisions"
        core.scheduler = RecordingScheduler(scheduler, log, {"model": args.model})
        serve_workload(core, skewed(), vocab_size=vocab_size)
        core.scheduler.close()
        core.scheduler = scheduler
        cost = calibrate(log)
        made_again = replay(log)
    print(f"{cost.steps} steps, mean error of the fit {cost.error:.1%}")
    print("  ".join(f"{part} {price:.3g} s" for part, price in zip(PARTS, cost.price)))
    print(f"replay: {made_again.plans} plans, first difference: {made_again.differs}")
    if args.cost_model:
        cost.save(pathlib.Path(args.cost_model))

    load = lambda: poisson(args.rate, args.requests, prompt=100, output=40, spread=0.7, seed=5)
    real = serve_workload(core, load(), vocab_size=vocab_size, seed=1)
    limits = dataclasses.replace(
        scheduler.limits, vocab_size=VOCAB_SIZE, eos_ids=(), prefix_caching=False
    )
    paper = simulate(load(), limits, SchedulerConfig(), cost)
    for name, report in (("real", real), ("on paper", paper)):
        print(name)
        print("\n".join(report.lines()[1:]))
    speed = [r.group("all").output_tokens / r.seconds for r in (real, paper)]
    ttft = [r.group("all").ttft.quantile(0.5) for r in (real, paper)]
    reached = True
    for name, goal, (is_real, is_paper) in (
        ("output tokens/s", 0.10, speed),
        ("median TTFT in s", 0.15, ttft),
    ):
        error = is_paper / is_real - 1
        reached &= abs(error) <= goal
        print(f"{name}: {is_real:.3f} real, {is_paper:.3f} on paper ({error:+.1%})")
    print(f"the goal is {'reached' if reached else 'missed'}")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
