"""Checks and times the GPU attention kernel on the machine at hand (an H200, in under 8 minutes).

    pip install -e ".[cuda]" && python tools/check_gpu.py

First the results: every head shape against the jnp reference on the CPU, in a batch that mixes
decode rows, chunks, empty rows and padding, NaN wherever no token is; 8-bit and float32 caches too.
Then the times at full size, beside the card's own measured copy bandwidth and matrix rate, and
jax's pallas paged attention on its decode shapes. Ends with one table; exit code 1 if a result is
wrong. Times are medians of chained calls: the cache of one is donated to the next.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.pallas_kernels.ragged_paged_attention import api, shapes

PAGE = 16
BF16 = jnp.bfloat16
MIXED_ROWS = shapes.BatchShape(
    "everything",
    ((1, 33), (1, 1), (1, 700), (1, 1999), (5, 40), (0, 0), (64, 64), (300, 811), (3, 3)),
    pad_rows=2,
    pad_tokens=13,
)


def attention(shape, backend):
    return functools.partial(
        api.ragged_paged_attention,
        layer=0, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap, backend=backend,
    )  # fmt: skip


# ---- results -----------------------------------------------------------------------------------


def check(shape, dtype, kv_dtype, page_size):
    """-> (largest error, error allowed). Both sides start from the same numbers of `dtype`."""
    case = shapes.make_case(shape, MIXED_ROWS, page_size=page_size, seed=11)
    q, k, v, pages, batch, sinks = shapes.place(case, "gpu", dtype, kv_dtype)
    out, pages = jax.jit(attention(shape, "gpu"), donate_argnums=3)(
        q, k, v, pages, batch, sinks=sinks
    )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        q, k, v, pages, batch, sinks = shapes.place(case, "reference", dtype, kv_dtype)
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        want, _ = jax.jit(attention(shape, "reference"))(*wide, pages, batch, sinks=sinks)
    out, want = np.asarray(out.astype(jnp.float32)), np.asarray(want)
    # bfloat16 rounds probabilities and outputs; float32 matmuls add a few hundred products.
    allowed = 2e-5 if dtype == jnp.float32 else 2**-7 * max(1.0, float(np.abs(want).max()))
    return float(np.max(np.abs(out - want))), allowed


def check_all():
    """Prints a line for each check. -> whether all are right."""
    plain = [(shape, BF16, "bfloat16", PAGE) for shape in shapes.SHAPES]
    llama, smol = shapes.SHAPES[0], shapes.SHAPES[3]
    others = [
        (llama, BF16, "int8", 64),
        (llama, BF16, "float8_e4m3fn", 64),
        (smol, BF16, "int8", 16),
        (smol, jnp.float32, "float32", 16),
        (llama, BF16, "bfloat16", 256),
    ]
    good = True
    for shape, dtype, kv_dtype, page_size in plain + others:
        error, allowed = check(shape, dtype, kv_dtype, page_size)
        right = error <= allowed  # False for NaN
        good &= right
        print(
            f"{shape.name:22s} KV {kv_dtype:14s} page {page_size:3d}  error {error:.1e} "
            f"of {allowed:.1e}  {'ok' if right else 'WRONG'}",
            flush=True,
        )
    return good


# ---- times -------------------------------------------------------------------------------------


def median_seconds(call, state, repeats=15, chain=10):
    """Seconds of one state -> state call: chains of calls, each waited for at its end."""
    state = jax.block_until_ready(call(state))
    spent = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(chain):
            state = call(state)
        jax.block_until_ready(state)
        spent.append((time.perf_counter() - began) / chain)
    return statistics.median(spent)


def copy_bandwidth():
    """Bytes a second, read and written, of a large elementwise copy."""
    x = jnp.zeros(2**30, jnp.uint8)
    flip = jax.jit(lambda x: x ^ jnp.uint8(1), donate_argnums=0)
    return 2 * x.size / median_seconds(flip, x)


def matrix_rate():
    """bfloat16 operations a second of a large square matmul."""
    n = 8192
    a = jnp.ones((n, n), BF16)
    scaled = jax.jit(lambda x: (x @ a) * jnp.asarray(1 / n, BF16))
    return 2 * n**3 / median_seconds(scaled, a, repeats=5)


def place_large(shape, rows, page_size=PAGE):
    """A full-size step with random numbers made on the device: -> (state, constants)."""
    kv_len = np.array([n for _, n in rows], np.int32)
    q_len = np.array([q for q, _ in rows], np.int32)
    pages = -(-kv_len // page_size)
    table = np.zeros((len(rows), pages.max()), np.int32)
    ids = np.random.default_rng(0).permutation(np.arange(1, pages.sum() + 1))
    for s, (start, count) in enumerate(zip(np.cumsum(pages) - pages, pages)):
        table[s, :count] = ids[start : start + count]
    spec = api.KVSpec(1, shape.J, shape.E, page_size, BF16)
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


def time_step(shape, rows):
    (q, cache), (kv, batch, sinks) = place_large(shape, rows)
    run = attention(shape, "gpu")
    step = jax.jit(
        lambda state, kv, batch, sinks: run(state[0], kv[0], kv[1], state[1], batch, sinks=sinks),
        donate_argnums=0,
    )
    return median_seconds(lambda state: step(state, kv, batch, sinks), (q, cache))


def time_jax_paged(shape, rows):
    """jax's own pallas GPU decode kernel on the same rows, or None where it cannot."""
    if shape.window is not None or shape.sinks:
        return None
    from jax.experimental.pallas.ops.gpu import paged_attention

    (q, cache), (_, batch, _) = place_large(shape, rows)
    k, v = (jnp.moveaxis(cache.data[0, :, :, i], 0, 1).copy() for i in (0, 1))
    call = functools.partial(
        paged_attention.paged_attention, attn_logits_soft_cap=shape.soft_cap, k_splits=16
    )
    try:
        step = jax.jit(lambda q: call(q, k, v, batch.page_table_SP, batch.kv_len_S))
        return median_seconds(step, q)
    except Exception as error:  # its limits on shapes surface as many kinds of error
        print(f"{shape.name}: jax's kernel does not run: {str(error).splitlines()[0][:80]}")
        return None


