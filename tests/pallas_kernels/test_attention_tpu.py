"""The TPU kernel in Pallas' interpreter, DMAs and semaphores simulated, races looked for.

Small heads and one batch of every kind in shapes.py. `pytest -m whole` runs all head shapes at full
size with all batches, their lengths and windows scaled down, in all dtypes; that takes minutes.
"""

import dataclasses
import functools

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import races
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxserve.pallas_kernels.ragged_paged_attention import kv, reference, shapes, tpu

pytestmark = pytest.mark.slow
BY_NAME = {shape.name: shape for shape in shapes.SHAPES}
# Blocks of 128: the second row has two whole blocks and a part, the third a chunk in two tiles.
ROWS = shapes.BatchShape("rows", ((1, 33), (1, 300), (20, 47), (0, 0)), pad_rows=1, pad_tokens=3)
# Blocks of 256 in spans of 128: from buffer 1 a pair, in a chunk's tiles one each.
LONG_ROWS = shapes.BatchShape("long rows", ((1, 200), (1, 1100), (20, 1000)))
PAIRS = {"block_tokens": 256, "span_tokens": 128, "turn_blocks": 2}
CLOCKS = 64  # of copies under way: two that share one pass for ordered
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
races.watch()


@pytest.mark.parametrize("early", [False, True])
def test_a_buffer_read_before_its_copy_came_is_a_race(early):
    def kernel(source, out, buffer, sem):
        copy = pltpu.make_async_copy(source, buffer, sem)
        copy.start()
        if not early:
            copy.wait()
        out[...] = buffer[...]
        if early:
            copy.wait()

    array = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    call = pl.pallas_call(
        kernel,
        out_shape=array,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(array.shape, array.dtype), pltpu.SemaphoreType.DMA],
        interpret=pltpu.InterpretParams(detect_races=True),
    )
    races.KERNELS.clear()
    jax.block_until_ready(jax.jit(call)(jnp.zeros(array.shape, array.dtype)))
    assert [kernel.races_found for kernel in races.KERNELS] == [early]


def interpreter(shape, *, block_tokens=128, span_tokens=None, turn_blocks=1):
    """The kernel as a function of what shapes.place gives, compiled once for equal sizes."""

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(q, k, v, pages, batch, sinks):
        # Scales of a page that comes group by group come with each group, the same every time.
        clocks = CLOCKS if pages.scale is None else None
        return tpu.ragged_paged_attention(
            q, k, v, pages, batch,
            layer=1, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap, sinks=sinks,
            block_tokens=block_tokens, span_tokens=span_tokens, turn_blocks=turn_blocks,
            tile_tokens=16,
            interpret=pltpu.InterpretParams(detect_races=True, vector_clock_size=clocks),
        )  # fmt: skip

    return run


def interpret(case, shape, page_dtype=None, dtype=jnp.float32, run=None, **sizes):
    """-> (out, pages in the plain layout), of kernels without races."""
    races.KERNELS.clear()
    run = run or interpreter(shape, **sizes)
    out, pages = run(*shapes.place(case, "interpret", dtype, page_dtype))
    out = np.asarray(out)
    found = [kernel.races_found for kernel in races.KERNELS]
    assert found == [False] * (1 + (case.num_rows > case.num_decode))
    return out, kv.from_layout(pages, "interpret", shape.J, shape.E)


@pytest.mark.parametrize(
    ("name", "heads", "page_size"),
    [
        ("llama-3-8b", 4, 16),
        ("smollm2", 3, 32),
        ("gemma-2-9b", 2, 256),
        ("gpt-oss-20b", 4, 16),
        ("phi-3-mini", 4, 64),
        ("heads of 80", 3, 16),
    ],
)
def test_equals_float64(name, heads, page_size):
    """NaN in every slot that no token owns; the written slots hold the new K and V exactly."""
    shape = BY_NAME.get(name, shapes.HeadShape(name, 6, 3, 80, window=200))
    shape = shape.scaled(heads=heads, window=24)
    case = shapes.make_case(shape, ROWS, page_size=page_size, layers=2, layer=1, seed=7)
    want, cache = oracle.attend(case, shape, layer=1)
    out, pages = interpret(case, shape)
    np.testing.assert_allclose(out, want, rtol=0, atol=5e-6)
    owned = ~np.isnan(cache)
    np.testing.assert_array_equal(np.asarray(pages.data)[owned], cache[owned].astype(np.float32))


def test_long_rows():
    shape = BY_NAME["smollm2"]
    case = shapes.make_case(shape, LONG_ROWS, page_size=64, layers=2, layer=1, seed=9)
    want, cache = oracle.attend(case, shape, layer=1)
    out, pages = interpret(case, shape, **PAIRS)
    np.testing.assert_allclose(out, want, rtol=0, atol=5e-6)
    owned = ~np.isnan(cache)
    np.testing.assert_array_equal(np.asarray(pages.data)[owned], cache[owned].astype(np.float32))


