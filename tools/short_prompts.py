"""What sharing slots and prefill tokens does for short prompts, on paper.

    python tools/short_prompts.py --traces=../shared/traces

Finds the capacity for a trace (everything at once), replays the trace at a part of it, and compares
the default scheduler with plain first come, first served and whole prompts in one chunk.

Two things make a short prompt wait: a slot, in bursts, and its share of each step's prefill tokens.
Slots and pages are those of `jaxserve simulate` by default, where bursts queue for a slot; with
--slots=512 --pages=80000 they wait for computing. The goal, at either: p99 of short prompts at most
half of plain first come, first served, for at most 3 % of the throughput.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib

from jaxserve.config import SchedulerConfig
from jaxserve.scheduler.limits import Limits
from jaxserve.sim.cost_model import EXAMPLE, CostModel
from jaxserve.sim.simulator import VOCAB_SIZE, simulate
from jaxserve.sim.workload import read_trace, sped_up


def limits_of(args, token_budget: int) -> Limits:
    return Limits(
        num_slots=args.slots,
        num_pages=args.pages,
        page_size=16,
        token_budget=token_budget,
        max_model_len=32_768,
        vocab_size=VOCAB_SIZE,
        prefix_caching=False,
        max_queued=10**6,
        max_queued_tokens=10**12,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", default="traces")
    parser.add_argument("--trace", default="azure_conv")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--load", type=float, default=0.9, help="part of the capacity")
    parser.add_argument("--cost_model")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--pages", type=int, default=40_000)
    parser.add_argument("--budget", type=int, default=2048)
    args = parser.parse_args()
    cost = CostModel.load(pathlib.Path(args.cost_model)) if args.cost_model else EXAMPLE
    load = lambda: itertools.islice(read_trace(args.trace, args.traces), args.requests)
    arrivals = list(load())
    span = arrivals[-1].time - arrivals[0].time
    at_once = simulate(sped_up(load(), 1e9), limits_of(args, args.budget), SchedulerConfig(), cost)
    speed = args.load * span / at_once.seconds
    print(f"capacity {len(arrivals) / at_once.seconds:.2f} requests/s; speed {speed:.2f}")
    contenders = {
        "default": (args.budget, SchedulerConfig()),
        "fcfs, whole prompts": (32_768, SchedulerConfig(prefill_sharing=False)),
    }
    p99s, speeds = [], []
    for name, (budget, config) in contenders.items():
        report = simulate(sped_up(load(), speed), limits_of(args, budget), config, cost)
        short, everyone = report.group("short"), report.group("all")
        print(
            f"{name:20}: short prompts' TTFT p50 {short.ttft.quantile(0.5):.3f} s, p99 "
            f"{short.ttft.quantile(0.99):.3f} s; all p99 {everyone.ttft.quantile(0.99):.1f} s, "
            f"longest {everyone.ttft.quantile(1.0):.1f} s; "
            f"gaps p99 {1e3 * everyone.itl.quantile(0.99):.0f} ms; "
            f"{everyone.output_tokens / report.seconds:.1f} output tokens/s",
            flush=True,
        )
        p99s.append(short.ttft.quantile(0.99))
        speeds.append(everyone.output_tokens / report.seconds)
    p99, throughput = p99s[0] / p99s[1], speeds[0] / speeds[1]
    reached = p99 <= 0.5 and throughput >= 0.97
    print(
        f"default / fcfs: p99 of short prompts {p99:.2f}, throughput {throughput:.3f}: "
        f"the goal is {'reached' if reached else 'missed'}"
    )
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
