"""One accelerator against its own limits, in minutes: random weights in real models' shapes.

    python tools/bench_gpu.py                                  # Llama 3 8B and Qwen3 0.6B
    python tools/bench_gpu.py --shapes qwen3-0.6b --peer python3
    python tools/bench_gpu.py --shapes tiny --batches 1 4 --context 64 --prompt 128   # anywhere

Where nothing can be downloaded, Python has jax with CUDA, flax, rich and torch, and minutes count:

    CC=false CXX=false python3 -m pip install --no-deps --no-build-isolation -e .
    XLA_PYTHON_CLIENT_MEM_FRACTION=.55 python3 tools/bench_gpu.py --peer python3

(no compiler: the native operations are the CPU's; the fraction leaves memory to the peer). Every
figure is printed as soon as it is known, a part that fails is told in a line and the rest goes on.

Printed for each shape: decoding steps at several batch sizes against the bandwidth measured here, a
long prompt's prefill against the matrix rate measured here, the share of a step in which the device
waits for the host, and the skewed workload end to end, beside transformers' continuous batching of
the same shape with --peer (a Python that has torch and transformers).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxserve import models
from jaxserve.bench import metrics, offline
from jaxserve.bench.workload import Item, Workload
from jaxserve.config import EngineConfig
from jaxserve.engine import memory, start
from jaxserve.engine.core import EngineCore
from jaxserve.engine.output import OutputStage
from jaxserve.engine.runner import Runner, RunnerShape
from jaxserve.engine.step import StepSpec
from jaxserve.models.loaders.checkpoint import read_config
from jaxserve.models.loaders.random_weights import abstract_params
from jaxserve.pallas_kernels.ragged_paged_attention import api as attention
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.sim import workload as sim_workload
from jaxserve.types import Request, SamplingParams

_COMMON = {
    "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "torch_dtype": "bfloat16", "max_position_embeddings": 40960,
}  # fmt: skip
SHAPES = {
    "llama-3-8b": _COMMON | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "mlp_bias": False,
    },
    "qwen3-0.6b": _COMMON | {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "tiny": _COMMON | {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096, "rope_theta": 1e4,
        "tie_word_embeddings": False, "mlp_bias": False,
    },
}  # fmt: skip


PEER_S = 60  # past --seconds that a peer may take to its end


class IdTokenizer:
    """Text does not matter here: token i is the text 'i '."""

    drops_first_space = False

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._table = [f"{i} ".encode() for i in range(vocab_size)]

    def table(self, skip_special_tokens: bool = True):
        return self._table


# ---- limits -------------------------------------------------------------------------------------


def measured_bandwidth() -> float:
    """Bytes a second of reading an array once."""
    size = (4 << 30) if jax.default_backend() != "cpu" else (256 << 20)
    data = jnp.ones(size // 4, jnp.float32)
    return size / _seconds(jax.jit(jnp.sum), data)


def measured_flops(dtype) -> float:
    """Operations a second of a square matrix product."""
    side = 8192 if jax.default_backend() != "cpu" else 1024
    square = jax.random.normal(jax.random.key(0), (side, side), dtype)  # zeros and ones run faster
    return 2 * side**3 / _seconds(jax.jit(jnp.matmul), square, square)


def _seconds(function, *arguments) -> float:
    jax.block_until_ready(function(*arguments))
    tries = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        tries.append(time.perf_counter() - begin)
    return min(tries)


# ---- an engine without a checkpoint -------------------------------------------------------------


def random_params(specs, stacked: bool, dtype):
    """Weights made on the device: numpy would take minutes for eight billion of them."""
    abstract = abstract_params(specs, matrix_dtype=dtype, stacked=stacked)
    leaves, tree = jax.tree.flatten(abstract)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    @functools.partial(jax.jit, static_argnums=1)
    def make(key, leaf):
        if len(leaf.shape) < 2 + stacked:
            return jnp.ones(leaf.shape, leaf.dtype)
        return jax.random.normal(key, leaf.shape, leaf.dtype) * jnp.asarray(0.02, leaf.dtype)

    return jax.tree.unflatten(tree, [make(key, leaf) for key, leaf in zip(keys, leaves)])


def build(shape: dict, config: EngineConfig) -> start.Engine:
    """An engine of the shape with every program compiled."""
    backend = start.choose_backend(config)
    family, parsed = read_config(shape)
    on_cpu = jax.default_backend() == "cpu"
    dtype = jnp.float32 if on_cpu else jnp.bfloat16
    backend = dataclasses.replace(backend, linear="reference")  # plain matrices
    parsed = dataclasses.replace(parsed, backend=backend, dtype=dtype)
    params = random_params(family.param_specs(parsed), backend.stacked, dtype)
    spec = parsed.kv_spec(config.page_size, dtype)
    runner_shape = RunnerShape(
        num_slots=config.num_slots,
        token_budget=config.token_budget,
        max_model_len=config.max_model_len,
        num_pages=config.num_pages,
        kv_spec=spec,
    )
    step = StepSpec(family, parsed, backend.attention, parsed.vocab_size)
    runner = Runner(step, params, runner_shape, frozenset())
    runner.compile()
    scheduler = Scheduler.from_config(config, eos_ids=(), vocab_size=parsed.vocab_size)
    text = IdTokenizer(parsed.vocab_size)
    core = EngineCore(scheduler, runner, OutputStage(text), time.perf_counter)
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    loaded = models.LoadedModel(
        family=family, config=parsed, params=params, path=pathlib.Path("random"), name="random",
        eos_ids=frozenset(), weight_dtype=str(jnp.dtype(dtype)), weight_bytes=weight_bytes,
        fingerprint="random",
    )  # fmt: skip
    kv_bytes = attention.kv_bytes_per_page(spec, backend.attention) * config.num_pages
    table = memory.MemoryTable(weight_bytes, kv_bytes, 0)
    return start.Engine(
        core, text, config, loaded, table, backend.attention, warm_up=lambda: None, manifest={}
    )


# ---- what is measured ---------------------------------------------------------------------------


def decode_ms(engine, rows: int, context: int, steps: int = 30) -> tuple[float, float]:
    """(milliseconds of a decoding step as clients see it, of the device alone)."""
    core = offline.fresh_core(engine, prefix_caching=False)
    draw = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for number in range(rows):
        prompt = tuple(draw.integers(3, engine.tokenizer.vocab_size, context).tolist())
        core.add(Request(f"r{number}", prompt, params))
    while core.in_flight is None or core.in_flight.plan.num_decode < rows:
        core.step()
    for _ in range(3):
        core.step()
    ticks = [time.perf_counter()]
    for _ in range(steps):
        core.step()
        ticks.append(time.perf_counter())
    seen = statistics.median(after - before for before, after in itertools.pairwise(ticks))
    return seen * 1000, _device_ms(core, steps)


def _device_ms(core, steps: int) -> float:
    """The same step, dispatched over and over without waiting: the host is out of the way."""
    runner = core.runner
    plan = core.in_flight.plan
    runner.fetch(core.in_flight.pending)
    pending = runner.dispatch(plan)
    begin = time.perf_counter()
    for _ in range(steps):
        pending = runner.dispatch(plan)
    runner.fetch(pending)
    return (time.perf_counter() - begin) * 1000 / steps


def prefill_seconds(engine, tokens: int) -> float:
    """One prompt to its first token, median of three."""
    seconds = []
    for number in range(3):
        draw = np.random.default_rng(number)
        prompt = tuple(draw.integers(3, engine.tokenizer.vocab_size, tokens).tolist())
        item = Item("prompt", prompt, 1)
        core = offline.fresh_core(engine, prefix_caching=False)
        (seen,), _ = offline.run(core, Workload("prefill", (item,)))
        seconds.append(seen.ttft)
    return statistics.median(seconds)


def skewed(vocab_size: int, count: int) -> Workload:
    draw = np.random.default_rng(7)
    items = []
    for number, arrival in enumerate(sim_workload.skewed(7, count)):
        prompt = tuple(draw.integers(3, vocab_size, arrival.prompt).tolist())
        items.append(Item(f"skewed-{number}", prompt, arrival.output))
    return Workload("skewed", tuple(items))


def peer_tokens_per_s(python: str, shape: dict, wanted: Workload, timeout_s: float) -> float:
    """transformers' continuous batching on random weights of the same shape."""
    worker = pathlib.Path(__file__).parent / "peers" / "transformers_worker.py"
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    requests = [
        {"prompt_ids": item.prompt_ids, "max_tokens": item.max_tokens, "stream": False}
        for item in wanted.items
    ]
    lines = "\n".join([json.dumps(requests[:4]), json.dumps(requests)])
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(shape))
        done = subprocess.run(
            [python, str(worker), folder, "16", device, "bfloat16"],
            input=lines, stdout=subprocess.PIPE, text=True, check=True, timeout=timeout_s,
        )  # fmt: skip
    figures = json.loads(done.stdout.splitlines()[-1])
    return figures["output_tokens"] / figures["seconds"]


