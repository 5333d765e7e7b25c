"""Where a step's time goes, against what memory and arithmetic allow.

    python tools/bench_step.py                         # the demo model, 1, 16 and 64 decoding rows
    python tools/bench_step.py --rows 16 --context 1024 --ops

For each number of rows: the time of a step, the time its bytes take at the bandwidth measured here
and its operations at the rate measured here, the larger of the two being the limit, and the time
of the compiled program by kind of operation (jax's profiler). `idle` is what is left of the step:
the device waited for the host.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import gzip
import json
import os
import pathlib
import re
import statistics
import tempfile
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.bench import offline
from jaxserve.config import EngineConfig
from jaxserve.engine import start
from jaxserve.pallas_kernels.linear import api as linear
from jaxserve.pallas_kernels.ragged_paged_attention import api as attention
from jaxserve.types import Request, SamplingParams

CHUNKED = 512  # tokens of a prompt that is prefilled in chunks
_TARGET = re.compile(r'%?([\w.-]+) = .*custom-call\(.*custom_call_target="(\w+)"')
_CONTAINERS = re.compile(r"while|call|conditional|ThunkExecutor|Threadpool|end: |\$")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this machine can do, measured: bytes a second read, operations a second of products."""

    bandwidth: float
    flops: float


def measure_machine(threads: int, dtype: str) -> Machine:
    """Best of several tries: BLAS dot products over arrays far larger than a core's caches, one
    pair a thread, and a matrix product: BLAS's of float32, for bfloat16 and int8 ours, as no
    library here has a faster one."""
    size, side = 1 << 24, 1536
    pairs = [(np.ones(size, np.float32), np.ones(size, np.float32)) for _ in range(threads)]
    square = np.ones((side, side), np.float32)
    multiply = lambda: square @ square
    if dtype in ("bfloat16", "int8"):
        backend, int8 = linear.choose_backend(jax.default_backend()), dtype == "int8"
        weight = jax.device_put(linear.prepare(square, "int8", backend, int8_inputs=int8))
        product = jax.jit(lambda x, weight: linear.linear(x, weight, backend=backend))
        x = jax.numpy.ones((side, side), jax.numpy.bfloat16)
        multiply = lambda: product(x, weight).block_until_ready()
        multiply()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        read = lambda: list(pool.map(lambda pair: np.dot(*pair), pairs))
        bandwidth = 8 * size * threads / _best(read)
    return Machine(bandwidth, 2 * side**3 / _best(multiply))


def _best(run, tries: int = 8) -> float:
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def work_of(engine, tokens: int, context: int, sequences: int) -> tuple[float, float]:
    """(bytes, operations) that a step cannot do without: every weight once, every K and V of its
    sequences once, a multiply and an add for each weight and token; the head for one a sequence."""
    config, spec = engine.model.config, engine.core.runner.shape.kv_spec
    page_bytes = attention.kv_bytes_per_page(spec, engine.model.config.backend.attention)
    kv_bytes = page_bytes / spec.page_size * context * sequences
    blocks, head = _count_weights(config)
    heads = config.num_layers * config.num_heads * config.head_dim
    operations = 2.0 * (tokens * (blocks + 2 * heads * context) + sequences * head)
    return engine.model.weight_bytes + kv_bytes, operations


def _count_weights(config) -> tuple[int, int]:
    """Weights a token is multiplied with: of the blocks' matrices, and of the output head."""
    size, heads = config.hidden_size, config.num_heads + config.num_kv_heads
    attend = 2 * size * heads * config.head_dim
    feed = 3 * size * config.intermediate_size
    return config.num_layers * (attend + feed), size * config.vocab_size


def decoding(engine, rows: int, context: int):
    """A core on which `rows` sequences of about `context` tokens decode."""
    core = offline.fresh_core(engine, prefix_caching=False)
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for number in range(rows):
        prompt = draw.integers(0, engine.core.runner.spec.num_tokens, context)
        core.add(Request(f"r{number}", tuple(prompt.tolist()), params))
    while core.in_flight is None or core.in_flight.plan.num_decode < rows:
        core.step()
    for _ in range(3):
        core.step()
    return core


