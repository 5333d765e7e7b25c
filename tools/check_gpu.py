"""Checks and times the GPU attention kernels on the machine at hand (an H200, in under 8 minutes).

    pip install -e ".[cuda]" && python tools/check_gpu.py
    python tools/check_gpu.py --dry_run      the same course in small, interpreted, on any machine

There are two, Triton and Mosaic, and what this prints is to choose between them. First the
results: every head shape against the jnp reference on the CPU, in a batch that mixes decode rows,
chunks, empty rows and padding, NaN wherever no token is; 8-bit and float32 caches too. Then the
times at full size, beside the card's own measured copy bandwidth and matrix rate, and jax's pallas
paged attention on its decode shapes. Ends with one table; exit code 1 if a result is
wrong or a kernel does not run, which stops nothing else. Times are medians of chained calls: the
cache of one is donated to the next. No shape is checked after two thirds of --seconds, or timed
after --seconds. Where nothing can be downloaded and Python has jax with CUDA:

    CC=false CXX=false python3 -m pip install --no-deps --no-build-isolation -e .
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.ragged_paged_attention import api, gpu, shapes

PAGE = 16
CHECKING = 2 / 3  # of --seconds
BF16 = jnp.bfloat16
MIXED_ROWS = shapes.BatchShape(
    "everything",
    ((1, 33), (1, 1), (1, 700), (1, 1999), (5, 40), (0, 0), (64, 64), (300, 811), (3, 3)),
    pad_rows=2,
    pad_tokens=13,
)


@dataclasses.dataclass(frozen=True)
class Course:
    """How large everything is; `interpret` runs the kernels on a CPU."""

    kernels: tuple[str, ...]
    shapes: tuple[shapes.HeadShape, ...]
    timed: int  # of the shapes, the first
    checked: shapes.BatchShape
    decode: tuple[tuple[int, int], ...]  # rows as (tokens, length with them)
    prefill: int
    decodes_beside: tuple[tuple[int, int], ...]  # the rows that a chunk shares its step with
    chunk: tuple[int, int]
    copied: int  # bytes
    matrix: int
    repeats: int
    chain: int
    interpret: bool


FULL = Course(
    kernels=gpu.LAUNCHERS,
    shapes=shapes.SHAPES,
    timed=len(shapes.SHAPES),
    checked=MIXED_ROWS,
    decode=((1, 4096),) * 64,
    prefill=8192,
    decodes_beside=tuple(row for row in shapes.BATCHES[3].rows if row[0] == 1),
    chunk=(512, 2048),
    copied=2**30,
    matrix=8192,
    repeats=15,
    chain=10,
    interpret=False,
)
DRY = Course(
    kernels=("triton",),  # Mosaic's interpreter wants a thread for each warpgroup
    shapes=tuple(shape.scaled(heads=2, window=24) for shape in shapes.SHAPES),
    timed=1,
    checked=shapes.BatchShape("small", ((1, 33), (1, 1), (5, 40), (0, 0)), 1, 3),
    decode=((1, 40),) * 2,
    prefill=24,
    decodes_beside=((1, 20),),
    chunk=(8, 24),
    copied=2**12,
    matrix=64,
    repeats=1,
    chain=1,
    interpret=True,
)


def attention(kernel, shape, course):
    """(q, k, v, kv_pages, batch, sinks=) -> (out, kv_pages) on the GPU, or interpreted."""
    return functools.partial(
        gpu.ragged_paged_attention, **options(shape), kernel=kernel, interpret=course.interpret
    )


def options(shape):
    return dict(layer=0, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap)


# ---- results -----------------------------------------------------------------------------------


def oracle(course, shape, dtype, kv_dtype, page_size):
    """-> (a case, what the reference makes of it on the CPU). Both kernels start from the same
    numbers of `dtype`."""
    case = shapes.make_case(shape, course.checked, page_size=page_size, seed=11)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        q, k, v, pages, batch, sinks = shapes.place(case, "reference", dtype, kv_dtype)
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        attend = functools.partial(
            api.ragged_paged_attention, **options(shape), backend="reference"
        )
        want, _ = jax.jit(attend)(*wide, pages, batch, sinks=sinks)
    return case, np.asarray(want)


def check(course, kernel, shape, dtype, kv_dtype, case, want):
    """-> (largest error, error allowed)."""
    q, k, v, pages, batch, sinks = shapes.place(case, "gpu", dtype, kv_dtype)
    run = jax.jit(attention(kernel, shape, course), donate_argnums=3)
    out, pages = run(q, k, v, pages, batch, sinks=sinks)
    # bfloat16 rounds probabilities and outputs; float32 matmuls add a few hundred products.
    allowed = 2e-5 if dtype == jnp.float32 else 2**-7 * max(1.0, float(np.abs(want).max()))
    return float(np.max(np.abs(np.asarray(out.astype(jnp.float32)) - want))), allowed


def check_all(course, stop):
    """Prints a line for each check, and begins none after `stop`. -> whether all were made and are
    right."""
    plain = [(shape, BF16, "bfloat16", PAGE) for shape in course.shapes]
    llama, smol = course.shapes[0], course.shapes[3]
    others = [
        (llama, BF16, "int8", 64),
        (llama, BF16, "float8_e4m3fn", 64),
        (smol, BF16, "int8", 16),
        (smol, jnp.float32, "float32", 16),
        (llama, BF16, "bfloat16", 256),
    ]
    good = True
    for shape, dtype, kv_dtype, page_size in plain + others:
        label = f"{shape.name:22s} KV {kv_dtype:14s} page {page_size:3d}"
        if time.perf_counter() > stop:
            print(f"{label}  not checked: no time left", flush=True)
            good = False
            continue
        try:
            case, want = oracle(course, shape, dtype, kv_dtype, page_size)
        except Exception as failure:  # as a kernel's own, below
            good = False
            print(f"{label}  reference FAILED: {reason(failure)}", flush=True)
            continue
        for kernel in course.kernels:
            if dtype == jnp.float32 and kernel == "mosaic":
                continue  # refused by name
            line = f"{label}  {kernel:7s}"
            try:
                error, allowed = check(course, kernel, shape, dtype, kv_dtype, case, want)
            except Exception as failure:  # one's compiler error must not hide the others' results
                good = False
                print(f"{line}  FAILED: {reason(failure)}", flush=True)
                continue
            right = error <= allowed  # False for NaN
            good &= right
            verdict = "ok" if right else "WRONG"
            print(f"{line}  error {error:.1e} of {allowed:.1e}  {verdict}", flush=True)
    return good


def reason(failure: Exception) -> str:
    """An error in one line: compilers write pages."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0][:120]}"


