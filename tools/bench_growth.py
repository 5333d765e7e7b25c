"""Cost grows as the work does: step time by rows and by context, and memory by requests served.

    python tools/bench_growth.py                       # the demo model; needs an idle machine
    python tools/bench_growth.py --only memory --requests=10000
    jaxserve report jaxserve-bench-growth.json         # the pictures

A decoding step is timed at each number of rows and at each length of context. Past the knee, where
the weights' own cost no longer hides a row's, times must lie on a line: the knee is the first point
from which all that follow are within --tolerance of the line through them. Memory is the process's
own, while short requests go through the asynchronous engine; its slope is taken over the second
half. Exit status 1 when something is not on its line, or memory grows by more than --leak bytes a
request.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.bench import offline, process, record
from jaxserve.bench.steps import StepLog
from jaxserve.config import EngineConfig
from jaxserve.engine import start
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.progress import Progress, ending
from jaxserve.types import Request, SamplingParams

KINDS = ("rows", "context", "memory")
FEWEST = 4  # points of a line
SETTLING = 3  # steps before the timed ones
GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Line:
    """y = intercept + slope * x from `knee` on; worst: the largest distance of a point from it,
    as a part of what the line says there."""

    slope: float
    intercept: float
    knee: float
    worst: float

    def at(self, x):
        return self.intercept + self.slope * x


def line_through(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares of the relative distances."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    slope, intercept = np.polyfit(x, y, 1, w=1 / y)
    off = np.abs(y / (intercept + slope * x) - 1)
    return Line(float(slope), float(intercept), float(x[0]), float(off.max()))


def line_past_knee(x: Sequence[float], y: Sequence[float], tolerance: float) -> Line:
    """The line through the most points at the end that are all within tolerance; when there is
    none through FEWEST, the last one tried."""
    for first in range(max(len(x) - FEWEST, 0) + 1):
        line = line_through(x[first:], y[first:])
        if line.worst <= tolerance:
            break
    return line


# ---- step time ----------------------------------------------------------------------------------


class Decoding:
    """Times decoding steps. Prompts of a sweep begin alike, row by row, and their KV stays in the
    prefix cache, so that going down from the largest point computes each prompt once."""

    def __init__(self, engine, longest: int, rows: int):
        self._core = offline.fresh_core(engine, prefix_caching=True)
        draw = np.random.default_rng(0)
        tokens = engine.core.runner.spec.num_tokens
        self._prompts = draw.integers(0, tokens, (rows, longest)).tolist()

    def step_ms(self, rows: int, context: int, steps: int) -> float:
        """Median time of a step in which `rows` sequences of about `context` tokens decode."""
        core, log = self._core, StepLog(self._core)
        names = [f"row{row}" for row in range(rows)]
        for name, prompt in zip(names, self._prompts):
            core.add(Request(name, tuple(prompt[:context]), GREEDY))
        while core.in_flight is None or core.in_flight.plan.num_decode < rows:
            core.step()
        core.observers.append(log)
        for _ in range(SETTLING + steps):
            core.step()
        core.observers.remove(log)
        for name in names:
            core.abort(name)
        while core.has_work:
            core.step()
        return float(np.median(log.columns()["seconds"][SETTLING:])) * 1000


def sweep(engine, points: Sequence[tuple[int, int]], args, watch) -> list[float]:
    """Milliseconds of a step at each (rows, context): medians over --passes from large to small."""
    on_end = ending(watch, "step time", args.passes * len(points))
    rows, longest = (max(column) for column in zip(*points))
    decoding = Decoding(engine, longest, rows)
    passes = []
    for _ in range(args.passes):
        times = []
        for point in reversed(points):
            times.append(decoding.step_ms(*point, args.steps))
            on_end()
        passes.append(times)
    return [statistics.median(times) for times in zip(*passes)][::-1]


# ---- memory -------------------------------------------------------------------------------------


async def memory_by_requests(engine: AsyncEngine, args, watch) -> tuple[list[int], list[float]]:
    """(requests ended, MiB of this process) some hundred times on the way to --requests."""
    on_end = ending(watch, "memory", args.requests)
    every, tokens = max(args.requests // 200, 1), engine.core.runner.spec.num_tokens
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    ended, counts, mib = 0, [], []

    async def client(numbers: Iterator[int]) -> None:
        nonlocal ended
        for _ in numbers:
            prompt = draw.integers(0, tokens, draw.integers(4, 2 * args.input_len - 4))
            async for _ in engine.generate(prompt.tolist(), params):
                pass
            ended += 1
            on_end()
            if ended % every == 0:
                counts.append(ended)
                mib.append(process.anonymous_bytes() / MIB)

    numbers = iter(range(args.requests))
    await asyncio.gather(*(client(numbers) for _ in range(args.clients)))
    return counts, mib


def grow(parts, args, watch) -> tuple[list[int], list[float]]:
    gc.collect()
    engine = AsyncEngine(parts.core, parts.tokenizer, config=parts.config)
    try:
        return asyncio.run(memory_by_requests(engine, args, watch))
    finally:
        engine.shutdown()


# ---- the whole ----------------------------------------------------------------------------------


def measure(engine, kind: str, args, watch) -> tuple[Sequence[float], list[float], Line]:
    """(x, y, the line past the knee). watch(what, done, of how many) follows."""
    if kind == "memory":
        x, y = grow(engine, args, watch)
        half = len(x) // 2
        return x, y, line_through(x[half:], y[half:])
    if kind == "rows":
        x, points = args.rows, [(rows, args.rows_context) for rows in args.rows]
    else:
        longest = engine.config.max_model_len - SETTLING - args.steps - 8
        x = [min(context, longest) for context in args.context]
        points = [(args.context_rows, context) for context in x]
    y = sweep(engine, points, args, watch)
    return x, y, line_past_knee(x, y, args.tolerance)


def passed(kind: str, line: Line, args) -> bool:
    if kind == "memory":
        return line.slope * MIB <= args.leak
    return line.worst <= args.tolerance


def show(kind: str, x, y, line: Line, args, console: Console) -> None:
    verdict = "yes" if passed(kind, line, args) else "NO"
    if kind == "memory":
        console.print(
            f"memory: {y[0]:.1f} to {y[-1]:.1f} MiB over {x[-1]:,} requests; in the second half "
            f"{line.slope * MIB:+.0f} bytes a request; flat: {verdict}"
        )
        return
    table = Table(kind, "ms a step", "the line", "off", title=f"step time against {kind}")
    for point, ms in zip(x, y):
        past = point >= line.knee
        fitted = (f"{line.at(point):.2f}", f"{ms / line.at(point) - 1:+.1%}") if past else ("", "")
        table.add_row(f"{point:,}", f"{ms:.2f}", *fitted)
    console.print(table)
    console.print(
        f"{kind}: {line.intercept:.2f} ms + {line.slope:.4g} ms each from {line.knee:g} on, "
        f"{line.worst:.1%} off at most; linear: {verdict}"
    )


def document(engine, kind: str, x, y, line: Line, args) -> dict:
    titles = {
        "rows": (f"rows of {args.rows_context} tokens", "ms a step"),
        "context": (f"tokens of context, {args.context_rows} rows", "ms a step"),
        "memory": ("requests served", "MiB of the process"),
    }
    run = {"x": list(x), "y": list(y), **dataclasses.asdict(line)}
    axes = dict(zip("xy", titles[kind]))
    label = f"{engine.model_name}, {kind}"
    return record.document("growth", label, [run], axes=axes, **record.engine_facts(engine))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("--model", default="demo")
    option("--tokenizer", help="of a folder that has none, as tests/data/models")
    option("--only", nargs="+", default=list(KINDS), choices=KINDS)
    option("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64])
    option("--rows_context", type=int, default=256, help="tokens of each row")
    option(
        "--context", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 6144, 8192]
    )  # fmt: skip
    option("--context_rows", type=int, default=2)
    option("--steps", type=int, default=20, help="timed at each point")
    option("--passes", type=int, default=3)
    option("--tolerance", type=float, default=0.1, help="how far a point may be off its line")
    option("--requests", type=int, default=10_000)
    option("--clients", type=int, default=128, help="requests open at once")
    option("--input_len", type=int, default=12, help="mean prompt tokens of these requests")
    option("--output_len", type=int, default=4)
    option("--leak", type=float, default=200.0, help="bytes a request that pass for flat")
    option("--kv_memory_gib", type=float, default=1.5)
    option("--compile_cache", help="as the engine's flag")
    option("--output", default="jaxserve-bench-growth.json")
    return parser.parse_args()


def main() -> int:
    args, console = arguments(), Console(highlight=False, width=140)
    slots = max(*args.rows, args.context_rows)
    config = EngineConfig(
        model=args.model, tokenizer=args.tokenizer, num_slots=slots, token_budget=max(256, slots),
        kv_memory_gib=args.kv_memory_gib, compile_cache=args.compile_cache,
    )  # fmt: skip
    documents, good = [], True
    with Progress() as progress:
        engine = start.build(config, clock=time.perf_counter, progress=progress)
        engine.warm_up()
        console.print(engine.description, soft_wrap=True, markup=False)
        for kind in args.only:
            x, y, line = measure(engine, kind, args, progress.part("measure"))
            show(kind, x, y, line, args, console)
            documents.append(document(engine, kind, x, y, line, args))
            good &= passed(kind, line, args)
            record.write(args.output, documents)  # what there is, should the rest not come
    console.print(f"written to {args.output}; `jaxserve report {args.output}` draws it")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