@pytest.mark.parametrize(
    ("page_dtype", "rows", "sizes"),
    [
        (jnp.int8, ROWS, {}),
        (jnp.float8_e4m3fn, ROWS, {}),
        (jnp.float8_e4m3fn, LONG_ROWS, PAIRS),
    ],
)
def test_eight_bits(page_dtype, rows, sizes):
    """Equal to the reference, which test_attention_reference.py proves for 8 bits."""
    shape = BY_NAME["llama-3-8b"].scaled(heads=2, window=24)
    case = shapes.make_case(shape, rows, page_size=128, layers=2, layer=1, seed=8)
    q, k, v, pages, batch, _ = shapes.place(case, "reference", jnp.float32, page_dtype)
    attend = functools.partial(reference.ragged_paged_attention, layer=1, scale=shape.scale)
    want, want_pages = jax.jit(attend, compiler_options=QUICK)(q, k, v, pages, batch)
    out, got_pages = interpret(case, shape, page_dtype, **sizes)
    np.testing.assert_allclose(out, np.asarray(want), rtol=0, atol=5e-6)
    np.testing.assert_array_equal(np.asarray(got_pages.scale), np.asarray(want_pages.scale))
    owned = ~np.isnan(np.asarray(want_pages.scale))
    np.testing.assert_array_equal(
        np.asarray(got_pages.data)[owned], np.asarray(want_pages.data)[owned]
    )


def widened(cases):
    """The same cases in arrays of equal sizes: one program serves all."""

    def pad(arrays, **how):
        sizes = np.max([array.shape for array in arrays], axis=0)
        return [
            np.pad(array, [(0, size - n) for n, size in zip(array.shape, sizes)], **how)
            for array in arrays
        ]

    nan = {"constant_values": np.nan}
    filled = {"page_table_SP": {}, "kv_len_S": {}, "cu_q_len_S1": {"mode": "edge"}}
    filled |= {name: nan for name in ("q_THE", "k_TJE", "v_TJE", "cache_LGJ2KE")}
    fields = {
        name: pad([getattr(case, name) for case in cases], **how) for name, how in filled.items()
    }
    return [
        dataclasses.replace(case, **dict(zip(fields, arrays)))
        for case, arrays in zip(cases, zip(*fields.values()))
    ]


@pytest.mark.whole
@pytest.mark.parametrize("page_dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", BY_NAME)
def test_every_shape_and_batch(name, page_dtype):
    """Against the reference, from the same pages and queries. A chunk of three blocks is enough."""
    shape = dataclasses.replace(BY_NAME[name], window=BY_NAME[name].window and 24)
    scale = {"prefill-8k": 27, "empty-rows": 1, "all-padding": 1}
    batches = [batch.scaled(scale.get(batch.name, 16)) for batch in shapes.BATCHES]
    page_size = 16 if page_dtype in ("float32", "bfloat16") else 128
    dtype = jnp.float32 if page_dtype == "float32" else jnp.bfloat16
    make_case = functools.partial(
        shapes.make_case, shape, page_size=page_size, layers=2, layer=1, seed=12
    )
    kernel = interpreter(shape)
    attend = functools.partial(
        reference.ragged_paged_attention,
        layer=1, scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap,
    )  # fmt: skip
    attend = jax.jit(attend, compiler_options=QUICK)
    as_numbers = lambda held: np.asarray(held.data.astype(jnp.float32))
    for batch, case in zip(batches, widened(list(map(make_case, batches)))):
        out, pages = interpret(case, shape, page_dtype, dtype, kernel)
        q, k, v, given, ragged, sinks = shapes.place(case, "reference", dtype, page_dtype)
        wide = [x.astype(jnp.float32) for x in (q, k, v)]
        want, want_pages = attend(*wide, given, ragged, sinks=sinks)
        out, want = out.astype(np.float32), np.asarray(want)
        # bfloat16 rounds probabilities and the output, by 2**-9 of the largest each.
        allowed = 5e-6 if dtype == jnp.float32 else 2**-7 * max(1.0, np.abs(want).max(initial=0))
        np.testing.assert_allclose(out, want, rtol=0, atol=allowed, err_msg=batch.name)
        owned = ~np.isnan(as_numbers(want_pages))
        np.testing.assert_array_equal(
            as_numbers(pages)[owned], as_numbers(want_pages)[owned], err_msg=batch.name
        )
    assert kernel._cache_size() == 1


def test_page_sizes_that_memory_tiles_forbid_are_refused():
    shape = BY_NAME["smollm2"]
    for page_size, dtype, need in ((8, jnp.bfloat16, 16), (64, jnp.int8, 128)):
        case = shapes.make_case(shape, ROWS, page_size=page_size)
        q, k, v, pages, batch, _ = shapes.place(case, "tpu", jnp.bfloat16, dtype)
        with pytest.raises(ValueError, match=f"multiple of {need}"):
            tpu.ragged_paged_attention(q, k, v, pages, batch, layer=0, scale=1.0)
