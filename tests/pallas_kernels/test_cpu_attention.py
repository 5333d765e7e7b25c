"""The native CPU attention against float64 numpy, and its promise: a token's output is its own."""

import dataclasses
import functools

import attention_oracle as oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.ragged_paged_attention import api, cpu, kv, shapes

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())

ISAS = native.isas()[:3]  # by lanes attention has no code for those above avx512
BYTE_ISAS = native.isas()[3:]  # attention multiplies bytes, and above avx512vbmi bfloat16
BY_NAME = {shape.name: shape for shape in shapes.SHAPES}
BatchShape = shapes.BatchShape


def small(shape):
    """The shape with a window short enough to matter in small batches."""
    return dataclasses.replace(shape, window=shape.window and max(8, shape.window // 32))


@functools.partial(
    jax.jit,
    static_argnames=("scale", "window", "soft_cap", "isa"),
    donate_argnames="kv_pages",
)
def native_attention(q, k, v, kv_pages, batch, sinks, *, layer=0, scale, window, soft_cap, isa):
    return cpu.ragged_paged_attention(
        q, k, v, kv_pages, batch,
        layer=layer, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, isa=isa,
    )  # fmt: skip


@jax.jit
def stored_by_reference(q, k, v, pages, batch):
    """The pages alone: the attention, which nothing asks for, is not compiled."""
    options = {"layer": 0, "scale": 1.0, "backend": "reference"}
    return api.ragged_paged_attention(q, k, v, pages, batch, **options)[1]


def options(shape, isa=None):
    return {
        "scale": shape.scale, "window": shape.window, "soft_cap": shape.soft_cap, "isa": isa
    }  # fmt: skip


def run(case, shape, dtype=jnp.float32, kv_dtype=None, isa=None, layer=0):
    placed = shapes.place(case, "cpu", dtype, kv_dtype)
    return native_attention(*placed, layer=layer, **options(shape, isa))


def plain(pages):
    """Pages in the layout of the oracle and the reference."""
    return kv.from_layout(pages, "cpu", *pages.data.shape[-4:-3], pages.data.shape[-1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", BY_NAME)
def test_equals_float64(name, isa):
    """Decode and prefill rows, some past a segment of 512 keys: float32 keeps 5 digits."""
    shape = small(BY_NAME[name])
    rows = BatchShape("rows", ((1, 1), (1, 65), (1, 700), (7, 7), (33, 530)), 1, 3)
    case = shapes.make_case(shape, rows, page_size=16, seed=1)
    want, cache = oracle.attend(case, shape)
    out, pages = run(case, shape, isa=isa)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(np.asarray(plain(pages).data), cache.astype(np.float32))


@pytest.mark.parametrize("batch", shapes.BATCHES, ids=lambda b: b.name)
def test_every_batch(batch):
    """Empty rows, padding rows and padding tokens included; padding's output is zero."""
    shape = BY_NAME["smollm2"]
    batch = batch.scaled(16) if batch.num_tokens > 32 else batch
    case = shapes.make_case(shape, batch, page_size=16, seed=2)
    want, cache = oracle.attend(case, shape)
    out, pages = run(case, shape)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(np.asarray(plain(pages).data), cache.astype(np.float32))
    assert (np.asarray(out)[case.cu_q_len_S1[case.num_rows] :] == 0).all()


@pytest.mark.parametrize("page_size", [1, 5, 64, 128])
@pytest.mark.parametrize("head_dim", [24, 80, 256])
def test_any_page_and_head_size(page_size, head_dim):
    shape = shapes.HeadShape("odd", 6, 2, head_dim, window=50)
    rows = BatchShape("rows", ((1, 1), (1, 64), (1, 129), (7, 7), (64, 128), (3, 100)))
    case = shapes.make_case(shape, rows, page_size=page_size, seed=3)
    want, cache = oracle.attend(case, shape)
    out, pages = run(case, shape)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(np.asarray(plain(pages).data), cache.astype(np.float32))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int16", "float8_e4m3fn"])
@pytest.mark.parametrize("isa", ISAS)
def test_narrow_caches(kv_dtype, isa):
    """Equal to float64 attention over the very numbers that the cache holds, and the same numbers
    as the reference stores."""
    shape = small(BY_NAME["gpt-oss-20b"])
    rows = BatchShape("rows", ((1, 40), (9, 50)), pad_tokens=2)
    case = shapes.make_case(shape, rows, page_size=16, seed=5)
    out, want, _ = run_beside_oracle(case, shape, jnp.float32, kv_dtype, isa)
    np.testing.assert_allclose(out, want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("name", BY_NAME)
def test_bfloat16_queries(name, isa, kv_dtype):
    """Queries of 8 bits, and on the tile or vector units weights of as many: a weight, and the
    result, are off by 2^-9 of themselves at most, the result by 2^-8 of the largest value, on
    average by far less."""
    shape = small(BY_NAME[name])
    rows = BatchShape("rows", ((1, 1), (1, 65), (1, 700), (7, 7), (33, 530)), 1, 3)
    case = shapes.make_case(shape, rows, page_size=16, seed=1)
    halves = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32)
    case = dataclasses.replace(
        case, q_THE=halves(case.q_THE), k_TJE=halves(case.k_TJE), v_TJE=halves(case.v_TJE)
    )
    out, want, held = run_beside_oracle(case, shape, jnp.bfloat16, kv_dtype, isa)
    largest = np.nanmax(np.abs(held[:, :, :, 1]))
    np.testing.assert_allclose(out, want, rtol=0, atol=largest * 2.0**-8)
    assert np.sqrt(np.mean((out - want) ** 2)) < 2.0**-9


@pytest.mark.parametrize("isa", BYTE_ISAS)
@pytest.mark.parametrize("name", BY_NAME)
def test_float32_queries_of_bytes(name, isa):
    """A query counts in 2^-15 of its largest element, a block's weights in 2^-16 of the largest
    (times its value's scale). So a score is off by half such a step times the key's elements at
    most, a weight by twice that in proportion, and the result by as much of the largest value, and
    half a step for each key of a block. Roundings go either way: on average it is far less."""
    shape = small(BY_NAME[name])
    rows = BatchShape("rows", ((1, 1), (1, 65), (1, 700), (7, 7), (33, 530)), 1, 3)
    case = shapes.make_case(shape, rows, page_size=16, seed=1)
    out, want, held = run_beside_oracle(case, shape, jnp.float32, "int8", isa)
    largest = np.nanmax(np.abs(held[:, :, :, 1]))
    key = np.nanmax(np.abs(held[:, :, :, 0]).sum(-1))
    score = shape.scale * key * np.nanmax(np.abs(case.q_THE)) * 2.0**-16
    np.testing.assert_allclose(out, want, rtol=0, atol=largest * (2 * score + 64 * 2.0**-17))
    assert np.sqrt(np.mean((out - want) ** 2)) < 2.0**-15


@pytest.mark.parametrize("kv_dtype", ["int8", "int16", "float8_e4m3fn"])
@pytest.mark.parametrize("isa", ISAS)
def test_codes_of_numbers_out_of_the_ordinary(kv_dtype, isa):
    """Zeros, infinities, the largest and the smallest become what kv.quantise makes of them."""
    shape = BY_NAME["smollm2"]
    case = shapes.make_case(shape, BatchShape("rows", ((7, 7),)), page_size=16, seed=3)
    for array in (case.k_TJE, case.v_TJE):
        array[0] = 0
        array[1, :, ::5] = np.inf
        array[2, :, 3] = -np.inf
        array[3] *= 1e38
        array[4] *= 1e-36
        array[5, :, 9] = 448 * array[5, :, 10]  # beside it, fp8's codes are below the normal ones
    _, pages = run(case, shape, jnp.float32, kv_dtype, isa)
    pages = plain(pages)
    for index, array in enumerate((case.k_TJE, case.v_TJE)):
        codes, scale = kv.quantise(jnp.asarray(array), jnp.dtype(kv_dtype))
        page = case.page_table_SP[0, 0]
        held = pages.data[0, page, :, index, :7].swapaxes(0, 1)
        np.testing.assert_array_equal(
            np.asarray(held).view(np.uint8), np.asarray(codes).view(np.uint8)
        )
        held = pages.scale[0, page, :, index, :7].swapaxes(0, 1)
        np.testing.assert_array_equal(np.asarray(held), np.asarray(scale))


def run_beside_oracle(case, shape, dtype, kv_dtype, isa):
    """(output, float64 attention over the numbers in the cache, these); the cache was checked."""
    out, pages = run(case, shape, dtype, kv_dtype, isa)
    stored = stored_by_reference(*shapes.place(case, "reference", dtype, kv_dtype)[:5])
    for mine, theirs in zip(jax.tree.leaves(plain(pages)), jax.tree.leaves(stored), strict=True):
        as_bytes = lambda a: np.asarray(a).view(np.uint8)
        np.testing.assert_array_equal(as_bytes(mine), as_bytes(theirs))
    held = np.asarray(stored.data.astype(jnp.float32))
    if stored.scale is not None:
        held = held * np.asarray(stored.scale)[..., None]
    # The oracle writes the step's K and V itself: give it what the cache made of them.
    seen = {"k_TJE": case.k_TJE.copy(), "v_TJE": case.v_TJE.copy()}
    for s in range(case.num_rows):
        for t in range(case.cu_q_len_S1[s], case.cu_q_len_S1[s + 1]):
            position = case.kv_len_S[s] - case.cu_q_len_S1[s + 1] + t
            slot = held[0, case.page_table_SP[s, position // 16], :, :, position % 16]
            seen["k_TJE"][t], seen["v_TJE"][t] = slot[:, 0], slot[:, 1]
    want, _ = oracle.attend(dataclasses.replace(case, cache_LGJ2KE=held, **seen), shape)
    return np.asarray(out, np.float32), want, held


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("head_dim", [512, 528])
def test_long_vectors_of_codes(head_dim, dtype):
    """The largest products that int32 adds up, and vectors beyond that: every element of a query
    or key is its largest. Every other key weighs nothing."""
    shape = shapes.HeadShape("long", 2, 1, head_dim)
    case = shapes.make_case(shape, BatchShape("rows", ((1, 40),)), page_size=16, seed=4)
    case.q_THE[:], case.k_TJE[:] = 1, 1
    keys = case.cache_LGJ2KE[:, :, :, 0]
    keys[:] = np.where(np.isnan(keys), np.nan, 1)
    keys[:, :, :, ::2] *= 0.25
    out, want, _ = run_beside_oracle(case, shape, dtype, "int8", None)
    np.testing.assert_allclose(out, want, rtol=0, atol=2.0**-7)


@pytest.mark.parametrize(
    ("isa", "dtype", "kv_dtype"),
    [(isa, jnp.float32, None) for isa in ISAS]
    + [(isa, jnp.bfloat16, kv) for isa in BYTE_ISAS for kv in ("bfloat16", "int8")]
    + [(isa, jnp.float32, "int8") for isa in BYTE_ISAS],
)
@pytest.mark.parametrize("name", ["smollm2", "gemma-3-270m", "gemma-2-9b", "gpt-oss-20b"])
def test_a_token_is_its_own(name, isa, dtype, kv_dtype):
    """600 tokens at once, in chunks, one by one, with and without mates: the same bits."""
    shape = small(BY_NAME[name])
    case = shapes.make_case(shape, BatchShape("row", ((600, 600),)), page_size=16, seed=6)
    q, k, v, pages, batch, sinks = shapes.place(case, "cpu", dtype, kv_dtype)
    whole, _ = native_attention(q, k, v, pages, batch, sinks, **options(shape, isa))
    whole = np.asarray(whole)
    pages = shapes.place(case, "cpu", dtype, kv_dtype)[3]
    begin = 0
    for end in (1, 2, 17, 64, 100, 511, 512, 513, 514, 599, 600):
        # A mate in front reads the null page: it shows another row's work without owning pages.
        mates = (end - begin) % 3
        table = np.concatenate([np.zeros((mates, case.page_table_SP.shape[1])), case.page_table_SP])
        lengths = np.array([5] * mates + [end])
        cu = np.cumsum([0] + [1] * mates + [end - begin])
        mate = np.full((mates, *q.shape[1:]), 0.5, q.dtype)
        mate_kv = np.full((mates, *k.shape[1:]), 0.5, k.dtype)
        step = [np.concatenate([mate, q[begin:end]])]
        step += [np.concatenate([mate_kv, a[begin:end]]) for a in (k, v)]
        as_int = lambda a: jnp.asarray(np.asarray(a, np.int32))
        batch = api.RaggedBatch(
            as_int(table), as_int(lengths), as_int(cu), as_int([mates + 1]), as_int([mates])
        )
        out, pages = native_attention(
            *map(jnp.asarray, step), pages, batch, sinks, **options(shape, isa)
        )
        np.testing.assert_array_equal(np.asarray(out)[mates:], whole[begin:end])
        begin = end


def test_instruction_sets_agree_to_the_bit():
    shape = BY_NAME["smollm2"]
    case = shapes.make_case(shape, BatchShape("rows", ((1, 90), (20, 20))), page_size=16, seed=7)
    results = [np.asarray(run(case, shape, isa=isa)[0]) for isa in ISAS[1:]]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("head_dim", [24, 64, 80, 512])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_units_agree_to_the_bit_over_int8(head_dim, group, dtype):
    """Sums of codes are exact on the tile unit and on vector units; the rest is one code. With one
    unit here: heads of sizes that vectors do not divide are right."""
    shape = shapes.HeadShape("odd", 2 * group, 2, head_dim)
    rows = BatchShape("rows", ((1, 1), (1, 650), (7, 7), (64, 128)))
    case = shapes.make_case(shape, rows, page_size=16, seed=10)
    results = []
    for isa in BYTE_ISAS:
        out, want, held = run_beside_oracle(case, shape, dtype, "int8", isa)
        largest = np.nanmax(np.abs(held[:, :, :, 1]))
        np.testing.assert_allclose(out, want, rtol=0, atol=2.0**-7 * largest)
        results.append(out)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (jnp.float32, None),
        (jnp.float32, "int8"),
        (jnp.bfloat16, "bfloat16"),
        (jnp.bfloat16, "int8"),
    ],
)
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("name", ["smollm2", "gemma-2-9b"])
def test_no_number_in_a_query_stays_in_its_token(name, isa, dtype, kv_dtype, wrong):
    """There it makes the output none: a step's logits tell. But a soft cap makes a number of inf,
    and who computes it so may say so."""
    shape = BY_NAME[name]
    case = shapes.make_case(shape, BatchShape("rows", ((1, 9), (5, 20))), page_size=16, seed=8)
    clean = np.asarray(run(case, shape, dtype, kv_dtype, isa)[0])
    case.q_THE[3, 4, 7] = wrong
    out = np.array(run(case, shape, dtype, kv_dtype, isa)[0])
    with np.errstate(invalid="ignore"):
        want = oracle.attend(case, shape)[0]
    if np.isnan(want[3, 4]).all() or np.isnan(out[3, 4]).any():
        assert np.isnan(out[3, 4]).all()
    else:
        np.testing.assert_allclose(out[3, 4].astype(np.float64), want[3, 4], rtol=0, atol=0.02)
    out[3, 4] = clean[3, 4]
    np.testing.assert_array_equal(out, clean)


def test_layers_in_a_scan_update_the_cache_in_place():
    """A traced layer index touches its layer alone, and the compiled loop holds no second cache."""
    shape = BY_NAME["smollm2"]
    case = shapes.make_case(
        shape, BatchShape("rows", ((1, 33), (4, 50))), page_size=16, layers=3, layer=1
    )
    want, cache = oracle.attend(case, shape, layer=1)
    out, pages = run(case, shape, layer=jnp.int32(1))
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=5e-6)
    np.testing.assert_array_equal(np.asarray(plain(pages).data), cache.astype(np.float32))

    spec = api.KVSpec(4, shape.J, shape.E, 16, jnp.float32)
    q, k, v, _, batch, _ = shapes.place(case, "cpu", jnp.float32)

    @functools.partial(jax.jit, donate_argnums=(3,))
    def layers(q, k, v, pages, batch):
        def step(pages, layer):
            out, pages = cpu.ragged_paged_attention(
                q, k, v, pages, batch, layer=layer, scale=shape.scale
            )
            return pages, out

        return jax.lax.scan(step, pages, jnp.arange(4, dtype=jnp.int32))

    cache = kv.init_kv_pages(spec, 300, "cpu")
    analysis = layers.lower(q, k, v, cache, batch).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < cache.data.nbytes // 4
    assert analysis.alias_size_in_bytes >= cache.data.nbytes


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("page_table_SP", (0, 0), 99, "page id"),
        ("page_table_SP", (0, 0), -1, "page id"),
        ("kv_len_S", 0, 1000, "kv_len"),
        ("kv_len_S", 0, 0, "kv_len"),
        ("cu_q_len_S1", 1, 77, "cu_q_len"),
    ],
)
def test_a_wrong_batch_is_an_error(field, index, value, message):
    """What would write outside the cache is refused: the step fails, the process lives."""
    shape = BY_NAME["smollm2"]
    case = shapes.make_case(shape, BatchShape("rows", ((1, 20),)), page_size=16, seed=9)
    getattr(case, field)[index] = value
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(run(case, shape))