def prefilling(engine):
    """A core that computes one chunk of a long prompt after the other."""
    core = offline.fresh_core(engine, prefix_caching=False)
    prompt = np.random.default_rng(0).integers(0, engine.core.runner.spec.num_tokens, CHUNKED)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    for number in range(64):
        core.add(Request(f"p{number}", tuple(prompt.tolist()), params))
    for _ in range(3):
        core.step()
    return core


def step_ms(core, steps: int) -> float:
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1000


def profile(core, steps: int) -> dict[str, float]:
    """Milliseconds a step by operation, from the profiler's trace."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                core.step()
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    spent = collections.Counter()
    for event in events:
        thread = names.get(event.get("tid"), "")
        ran = event.get("ph") == "X" and thread.startswith("tf_XLA")
        if ran and not _CONTAINERS.match(event["name"]):
            spent[event["name"]] += event["dur"] / 1000 / steps
    return dict(spent)


def program_of(runner, tokens: int):
    """The compiled program of a greedy step of so many tokens."""
    bucket = min(size for size, _ in runner.programs if size >= tokens)
    return runner.programs[bucket, False].compiled


def by_kind(spent: dict[str, float], compiled) -> dict[str, float]:
    """Operations grouped by the native function they call; XLA's own are `xla`."""
    targets = dict(_TARGET.findall(compiled.as_text()))
    kinds = collections.Counter()
    for name, ms in spent.items():
        kinds[targets.get(name, "xla").removeprefix("jaxserve_")] += ms
    return dict(kinds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto", help="as the engine's flag")
    parser.add_argument("--kv_dtype", default="auto", help="as the engine's flag")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens of each row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--attention_backend", default="auto", help='"reference": XLA alone')
    parser.add_argument("--ops", action="store_true", help="also the largest single operations")
    args = parser.parse_args()
    slots = max(args.rows)
    config = EngineConfig(
        model=args.model, dtype=args.dtype, kv_dtype=args.kv_dtype,
        num_slots=slots, token_budget=max(256, slots),
        attention_backend=args.attention_backend,
    )  # fmt: skip
    engine = start.build(config, clock=time.perf_counter)
    engine.warm_up()
    machine = measure_machine(len(os.sched_getaffinity(0)), args.dtype)
    console = Console(highlight=False)
    console.print(engine.description, soft_wrap=True, markup=False)
    console.print(f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.flops / 1e9:.0f} GFLOP/s")
    table = Table(
        "rows", "step", "bytes", "ops", "step / limit", "idle", "by kind", title="ms a step"
    )
    budget = engine.config.token_budget
    for rows in (*args.rows, 0):
        core = decoding(engine, rows, args.context) if rows else prefilling(engine)
        ms = step_ms(core, args.steps)
        spent = profile(core, args.steps // 2)
        if rows:
            size, operations = work_of(engine, rows, args.context, rows)
        else:
            size, operations = work_of(engine, budget, CHUNKED // 2, 1)
        bytes_ms, ops_ms = size / machine.bandwidth * 1e3, operations / machine.flops * 1e3
        kinds = by_kind(spent, program_of(engine.core.runner, rows or budget))
        shown = "\n".join(f"{k} {v:.1f}" for k, v in sorted(kinds.items(), key=lambda kv: -kv[1]))
        limit, idle = max(bytes_ms, ops_ms), max(ms - sum(kinds.values()), 0.0)
        cells = (ms, bytes_ms, ops_ms, ms / limit, idle)
        table.add_row(
            str(rows) if rows else f"prefill {budget}", *(f"{value:.2f}" for value in cells), shown
        )
        if args.ops:
            largest = sorted(spent.items(), key=lambda kv: -kv[1])[:12]
            console.print(rows, "rows:", ", ".join(f"{k} {v:.2f}" for k, v in largest))
    console.print(table)


if __name__ == "__main__":
    main()