# ---- times -------------------------------------------------------------------------------------


def median_seconds(course, call, state):
    """Seconds of one state -> state call: chains of calls, each waited for at its end."""
    state = jax.block_until_ready(call(state))
    spent = []
    for _ in range(course.repeats):
        began = time.perf_counter()
        for _ in range(course.chain):
            state = call(state)
        jax.block_until_ready(state)
        spent.append((time.perf_counter() - began) / course.chain)
    return statistics.median(spent)


def copy_bandwidth(course):
    """Bytes a second, read and written, of a large elementwise copy."""
    x = jnp.zeros(course.copied, jnp.uint8)
    flip = jax.jit(lambda x: x ^ jnp.uint8(1), donate_argnums=0)
    return 2 * x.size / median_seconds(course, flip, x)


def matrix_rate(course):
    """bfloat16 operations a second of a large square matmul."""
    n = course.matrix
    a = jnp.ones((n, n), BF16)
    scaled = jax.jit(lambda x: (x @ a) * jnp.asarray(1 / n, BF16))
    return 2 * n**3 / median_seconds(course, scaled, a)


def place_large(shape, rows):
    """A step with random numbers made on the device: -> (state, constants)."""
    kv_len = np.array([n for _, n in rows], np.int32)
    q_len = np.array([q for q, _ in rows], np.int32)
    pages = -(-kv_len // PAGE)
    table = np.zeros((len(rows), pages.max()), np.int32)
    ids = np.random.default_rng(0).permutation(np.arange(1, pages.sum() + 1))
    for s, (start, count) in enumerate(zip(np.cumsum(pages) - pages, pages)):
        table[s, :count] = ids[start : start + count]
    spec = api.KVSpec(1, shape.J, shape.E, PAGE, BF16)
    dims = api.kv_page_shape(spec, int(pages.sum()) + 1, "gpu")
    key = jax.random.key(0)
    cache = api.KVPages(jax.random.normal(key, dims, BF16))
    T = int(q_len.sum())
    q = jax.random.normal(key, (T, shape.H, shape.E), BF16)
    kv = jax.random.normal(key, (2, T, shape.J, shape.E), BF16)
    as_int = lambda x: jnp.asarray(x, jnp.int32)
    batch = api.RaggedBatch(
        as_int(table),
        as_int(kv_len),
        as_int(np.concatenate([[0], np.cumsum(q_len)])),
        as_int([len(rows)]),
        as_int([int((q_len == 1).sum())]),
    )
    sinks = jnp.zeros(shape.H, jnp.float32) if shape.sinks else None
    return (q, cache), (kv, batch, sinks)


def time_step(course, kernel, shape, rows):
    (q, cache), (kv, batch, sinks) = place_large(shape, rows)
    run = attention(kernel, shape, course)
    step = jax.jit(
        lambda state, kv, batch, sinks: run(state[0], kv[0], kv[1], state[1], batch, sinks=sinks),
        donate_argnums=0,
    )
    return median_seconds(course, lambda state: step(state, kv, batch, sinks), (q, cache))


def time_jax_paged(course, shape, rows):
    """jax's own pallas GPU decode kernel on the same rows, or None where it cannot."""
    if shape.window is not None or shape.sinks:
        return None
    try:
        from jax.experimental.pallas.ops.gpu import paged_attention
    except ImportError:  # deprecated in 0.11, so a later jax may be without it
        return None
    try:
        (q, cache), (_, batch, _) = place_large(shape, rows)
        k, v = (jnp.moveaxis(cache.data[0, :, :, i], 0, 1).copy() for i in (0, 1))
        call = functools.partial(
            paged_attention.paged_attention,
            attn_logits_soft_cap=shape.soft_cap, interpret=course.interpret,
            k_splits=math.gcd(16, batch.page_table_SP.shape[1]),
        )  # fmt: skip
        step = jax.jit(lambda q: call(q, k, v, batch.page_table_SP, batch.kv_len_S))
        return median_seconds(course, step, q)
    except Exception as error:  # its limits on shapes surface as many kinds of error
        print(f"{shape.name}: jax's kernel does not run: {reason(error)}")
        return None


def time_kernel(course, kernel, shape, theirs, bandwidth, rate):
    """-> a kernel's line of the final table. theirs: seconds of jax's own kernel, or None."""
    measure = functools.partial(time_step, course, kernel, shape)
    in_sight = sum(min(n, shape.window or n) for _, n in course.decode)
    seconds = measure(course.decode)
    share = in_sight * 2 * shape.J * shape.E * jnp.dtype(BF16).itemsize / seconds / bandwidth
    versus = "-" if theirs is None else f"{theirs / seconds:.2f}x"
    n = course.prefill
    pairs = sum(min(p + 1, shape.window or n) for p in range(n))
    prefill = 4 * pairs * shape.H * shape.E / measure(((n, n),)) / rate
    ones, chunk = course.decodes_beside, (course.chunk,)
    mixed = measure(ones + chunk) / max(measure(ones), measure(chunk))
    return (
        f"{shape.name:22s}{kernel:7s}{seconds * 1e3:9.3f} ms {share:7.0%} {versus:>9s} "
        f"{prefill:9.0%} {mixed:9.2f}"
    )


def time_all(course, stop):
    """-> (lines of the final table, whether all ran); none is begun after `stop`."""
    bandwidth, rate = copy_bandwidth(course), matrix_rate(course)
    print(
        f"copy {bandwidth / 1e12:.2f} TB/s, bfloat16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True
    )
    lines, good = [], True
    for shape in course.shapes[: course.timed]:
        if time.perf_counter() > stop:
            lines.append(f"{shape.name:22s} not timed: no time left")
            continue
        theirs = time_jax_paged(course, shape, course.decode)
        for kernel in course.kernels:
            try:
                lines.append(time_kernel(course, kernel, shape, theirs, bandwidth, rate))
            except Exception as failure:  # as in check_all
                good = False
                lines.append(f"{shape.name:22s}{kernel:7s} FAILED: {reason(failure)}")
            print(lines[-1], flush=True)
    return lines, good


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--dry_run", action="store_true", help="small, interpreted, on a CPU")
    parser.add_argument("--seconds", type=float, default=400, help="begin no shape after these")
    args = parser.parse_args(argv)
    if not args.dry_run and jax.default_backend() != "gpu":
        print(
            'error: no GPU here (--dry_run?); with one: pip install -e ".[cuda]"', file=sys.stderr
        )
        return 1
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError:
        print("error: the reference runs on the CPU: JAX_PLATFORMS=cuda,cpu", file=sys.stderr)
        return 1
    course = DRY if args.dry_run else FULL
    began = time.perf_counter()
    good = check_all(course, began + args.seconds * CHECKING)  # the rest is for times
    lines, all_ran = time_all(course, began + args.seconds)
    good &= all_ran
    print(f"\n{jax.devices()[0].device_kind}, {time.perf_counter() - began:.0f} s")
    print("decode: 64 rows at 4k. goals: 80% of copy, 50% of matmul, mixed 1.15 of its larger part")
    print(
        f"{'shape':22s}{'kernel':7s}{'decode':>12s} {'of copy':>7s} {'vs jax':>9s} "
        f"{'prefill':>9s} {'mixed':>9s}"
    )
    print("\n".join(lines))
    print("results: all right" if good else "results: WRONG or not known, see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
