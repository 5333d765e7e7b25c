"""linear on this CPU: native code against XLA, for the matrices of small models.

    python tools/bench_linear.py                                    # every shape and form
    python tools/bench_linear.py --shapes smollm2-gate --forms float32 Q4_1 --rows 1 16
    python tools/bench_linear.py --dtype bfloat16

Per shape, form and number of rows: the best time of a product, the weight bytes it reads a second,
its operations a second, and XLA's time for float32 weights. Enough copies of a weight are stacked
and walked in turn to keep them out of the nearer caches. The machine should be idle.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.linear import api, shapes

STACK_BYTES = 64 << 20  # of float32 weights walked in turn, about
BUDGET_S = 0.2  # of measuring, per cell


def make_weight(form: str, array_LFD: np.ndarray):
    """`array` in one of shapes.FORMS. Q4_1 has the layout of that GGUF type, not its rounding."""
    if form == "Q4_1":
        weight = api.quantize(array_LFD, "int4")
        return weight.replace(zero=0, offset=weight.scale * np.float16(-8))
    if form in ("int8", "int4"):
        return api.quantize(array_LFD, form)
    return array_LFD.astype(jnp.bfloat16 if form == "bfloat16" else np.float32)


def best_seconds(weight, rows: int, depth: int, dtype: str, backend: str) -> float:
    """Of one product, walking the layers of `weight` inside one compiled loop."""
    layers = weight.shape[0]

    @jax.jit
    def walk(x_TD, weight):
        def step(layer, x_TD):
            y_TF = api.linear(x_TD, weight, layer=layer, backend=backend)
            first = y_TF[:, :1] * jnp.asarray(1e-30, dtype)
            return x_TD.at[:, :1].add(first)  # the next product waits for this one

        return jax.lax.fori_loop(0, layers, step, x_TD)

    x_TD = jnp.asarray(np.random.default_rng(1).standard_normal((rows, depth), np.float32), dtype)
    walk(x_TD, weight).block_until_ready()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < BUDGET_S:
        start = time.perf_counter()
        walk(x_TD, weight).block_until_ready()
        best = min(best, (time.perf_counter() - start) / layers)
    return best


def bench(shape: shapes.LinearShape, dtype: str, forms: list[str], rows: list[int], table: Table):
    x_dtype = "bfloat16" if dtype == "int8" else dtype
    prepare = lambda weight: api.prepare(weight, "stored", "cpu", int8_inputs=dtype == "int8")
    layers = max(1, min(16, STACK_BYTES // (4 * shape.features * shape.depth)))
    rng = np.random.default_rng(0)
    array = rng.standard_normal((layers, shape.features, shape.depth), np.float32)
    plain = jax.device_put(array)
    xla = {n: best_seconds(plain, n, shape.depth, "float32", "reference") for n in rows}
    for form in forms:
        weight = jax.device_put(prepare(make_weight(form, array)))
        for n in rows:
            seconds = best_seconds(weight, n, shape.depth, x_dtype, "cpu")
            table.add_row(
                f"{shape.model} {shape.name}",
                form,
                str(n),
                f"{seconds * 1e6:,.0f}",
                f"{weight.nbytes / layers / seconds / 1e9:.1f}",
                f"{2 * n * shape.features * shape.depth / seconds / 1e9:,.0f}",
                f"{xla[n] / seconds:.1f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted({f"{shape.model}-{shape.name}" for shape in shapes.SHAPES})
    parser.add_argument("--shapes", nargs="+", default=names, choices=names)
    parser.add_argument("--forms", nargs="+", default=list(shapes.FORMS), choices=shapes.FORMS)
    parser.add_argument("--rows", nargs="+", type=int, default=list(shapes.ROWS))
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "int8"), help="of x"
    )
    args = parser.parse_args()
    if not native.available():
        raise SystemExit(native.describe())
    table = Table("matrix", "form", "rows", "us", "GB/s", "GFLOP/s", "times XLA float32")
    for shape in shapes.SHAPES:
        if f"{shape.model}-{shape.name}" in args.shapes:
            bench(shape, args.dtype, args.forms, args.rows, table)
    console = Console(width=100)
    console.print(native.describe())
    console.print(table)


if __name__ == "__main__":
    main()