def matrix_weights(config) -> int:
    """Weights each token is multiplied with, the output head left out."""
    heads = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


def settings(args) -> EngineConfig:
    """Slots and pages for every part."""
    slots = max(args.batches)
    length = max(args.prompt, args.context + 256, 1024) + 64
    pages = slots * (args.context + 256) // args.page_size + 2 * length // args.page_size
    return EngineConfig(
        num_slots=slots, token_budget=max(args.budget, slots), max_model_len=length,
        page_size=args.page_size, num_pages=pages,
    )  # fmt: skip


def decode_line(engine, rows: int, args, bandwidth: float) -> str:
    seen, device = decode_ms(engine, rows, args.context)
    spec = engine.core.runner.shape.kv_spec
    a_token = attention.kv_bytes_per_page(spec, engine.description) / args.page_size
    bound = (engine.memory_table.weights + rows * args.context * a_token) / bandwidth * 1000
    return (
        f"decode {rows:>3} rows: {seen:.2f} ms a step, {rows / seen * 1000:,.0f} tokens/s, "
        f"{bound / seen:.0%} of the bandwidth bound, host gap {max(1 - device / seen, 0.0):.1%}"
    )


def prefill_line(engine, args, flops: float) -> str:
    seconds = prefill_seconds(engine, args.prompt)
    rate = 2 * matrix_weights(engine.model.config) * args.prompt / seconds
    return (
        f"prefill {args.prompt} tokens: {seconds * 1000:.0f} ms, {rate / 1e12:.2f} TFLOP/s, "
        f"{rate / flops:.0%} of the matrix rate"
    )


