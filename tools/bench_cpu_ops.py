"""The native CPU attention against the jnp reference: decode and prefill of small models.

    python tools/bench_cpu_ops.py                       # SmolLM2's and Gemma 3's heads
    python tools/bench_cpu_ops.py --heads smollm2 --kv_dtype bfloat16

Per batch: the best time of one layer, the KV bytes it reads a second, its operations a second, and
the reference's time. The cache is donated to the loop, as in a step. The machine should be idle.
"""

from __future__ import annotations

import argparse
import functools
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import api, shapes

LAYERS = 4
BUDGET_S = 0.3  # of measuring, per cell
BATCHES = (
    shapes.BatchShape("decode 1 x 1024", ((1, 1024),)),
    shapes.BatchShape("decode 16 x 128", ((1, 128),) * 16),
    shapes.BatchShape("decode 16 x 1024", ((1, 1024),) * 16),
    shapes.BatchShape("prefill 256", ((256, 256),)),
    shapes.BatchShape("prefill 256 of 1536", ((256, 1536),)),
)


def best_seconds(shape, batch_shape, backend: str, kv_dtype) -> float:
    """Of one layer's write and attention."""
    case = shapes.make_case(shape, batch_shape, page_size=16, layers=1)
    q, k, v, pages, batch, sinks = shapes.place(case, backend, jnp.float32, kv_dtype)
    pages = jax.tree.map(lambda a: jnp.concatenate([a] * LAYERS), pages)

    @functools.partial(jax.jit, donate_argnames="pages")
    def walk(q, pages):
        def step(layer, carry):
            q, pages = carry
            out, pages = api.ragged_paged_attention(
                q, k, v, pages, batch, layer=layer, scale=shape.scale, window=shape.window,
                soft_cap=shape.soft_cap, sinks=sinks, backend=backend,
            )  # fmt: skip
            return q + out * 1e-30, pages  # the next layer waits for this one

        return jax.lax.fori_loop(0, LAYERS, step, (q, pages))

    _, pages = jax.block_until_ready(walk(q, pages))
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < BUDGET_S:
        start = time.perf_counter()
        _, pages = jax.block_until_ready(walk(q, pages))
        best = min(best, (time.perf_counter() - start) / LAYERS)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    heads = {shape.name: shape for shape in shapes.SHAPES}
    parser.add_argument("--heads", nargs="+", default=["smollm2", "gemma-3-270m"], choices=heads)
    kv_dtypes = ("float32", "bfloat16", "int16", "int8")
    parser.add_argument("--kv_dtype", default="float32", choices=kv_dtypes)
    args = parser.parse_args()
    if not native.available():
        raise SystemExit(native.describe())
    table = Table("heads", "batch", "us", "GB/s", "GFLOP/s", "times reference")
    for name in args.heads:
        shape = heads[name]
        for batch in BATCHES:
            seconds = best_seconds(shape, batch, "cpu", args.kv_dtype)
            reference = best_seconds(shape, batch, "reference", args.kv_dtype)
            vector_bytes = shape.E * jnp.dtype(args.kv_dtype).itemsize
            kv_bytes = 2 * shape.J * vector_bytes * sum(n for _, n in batch.rows)
            seen = sum(length - i for tokens, length in batch.rows for i in range(tokens))
            table.add_row(
                name,
                batch.name,
                f"{seconds * 1e6:,.0f}",
                f"{kv_bytes / seconds / 1e9:.1f}",
                f"{4 * shape.H * shape.E * seen / seconds / 1e9:,.0f}",
                f"{reference / seconds:.1f}",
            )
    console = Console(width=100)
    console.print(native.describe())
    console.print(table)


if __name__ == "__main__":
    main()