def time_all(bandwidth, rate):
    """-> lines of the final table."""
    decode = [(1, 4096)] * 64
    prefill = [(8192, 8192)]
    ones, chunk = [(1, n) for _, n in shapes.BATCHES[3].rows[:63]], [(512, 2048)]
    lines = []
    for shape in shapes.SHAPES:
        seen = min(4096, shape.window or 4096)
        read = 64 * seen * 2 * shape.J * shape.E * 2
        seconds = time_step(shape, decode)
        share = read / seconds / bandwidth
        theirs = time_jax_paged(shape, decode)
        pairs = sum(min(p + 1, shape.window or 8192) for p in range(8192))
        prefill_share = 4 * pairs * shape.H * shape.E / time_step(shape, prefill) / rate
        alone = max(time_step(shape, ones), time_step(shape, chunk))
        mixed = time_step(shape, ones + chunk) / alone
        versus = "-" if theirs is None else f"{theirs / seconds:.2f}x"
        lines.append(
            f"{shape.name:22s}{seconds * 1e3:9.3f} ms {share:7.0%} {versus:>9s} "
            f"{prefill_share:9.0%} {mixed:9.2f}"
        )
        print(lines[-1], flush=True)
    return lines


def main() -> int:
    if jax.default_backend() != "gpu":
        print('error: no GPU here; with one: pip install -e ".[cuda]"', file=sys.stderr)
        return 1
    began = time.perf_counter()
    good = check_all()
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    print(
        f"copy {bandwidth / 1e12:.2f} TB/s, bfloat16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True
    )
    lines = time_all(bandwidth, rate)
    print(f"\n{jax.devices()[0].device_kind}, {time.perf_counter() - began:.0f} s")
    print("decode: 64 rows at 4k. goals: 80% of copy, 50% of matmul, mixed 1.15 of its larger part")
    print(
        f"{'shape':22s}{'decode':>12s} {'of copy':>7s} {'vs jax':>9s} {'prefill':>9s} {'mixed':>9s}"
    )
    print("\n".join(lines))
    print("results: all right" if good else "results: WRONG, see above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