def skewed_line(engine, wanted: Workload) -> tuple[float, str]:
    """(tokens a second, the line that says so)."""
    records, log = offline.run(offline.fresh_core(engine), wanted)
    ours = metrics.summarise(records)["output_tokens_per_s"]
    busy = log.summary()["occupancy_queued"]
    return ours, f"{wanted}: {ours:,.0f} tokens/s" + (f", {busy:.0%} busy" if busy else "")


class Course:
    """Runs parts one by one while there is time, and prints what each gives."""

    def __init__(self, seconds: float, console: Console):
        self._end = time.perf_counter() + seconds
        self._console = console
        self.good = True

    @property
    def left_s(self) -> float:
        return self._end - time.perf_counter()

    def part(self, name: str, work: Callable):
        """What work() gives; None, and a line, when it fails or time is up. A compiler or a full
        memory fails in many ways, and one part must not take the others' figures along."""
        if self.left_s <= 0:
            self._console.print(f"{name}: no time left")
            return None
        try:
            return work()
        except Exception as error:
            self.good = False
            lines = str(error).strip().splitlines() or [""]
            self._console.print(f"{name}: FAILED, {type(error).__name__}: {lines[0][:300]}")
            return None

    def line(self, name: str, work: Callable[[], str]) -> None:
        if (line := self.part(name, work)) is not None:
            self._console.print(line, markup=False, soft_wrap=True)


def measure(name: str, args, limits: tuple[float, float], course: Course, console: Console) -> None:
    """Prints a shape's figures. limits: bytes and operations a second."""
    begin = time.perf_counter()
    engine = course.part(f"{name}, building", lambda: build(SHAPES[name], settings(args)))
    if engine is None:
        return
    console.print(f"\n{name}: {engine.description}, ready in {time.perf_counter() - begin:.0f} s")
    for rows in args.batches:
        line = functools.partial(decode_line, engine, rows, args, limits[0])
        course.line(f"decode {rows} rows", line)
    course.line(f"prefill {args.prompt} tokens", lambda: prefill_line(engine, args, limits[1]))
    wanted = skewed(engine.tokenizer.vocab_size, args.requests)
    ours, line = course.part("skewed", lambda: skewed_line(engine, wanted)) or (None, "")
    if ours is None:
        return
    console.print(line)
    if args.peer:
        del engine  # for its memory
        patience = max(course.left_s, 0.0) + PEER_S
        ask = lambda: peer_tokens_per_s(args.peer, SHAPES[name], wanted, patience)
        if theirs := course.part("transformers", ask):
            ratio = ours / theirs
            console.print(f"transformers: {theirs:,.0f} tokens/s, jaxserve {ratio:.1f} times")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["llama-3-8b", "qwen3-0.6b"], choices=SHAPES)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--page_size", type=int, default=16)
    parser.add_argument("--requests", type=int, default=256, help="of the skewed workload")
    parser.add_argument("--seconds", type=float, default=480, help="begin no part after these")
    parser.add_argument("--peer", help="a Python with torch and transformers")
    args = parser.parse_args()
    console = Console(highlight=False, width=140)
    course = Course(args.seconds, console)
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    limits = measured_bandwidth(), measured_flops(dtype)
    device = jax.devices()[0].device_kind
    console.print(f"{device}: reads {limits[0] / 1e9:,.0f} GB/s, {limits[1] / 1e12:.2f} TFLOP/s")
    for name in args.shapes:
        measure(name, args, limits, course, console)
    return 0 if course.good else 1


if __name__ == "__main__":
    sys.exit(main())
