"""The jnp reference against float64 numpy, and the promises of the contract, bit for bit."""

import dataclasses
import functools

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.ragged_paged_attention import api, kv, shapes

BY_NAME = {shape.name: shape for shape in shapes.SHAPES}


def small(shape):
    """The shape with a window short enough to matter in small batches."""
    return dataclasses.replace(shape, window=shape.window and max(8, shape.window // 32))


@functools.partial(
    jax.jit,
    static_argnames=("layer", "scale", "window", "soft_cap"),
    donate_argnames="kv_pages",
)
def reference(q, k, v, kv_pages, batch, sinks, *, layer=0, scale, window, soft_cap):
    return api.ragged_paged_attention(
        q, k, v, kv_pages, batch,
        layer=layer, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
        backend="reference",
    )  # fmt: skip


def run(case, shape, dtype=jnp.float32, kv_dtype=None, **options):
    q, k, v, pages, batch, sinks = shapes.place(case, "reference", dtype, kv_dtype)
    return reference(
        q, k, v, pages, batch, sinks,
        scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap, **options,
    )  # fmt: skip


def as_float64(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


@pytest.mark.parametrize("name", BY_NAME)
def test_equals_float64(name):
    """Outputs of unit-size values: float32 sums of a few hundred products keep 5 digits."""
    shape = small(BY_NAME[name])
    mixed = next(b for b in shapes.BATCHES if b.name == "mixed-512").scaled(16)
    case = shapes.make_case(shape, mixed, page_size=16, seed=1)
    want, cache = oracle.attend(case, shape)
    out, pages = run(case, shape)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(np.asarray(pages.data), cache.astype(np.float32))


@pytest.mark.parametrize("batch", shapes.BATCHES, ids=lambda b: b.name)
def test_every_batch(batch):
    """Empty rows, padding rows and padding tokens included; padding's output is zero."""
    shape = BY_NAME["smollm2"]
    batch = batch.scaled(16) if batch.num_tokens > 32 else batch
    case = shapes.make_case(shape, batch, page_size=16, seed=2)
    want, cache = oracle.attend(case, shape)
    out, pages = run(case, shape)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(np.asarray(pages.data), cache.astype(np.float32))


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_any_page_size(page_size):
    shape = small(BY_NAME["gemma-3-270m"])
    rows = shapes.BatchShape("rows", ((1, 1), (1, 64), (1, 65), (7, 7), (64, 128), (3, 100)))
    case = shapes.make_case(shape, rows, page_size=page_size, seed=3)
    want, _ = oracle.attend(case, shape)
    np.testing.assert_allclose(np.asarray(run(case, shape)[0]), want, rtol=0, atol=5e-6)


def test_bfloat16_rounds_once():
    """With bfloat16 in and float32 inside, the only error left is the output's own rounding."""
    shape = BY_NAME["qwen3-0.6b"]
    rows = shapes.BatchShape("rows", ((1, 40), (9, 50)))
    case = shapes.make_case(shape, rows, page_size=16, seed=4)
    rounded = {
        name: np.asarray(jnp.asarray(getattr(case, name)).astype(jnp.bfloat16).astype(jnp.float32))
        for name in ("q_THE", "k_TJE", "v_TJE", "cache_LGJ2KE")
    }
    case = dataclasses.replace(case, **rounded)
    want, _ = oracle.attend(case, shape)
    out, _ = run(case, shape, jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(as_float64(out), want, rtol=2**-8, atol=5e-6)


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
def test_eight_bits(kv_dtype):
    """Equal to float64 attention over the very numbers that the 8-bit cache holds."""
    shape = small(BY_NAME["gpt-oss-20b"])
    rows = shapes.BatchShape("rows", ((1, 40), (9, 50)), pad_tokens=2)
    case = shapes.make_case(shape, rows, page_size=16, seed=5)
    out, pages = run(case, shape, kv_dtype=kv_dtype)
    held = pages.data.astype(jnp.float32) * pages.scale[..., None]
    held = np.asarray(held)
    token_page, token_slot = case.page_table_SP[1, 49 // 16], 49 % 16
    step = 1 / 127 if kv_dtype == "int8" else 2**-4
    np.testing.assert_allclose(
        held[0, token_page, :, 0, token_slot], case.k_TJE[9], rtol=step, atol=4 * step
    )

    def as_held(array, kv_index):
        """This step's K or V as the cache gives it back."""
        array = array.copy()
        for s in range(2):
            for t in range(case.cu_q_len_S1[s], case.cu_q_len_S1[s + 1]):
                position = case.kv_len_S[s] - case.cu_q_len_S1[s + 1] + t
                page, slot = case.page_table_SP[s, position // 16], position % 16
                array[t] = held[0, page, :, kv_index, slot]
        return array

    seen = dataclasses.replace(
        case, k_TJE=as_held(case.k_TJE, 0), v_TJE=as_held(case.v_TJE, 1), cache_LGJ2KE=held
    )
    want, _ = oracle.attend(seen, shape)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=5e-6)


def test_fp8_never_becomes_nan():
    """B042: a cast of more than 448 to e4m3 is NaN; rows of zeros would divide by a zero scale."""
    values = jnp.array([[448, 464, 465, 1000, -1000, jnp.inf, 0.1, 0], [0] * 8], jnp.float32)
    for dtype in (jnp.float8_e4m3fn, jnp.int8):
        codes, scale = kv.quantise(values, dtype)
        back = codes.astype(jnp.float32) * scale[..., None]
        assert np.isfinite(np.asarray(back)).all()
        assert (np.asarray(back)[1] == 0).all()
    finite = values.at[0, 5].set(900.0)
    codes, scale = kv.quantise(finite, jnp.float8_e4m3fn)
    back = np.asarray(codes.astype(jnp.float32) * scale[..., None])
    np.testing.assert_allclose(back, np.asarray(finite), rtol=2**-4, atol=1e-6)


def test_fp8_codes_below_the_smallest_normal_become_that_or_zero():
    """A TPU flushes subnormal numbers; every backend is to see the same cache."""
    least = 2.0**-6
    values = jnp.array([[448, 0.6 * least, 0.4 * least, -0.9 * least, least, 1.3 * least]])
    codes, scale = kv.quantise(values, jnp.float8_e4m3fn)
    assert scale.tolist() == [1.0]
    assert codes.astype(jnp.float32).tolist() == [[448, least, 0, -least, least, 1.25 * least]]


def surrounded(x, at, begin, end, num_tokens):
    """x[begin:end] at place `at` among num_tokens others."""
    filler = np.random.default_rng(end).standard_normal((num_tokens, *x.shape[1:]), np.float32)
    filler[at : at + end - begin] = np.asarray(x)[begin:end]
    return jnp.asarray(filler)


def split_case(case, shape, cuts, num_tokens, order):
    """-> outputs of the case's one row, computed in chunks that end at `cuts`.

    Every step packs `num_tokens` tokens: the row's chunk sits between other rows, at a place that
    depends on `order`.
    """
    q, k, v, pages, _, sinks = shapes.place(case, "reference", jnp.float32)
    length = int(case.kv_len_S[0])
    outs, begin = [], 0
    for end in [*cuts, length]:
        chunk = end - begin
        mates = [(1, 20), (0, 0), (3, 9)]
        rows = [*mates[:order], (chunk, end), *mates[order:]]
        q_len = np.array([r[0] for r in rows])
        cu = np.concatenate([[0], np.cumsum(q_len)])
        table = np.zeros((4, case.page_table_SP.shape[1]), np.int32)
        table[order] = case.page_table_SP[0]
        spare = int(case.page_table_SP.max()) + 1  # the mates' own pages
        for s in range(4):
            if s != order:
                table[s, :2] = spare + 2 * s, spare + 2 * s + 1
        at = int(cu[order])
        q_t, k_t, v_t = (surrounded(x, at, begin, end, num_tokens) for x in (q, k, v))
        batch = api.RaggedBatch(
            jnp.asarray(table),
            jnp.asarray([r[1] for r in rows], jnp.int32),
            jnp.asarray(cu, jnp.int32),
            jnp.asarray([4], jnp.int32),
            jnp.asarray([0], jnp.int32),
        )
        out, pages = reference(
            q_t, k_t, v_t, pages, batch, sinks,
            scale=shape.scale, window=shape.window, soft_cap=shape.soft_cap,
        )  # fmt: skip
        outs.append(np.asarray(out)[at : at + chunk])
        begin = end
    return np.concatenate(outs)


@pytest.mark.parametrize("name", ["smollm2", "gemma-3-270m", "gpt-oss-20b", "phi-3-mini"])
@pytest.mark.parametrize("num_tokens", [64, 128])
def test_a_token_is_its_own(name, num_tokens):
    """Chunk sizes, order and mates change no bit of a token's output, at one T."""
    shape = small(BY_NAME[name])
    case = shapes.make_case(shape, shapes.BatchShape("row", ((56, 56),)), page_size=16, seed=6)
    room = np.full((1, 12, *case.cache_LGJ2KE.shape[2:]), np.nan, np.float32)
    room[0, :, :, :, :, :] = 0.25  # the mates' pages
    case = dataclasses.replace(case, cache_LGJ2KE=np.concatenate([case.cache_LGJ2KE, room], axis=1))
    whole = split_case(case, shape, [], num_tokens, 0)
    want, _ = oracle.attend(case, shape)
    np.testing.assert_allclose(whole, want, rtol=0, atol=5e-6)
    for cuts, order in (([16, 32, 48], 1), ([1, 2, 3, 7, 20, 33, 55], 3), ([40], 2)):
        np.testing.assert_array_equal(split_case(case, shape, cuts, num_tokens, order), whole)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scan"])
def test_the_cache_is_never_copied(scan):
    """Layers share one donated cache: temporary memory stays far below one layer of it."""
    shape, layers, pages = BY_NAME["smollm2"], 4, 256
    spec = kv.KVSpec(layers, shape.J, shape.E, 16, jnp.float32)

    def step(q, k, v, kv_pages, batch):
        def one(carry, layer):
            q, kv_pages = carry
            out, kv_pages = api.ragged_paged_attention(
                q, k + q[:, ::3], v, kv_pages, batch,
                layer=layer, scale=shape.scale, backend="reference",
            )  # fmt: skip
            return (out, kv_pages), None

        if scan:
            return jax.lax.scan(one, (q, kv_pages), jnp.arange(layers, dtype=jnp.int32))[0]
        for layer in range(layers):
            (q, kv_pages), _ = one((q, kv_pages), layer)
        return q, kv_pages

    array = lambda *dims, dtype=jnp.int32: jax.ShapeDtypeStruct(dims, dtype)
    token = lambda heads: array(8, heads, shape.E, dtype=jnp.float32)
    batch = api.RaggedBatch(array(8, 16), array(8), array(9), array(1), array(1))
    cache = api.kv_page_specs(spec, pages, "reference")
    compiled = (
        jax.jit(step, donate_argnums=3)
        .lower(token(shape.H), token(shape.J), token(shape.J), cache, batch)
        .compile()
    )
    memory = compiled.memory_analysis()
    cache_bytes = pages * api.kv_bytes_per_page(spec, "reference")
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / layers / 4


def test_refusals_say_what_to_do():
    shape = BY_NAME["smollm2"]
    case = shapes.make_case(shape, shapes.BatchShape("row", ((1, 3),)), page_size=16)
    q, k, v, pages, batch, _ = shapes.place(case, "reference", jnp.float32)
    call = functools.partial(api.ragged_paged_attention, layer=0, scale=1.0)
    with pytest.raises(ValueError, match="multiple of"):
        call(q[:, :8], k, v, pages, batch, backend="reference")
    with pytest.raises(ValueError, match="at least 1"):
        call(q, k, v, pages, batch, window=0, backend="reference")
    with pytest.raises(ValueError, match="choose one of"):
        call(q, k, v, pages, batch, backend="abacus")
    with pytest.raises(ValueError, match="choose one of"):
        kv.KVSpec(1, 1, 64, 16, jnp.float16)
