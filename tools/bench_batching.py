"""Continuous against static batching on a skewed workload, and what the host and a start cost.

    python tools/bench_batching.py                          # the demo model, 64 skewed requests
    python tools/bench_batching.py --workload=w2.json --repeats=5

One process, one set of compiled programs; the policies take turns and the figures are medians. At
the end one table: throughput of both and slots busy while requests wait, host time of a step with
64 running sequences, cold and warm start to the first token, memory against what start-up printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.bench import offline, process, startup, workload
from jaxserve.bench.energy import Meter
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.config import EngineConfig, SchedulerConfig
from jaxserve.engine import pack, start
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types import Request, SamplingParams, StepResult


def host_step_ms(running: int = 64, steps: int = 300) -> dict[str, float]:
    """Median milliseconds of plan, pack and absorb with `running` sequences decoding, one step
    behind as in the engine; the device is left out: its tokens are made up."""
    config = EngineConfig(num_slots=running, num_pages=running * 64 + 1, max_model_len=1024)
    scheduler = Scheduler.from_config(config, eos_ids=(), vocab_size=50_000)
    rows = pack.RowParams(running)
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for number in range(running):
        prompt = tuple(draw.integers(0, 50_000, 128).tolist())
        scheduler.add(Request(f"r{number}", prompt, params))
    spent = {"plan": [], "pack": [], "absorb": []}
    previous = None
    for step in range(steps):
        marks = [time.perf_counter()]
        plan = scheduler.plan(float(step))
        marks.append(time.perf_counter())
        for slot, sequence in plan.admits:
            rows.admit(slot, sequence)
        pack.pack(plan, rows, max(running, plan.num_tokens), running, 64)
        marks.append(time.perf_counter())
        if previous is not None:
            token_S = np.full(previous.num_rows, 17, np.int32)
            scheduler.absorb(previous, StepResult(token_S), float(step))
        marks.append(time.perf_counter())
        previous = plan
        if plan.num_decode == running:
            for name, before, after in zip(spent, marks, marks[1:]):
                spent[name].append((after - before) * 1000)
    totals = [sum(parts) for parts in zip(*spent.values())]
    return {name: statistics.median(ms) for name, ms in (spent | {"total": totals}).items()}


def build_and_weigh(config: EngineConfig):
    """(engine, its own memory in bytes): how much the process grew by loading and sizing it."""
    jax.block_until_ready(jax.numpy.zeros(1))
    before = process.anonymous_bytes()
    engine = start.build(config, clock=time.perf_counter)
    jax.block_until_ready(engine.core.runner.state)
    after = process.anonymous_bytes()
    engine.warm_up()
    return engine, None if before is None else after - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", help="as the engine's flag")
    parser.add_argument("--workload", default="skewed", help="a name or file of `jaxserve bench`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", type=int, default=1, help="cold and warm starts; 0: none")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, dtype=args.dtype)
    engine, grown = build_and_weigh(config)
    wanted = workload.make(
        WorkloadConfig(workload=args.workload), engine.tokenizer, engine.config.max_model_len
    )
    console = Console(highlight=False)
    console.print(f"{engine.description}\n{wanted}", markup=False)
    bench = BenchConfig(repeats=args.repeats)
    policies = ("continuous", "static")
    runs = offline.measure(engine, SchedulerConfig(), wanted, bench, policies, Meter())
    table = Table("what", "median", "runs", title="Batching")
    for policy in policies:
        rates = [run["output_tokens_per_s"] for run in runs[policy]]
        busy = [run["occupancy_queued"] for run in runs[policy]]
        table.add_row(f"{policy}: output tokens/s", *_cells(rates, "{:.1f}"))
        table.add_row(f"{policy}: slots busy while requests wait", *_cells(busy, "{:.1%}"))
    pairs = zip(runs["continuous"], runs["static"])
    ratios = [a["output_tokens_per_s"] / b["output_tokens_per_s"] for a, b in pairs]
    table.add_row("continuous / static", *_cells(ratios, "{:.2f}"))
    for name, ms in host_step_ms().items():
        table.add_row(f"host time of a step, 64 running: {name}", f"{ms:.3f} ms", "")
    if args.starts:
        starts = startup.run(config, SchedulerConfig(), args.starts)
        for kind in ("cold_s", "warm_s"):
            title = f"{kind[:-2]} start to first token"
            table.add_row(title, *_cells([run[kind] for run in starts], "{:.1f} s"))
    if grown is not None:
        told = engine.memory_table.weights + engine.memory_table.kv
        mib = f"{grown / 2**20:.0f} MiB used, {told / 2**20:.0f} MiB told"
        table.add_row("weights and KV / what the memory table says", f"{grown / told:.3f}", mib)
    console.print(table)


def _cells(values, form: str) -> tuple[str, str]:
    return form.format(statistics.median(values)), " ".join(map(form.format, values))


if __name__ == "__main__":
    main()
