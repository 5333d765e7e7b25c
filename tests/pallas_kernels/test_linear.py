"""linear: every form of weight against float64, and a row's independence from its mates."""

import ctypes
import functools
import shutil
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.linear import api, cpu, gguf_blocks, weights

GGUF_TYPES = tuple(gguf_blocks.BLOCK)
FORMS = ("float32", "bfloat16", "int8", "int4", *GGUF_TYPES)
needs_native = pytest.mark.skipif(not native.available(), reason=native.describe())


def gguf_rows(kind, features, depth, seed):
    """Random bytes of a GGUF type, with scales of ordinary size in their float16 places."""
    rng = np.random.default_rng(seed)
    elements, size = gguf_blocks.BLOCK[kind]
    blocks = rng.integers(0, 256, (features, depth // elements, size), dtype=np.uint8)
    scales = (rng.standard_normal((features, depth // elements, 2)) / 50).astype(np.float16)
    at, count = {"Q6_K": (208, 1), "Q4_0": (0, 1), "Q5_0": (0, 1), "Q8_0": (0, 1)}.get(kind, (0, 2))
    blocks[..., at : at + 2 * count] = scales.view(np.uint8)[..., : 2 * count]
    return blocks.reshape(features, -1)


def make_weight(form, features, depth, seed=0):
    """A weight as a loader hands it to `prepare`."""
    if form in GGUF_TYPES:
        return api.from_gguf_blocks(gguf_rows(form, features, depth, seed), form)
    array = np.random.default_rng(seed).standard_normal((features, depth)).astype(np.float32)
    if form in ("int8", "int4"):
        return api.quantize(array, form)
    return array.astype(jnp.bfloat16 if form == "bfloat16" else np.float32)


def make_offsets(features, depth, seed=0):
    """4-bit codes as of a real matrix: each group's zero lies among its codes."""
    weight = make_weight("int4", features, depth, seed)
    zeros = np.random.default_rng(seed).uniform(0, 15, weight.scale.shape)
    return weight.replace(zero=0, offset=np.float16(-zeros * weight.scale))


def make_rows(count, depth, seed=1):
    """Activations with the ill manners of real ones: a huge row, a zero row, outliers."""
    x = np.random.default_rng(seed).standard_normal((count, depth)).astype(np.float32)
    x[min(2, count - 1)] *= 1000
    x[min(4, count - 1)] = 0
    x[min(5, count - 1), 7] = 60
    x[min(6, count - 1), 9] = 3000
    return x


@functools.partial(jax.jit, static_argnames="isa")
def on_cpu(x_TD, weight, layer=None, *, isa=None):
    return cpu.linears(x_TD, (weight,), layer=layer, isa=isa)[0]


# ---- forms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_gguf_blocks_are_exact(kind):
    """Same numbers as the gguf package's own dequantisation, in both layouts and by row."""
    gguf = pytest.importorskip("gguf")
    data = gguf_rows(kind, 37, 512, seed=3)
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    weight = api.from_gguf_blocks(data, kind)
    assert weight.shape == (37, 512)
    np.testing.assert_array_equal(api.dequantize(weight), want)
    panels = weights.to_panels(weight)
    np.testing.assert_array_equal(api.dequantize(panels), want)
    ids = np.array([36, 0, 17], np.int32)
    for form in (weight, panels):
        on_device = jax.tree.map(jnp.asarray, form)
        np.testing.assert_array_equal(api.gather_rows(on_device, jnp.asarray(ids)), want[ids])


def test_gguf_refusals():
    with pytest.raises(ValueError, match="IQ2_XS is not supported"):
        api.from_gguf_blocks(np.zeros((2, 74), np.uint8), "IQ2_XS")
    with pytest.raises(ValueError, match="whole number"):
        api.from_gguf_blocks(np.zeros((2, 35), np.uint8), "Q8_0")


@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 127), ("int4", 1 / 7)])
def test_quantize_rounds_to_the_nearest_step(kind, step):
    """Error of at most half a step of the group's largest value; float16 scales add their own."""
    array = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    array[1, :32] = 0
    array[2] *= 1e-6
    array[3] *= 1e4
    back = api.dequantize(api.quantize(array, kind)).reshape(5, 3, 32)
    groups = array.reshape(5, 3, 32)
    bound = np.abs(groups).max(-1, keepdims=True) * step * 0.5 * 1.002 + 2e-7
    assert (np.abs(back - groups) <= bound).all()


def test_quantize_refusals():
    with pytest.raises(ValueError, match="groups of 32"):
        api.quantize(np.zeros((2, 33), np.float32), "int8")
    with pytest.raises(ValueError, match="NaN"):
        api.quantize(np.full((2, 32), np.nan, np.float32), "int8")
    with pytest.raises(ValueError, match="use int8 or int4"):
        api.quantize(np.zeros((2, 32), np.float32), "int3")


def test_prepare_names_what_it_takes():
    with pytest.raises(ValueError, match="use one of"):
        api.prepare(np.zeros((2, 32), np.float32), "float64", "reference")
    odd = api.prepare(np.ones((3, 33), np.float32), "int8", "reference")
    assert odd.dtype == np.float32  # groups of 32 do not fit 33 inputs


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q4_0", "Q4_1"), ("Q8_0", "Q4_K", "Q5_1")])
def test_stack_and_concatenate_keep_every_value(kinds):
    """Layers of different types (as in Q4_K_M files) meet in one form, exactly."""
    parts = [make_weight(kind, 32, 256, seed=i) for i, kind in enumerate(kinds)]
    floats = [api.dequantize(p) for p in parts]
    np.testing.assert_array_equal(api.dequantize(api.stack(parts)), np.stack(floats))
    joined = api.concatenate(parts)
    np.testing.assert_array_equal(api.dequantize(joined), np.concatenate(floats))
    mixed = api.stack([parts[0], floats[1]])
    np.testing.assert_array_equal(mixed, np.stack(floats[:2]))
    order = np.arange(32)[::-1]
    np.testing.assert_array_equal(api.dequantize(api.take_rows(parts[0], order)), floats[0][order])


def test_auto_weight_dtype():
    floats, half = np.zeros((2, 32), np.float32), np.zeros((2, 32), jnp.bfloat16)
    grouped = api.quantize(floats, "int8")
    assert [api.auto_weight_dtype("cpu", w) for w in (floats, half, grouped)] == [
        "float32",
        "stored",
        "stored",
    ]
    assert {api.auto_weight_dtype("reference", w) for w in (floats, half, grouped)} == {"float32"}


# ---- the reference -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_reference_equals_float64(form):
    weight = make_weight(form, 40, 256)
    x = make_rows(7, 256)
    want = x.astype(np.float64) @ np.float64(api.dequantize(weight)).T
    got = api.linear(jnp.asarray(x), jax.tree.map(jnp.asarray, weight), backend="reference")
    assert relative_error(got, want) < 2e-6


def test_reference_picks_the_layer():
    weight = api.stack([make_weight("Q4_1", 32, 64, seed=i) for i in range(3)])
    x = jnp.asarray(make_rows(7, 64))
    for layer in (0, 2, jnp.int32(1)):
        want = np.asarray(x, np.float64) @ np.float64(api.dequantize(weight))[int(layer)].T
        got = api.linear(x, weight, layer=layer, backend="reference")
        assert relative_error(got, want) < 2e-6


def test_bfloat16_factors_are_multiplied_as_they_are():
    """What the matrix units of TPUs and GPUs are for: no float32 factor, and a float32 sum."""
    weight = jnp.asarray(make_weight("bfloat16", 40, 256))
    x = jnp.asarray(make_rows(7, 256)).astype(jnp.bfloat16)
    wide = functools.partial(api.linear, backend="reference", dtype=jnp.float32)
    (dot,) = (op for op in jax.make_jaxpr(wide)(x, weight).eqns if "dot" in op.primitive.name)
    assert {factor.aval.dtype.name for factor in dot.invars} == {"bfloat16"}
    want = np.float64(x) @ np.float64(weight).T
    got = wide(x, weight)
    assert got.dtype == jnp.float32 and relative_error(got, want) < 2e-6
    assert api.linear(x, weight, backend="reference").dtype == jnp.bfloat16


def relative_error(got, want):
    """Largest error of a row against the row's largest element, worst row."""
    top = np.maximum(np.abs(want).max(axis=1, keepdims=True), 1e-20)
    return (np.abs(np.asarray(got, np.float64) - want) / top).max()


# ---- native code -------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", FORMS)
def test_native_equals_float64(form, isa):
    """float32 sums and integer ones of 24 bits: 2e-6. On tiles values are two bfloat16: the first
    is off by 2^-8 at most, the second by as much of that (by 2^-7 where it is cut), and the product
    of the two seconds is left out, so 2^-14 of a product at worst. The errors have any sign."""
    weight = make_weight(form, 52, 512)
    x = make_rows(21, 512)
    want = x.astype(np.float64) @ np.float64(api.dequantize(weight)).T
    got = on_cpu(x, api.prepare(weight, "stored", "cpu"), isa=isa)
    if isa == "amx" and form not in ("float32", "bfloat16"):
        error = np.asarray(got, np.float64) - want
        products = np.abs(np.float64(x)) @ np.abs(np.float64(api.dequantize(weight))).T
        assert (np.abs(error) <= 2.0**-14 * products).all()
        assert np.sqrt(np.mean(error**2)) < 2.0**-17 * np.sqrt(np.mean(products**2))
    else:
        assert relative_error(got, want) < 2e-6


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "Q4_1", "Q6_K"])
def test_a_row_is_its_own(form, isa):
    """Each row's bits are the same alone, in any company and at any place. On a machine with tiles
    quantised weights meet one or two rows without them, which gives other last bits."""
    weight = api.prepare(make_weight(form, 72, 768), "stored", "cpu")
    x = make_rows(300, 768)
    whole = np.asarray(on_cpu(x, weight, isa=isa))
    for begin, end in [(0, 1), (5, 6), (299, 300), (1, 3), (2, 9), (40, 53), (60, 124), (7, 264)]:
        part = np.asarray(on_cpu(x[begin:end], weight, isa=isa))
        if isa == "amx" and form in ("int8", "Q4_1", "Q6_K") and end - begin < 3:
            assert relative_error(part, whole[begin:end]) < 2.0**-14
        else:
            np.testing.assert_array_equal(part, whole[begin:end])
    order = np.random.default_rng(0).permutation(64)
    np.testing.assert_array_equal(np.asarray(on_cpu(x[order], weight, isa=isa)), whole[order])


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("forms", [("Q4_1", "Q4_1", "Q4_0"), ("Q8_0", "Q4_K", "Q6_K")])
@pytest.mark.parametrize("rows", [1, 21])
def test_several_at_once_are_each_alone(forms, rows, isa):
    """Weights of one form and of three, of sizes with and without an odd panel: the same bits."""
    made = [make_weight(form, 24 + 16 * i, 256, seed=i) for i, form in enumerate(forms)]
    weights = [api.prepare(weight, "stored", "cpu") for weight in made]
    x = make_rows(rows, 256)
    together = jax.jit(functools.partial(cpu.linears, isa=isa))(x, weights)
    for got, weight in zip(together, weights, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(on_cpu(x, weight, isa=isa)))


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", ["bfloat16", "int8", "Q4_1", "Q6_K"])
def test_bfloat16_rows(form, isa):
    """x is exact. Tiles round quantised weights to bfloat16, by 2^-9 at most, any sign; the result
    is rounded too unless float32 is asked for. A row's bits are its own, however few there are."""
    weight = make_weight(form, 72, 512)
    placed = api.prepare(weight, "stored", "cpu")
    x = jnp.asarray(make_rows(70, 512), jnp.bfloat16)
    wide, dense = np.float64(x), np.float64(api.dequantize(weight))
    want, products = wide @ dense.T, np.abs(wide) @ np.abs(dense).T
    run = jax.jit(functools.partial(cpu.linear, isa=isa), static_argnames="dtype")
    exact = run(x, placed, dtype=jnp.float32)
    assert exact.dtype == jnp.float32
    bound = 2.0**-9 if isa == "amx" and form != "bfloat16" else 2.0**-19
    assert (np.abs(exact - want) <= bound * products).all()
    whole = run(x, placed)
    assert whole.dtype == jnp.bfloat16
    rounded = np.asarray(exact).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(whole), rounded)
    for begin, end in [(0, 1), (69, 70), (1, 3), (2, 9), (20, 53)]:
        np.testing.assert_array_equal(np.asarray(run(x[begin:end], placed)), whole[begin:end])


def test_zero_points_in_place_of_offsets():
    """What is multiplied by int8 inputs has no offsets, and is off by half an eighth of a code."""
    weight = make_offsets(40, 128)
    made = weights.for_int8_inputs(weight)
    assert made.offset.dtype == np.uint8 and made.nbytes < weight.nbytes
    change = np.abs(api.dequantize(made) - api.dequantize(weight)).reshape(40, 4, 32)
    half = np.float32(weight.scale)[..., None] / 16
    assert (change <= 1.001 * half).all() and change.max() > 0.9 * half.min()
    panels = weights.to_panels(made)
    np.testing.assert_array_equal(api.dequantize(panels), api.dequantize(made))
    ids = np.array([3, 0, 39, 3], np.int32)
    picked = api.gather_rows(jax.device_put(panels), jnp.asarray(ids))
    np.testing.assert_array_equal(picked, api.dequantize(made)[ids])


@pytest.mark.parametrize("zero", [-1.0, 16.5, np.inf])
def test_a_zero_far_from_its_codes(zero):
    """One group all above zero, all below, or constant: the matrix gets 8 bits, half a step off."""
    weight = make_offsets(40, 128)
    offset, scale = weight.offset.copy(), weight.scale.copy()
    scale[7, 2] = 0 if np.isinf(zero) else 0.5
    offset[7, 2] = 1.25 if np.isinf(zero) else -zero * 0.5
    weight = weight.replace(offset=offset, scale=scale)
    made = weights.for_int8_inputs(weight)
    assert made.bits == 8 and made.offset is None
    want = api.dequantize(weight).reshape(40, 4, 32)
    change = np.abs(api.dequantize(made).reshape(40, 4, 32) - want)
    assert (change <= 1.002 * np.abs(want).max(-1, keepdims=True) / 254).all()


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", ["offsets", "int8"])
def test_rows_out_of_bounds_with_int8_inputs(form, isa):
    """NaN, infinity and what is beyond 2^110 make their row NaN, what is below 2^-80 is zero, and
    nobody else is touched."""
    weight = make_offsets(48, 64) if form == "offsets" else make_weight(form, 48, 64)
    placed = weights.to_panels(weights.for_int8_inputs(weight))
    x = make_rows(20, 64)
    clean = np.asarray(on_cpu(x, placed, isa=isa))
    x[3, 5], x[11, 63], x[12, 0], x[13, 40] = np.nan, np.inf, -np.nan, -(2.0**111)
    x[14] = 2.0**-90
    got = np.asarray(on_cpu(x, placed, isa=isa))
    bad = [3, 11, 12, 13]
    assert np.isnan(got[bad]).all() and not got[14].any()
    touched = [*bad, 14]
    np.testing.assert_array_equal(np.delete(got, touched, 0), np.delete(clean, touched, 0))


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", ["int8", "Q4_0", "offsets", "Q6_K"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_inputs(dtype, form, isa):
    """As with x rounded to steps of the least power of two by which its block needs no more than
    127, and with the weight that weights.for_int8_inputs makes. A row's bits are its own, and the
    same in every instruction set."""
    weight = make_offsets(72, 512) if form == "offsets" else make_weight(form, 72, 512)
    weight = weights.for_int8_inputs(weight)
    assert weight.bits == (8 if form in ("int8", "Q6_K") else 4)
    placed = weights.to_panels(weight)
    x = make_rows(70, 512)
    x[3, 32:64] = np.linspace(-127, 127, 32)  # exactly 127 steps
    x = jnp.asarray(x, dtype)
    groups = np.asarray(x, np.float64).reshape(70, 16, 32)
    mantissa, exponent = np.frexp(np.abs(groups).max(-1, keepdims=True) / 127)
    step = np.ldexp(1.0, exponent - (mantissa == 0.5))
    rounded = (np.rint(groups / step) * step).reshape(70, 512)
    dense = np.float64(api.dequantize(weight))
    want, products = rounded @ dense.T, np.abs(rounded) @ np.abs(dense).T
    run = jax.jit(functools.partial(cpu.linear, isa=isa), static_argnames="dtype")
    exact = np.asarray(run(x, placed, dtype=jnp.float32))
    assert (np.abs(exact - want) <= 2.0**-21 * products).all()
    whole = np.asarray(run(x, placed))
    np.testing.assert_array_equal(whole, exact.astype(dtype))
    for begin, end in [(0, 1), (69, 70), (1, 3), (2, 9), (20, 53)]:
        np.testing.assert_array_equal(np.asarray(run(x[begin:end], placed)), whole[begin:end])
    if isa != "plain":
        best = np.asarray(cpu.linear(x, placed, dtype=jnp.float32, isa="avx2"))
        np.testing.assert_array_equal(exact, best)


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", ["float32", "int8", "Q4_1"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 21, 70])
def test_what_is_added(rows, dtype, form, isa):
    """With `plus` the result is the sum, off by the rounding of one addition more at most. 72
    features end in the middle of a panel."""
    placed = api.prepare(make_weight(form, 72, 256), "stored", "cpu")
    x = jnp.asarray(make_rows(rows, 256), dtype)
    plus = jnp.asarray(np.random.default_rng(3).standard_normal((rows, 72)) * 30, dtype)
    run = jax.jit(functools.partial(cpu.linear, isa=isa))
    alone, got = np.float64(run(x, placed)), np.float64(run(x, placed, plus=plus))
    want = alone + np.float64(plus)
    products = np.abs(np.float64(x)) @ np.abs(np.float64(api.dequantize(placed))).T
    unit = 2.0**-24 if dtype == jnp.float32 else 2.0**-8
    # Sums that start elsewhere round otherwise at each of 8 blocks.
    bound = unit * (2 * np.abs(want) + np.abs(alone)) + 2.0**-20 * products
    assert (np.abs(got - want) <= bound).all()


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "Q4_1"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_zeros_at_the_end(dtype, form, isa):
    """What steps are padded with: the other rows' bits are as with anything else there, and theirs
    is what is added, or zero. A zero may have a sign; all rows may be such."""
    weight = api.prepare(make_weight(form, 72, 256), "stored", "cpu")
    x = np.concatenate([make_rows(40, 256), np.zeros((24, 256), np.float32)])
    x[45, 3] = -0.0
    x, full = jnp.asarray(x, dtype), jnp.asarray(np.where(x == 0, 1, x), dtype)
    plus = jnp.asarray(make_rows(64, 72, seed=3), dtype)
    run = jax.jit(functools.partial(cpu.linear, isa=isa))
    kept = np.flatnonzero(np.any(x[:40] != 0, axis=1))
    for options in ({}, {"plus": plus}):
        got, want = np.array(run(x, weight, **options)), np.array(run(full, weight, **options))
        np.testing.assert_array_equal(got[kept], want[kept])
        np.testing.assert_array_equal(got[40:], np.asarray(options.get("plus", plus * 0))[40:])
    assert not np.asarray(run(x[40:], weight)).any()


@needs_native
@pytest.mark.parametrize("rows", [390, 801])
@pytest.mark.parametrize("depth", [96, 1216])
@pytest.mark.parametrize("forms", [("Q4_1", "Q4_1", "Q4_1"), ("int8", "Q4_K", "Q6_K")])
def test_many_bfloat16_rows_are_as_few(forms, depth, rows):
    """A long prompt's rows get the bits that they have in parts of 64, whatever joins the product:
    several weights, what is added, a gate, float32 out. 72 and 40 features end within a panel."""
    depth = -(-depth // 256) * 256 if "Q4_K" in forms else depth
    widths = (72, 96, 40)
    made = [make_weight(form, width, depth, seed=width) for form, width in zip(forms, widths)]
    weights = [api.prepare(weight, "stored", "cpu") for weight in made]
    up = api.prepare(make_weight(forms[0], widths[0], depth, seed=9), "stored", "cpu")
    x = jnp.asarray(make_rows(rows, depth), jnp.bfloat16)
    plus = jnp.asarray(make_rows(rows, widths[0], seed=3), jnp.bfloat16)

    @jax.jit
    def everything(x, plus):
        gated = functools.partial(cpu.gated, activation="silu", layer=None)
        return (
            *cpu.linears(x, weights),
            cpu.linear(x, weights[0], plus=plus),
            cpu.linear(x, weights[0], dtype=jnp.float32),
            gated(x, weights[0], up),
        )

    whole = everything(x, plus)
    parts = [everything(x[i : i + 64], plus[i : i + 64]) for i in range(0, rows, 64)]
    for got, *want in zip(whole, *parts, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.concatenate(want))


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("forms", [("Q4_1", "Q4_1"), ("Q8_0", "Q6_K")])
@pytest.mark.parametrize("activation", cpu.ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 2, 21])
def test_gated_equals_float64(activation, forms, rows, isa):
    gate, up = (make_weight(form, 56, 256, seed=i) for i, form in enumerate(forms))
    x = make_rows(rows, 256) / 16
    wide = x.astype(np.float64)
    g, u = (wide @ np.float64(api.dequantize(w)).T for w in (gate, up))
    z = g if activation == "silu" else 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    want = g / (1 + np.exp(-np.clip(z, -80, 80))) * u
    placed = [api.prepare(w, "stored", "cpu") for w in (gate, up)]
    run = functools.partial(cpu.gated, activation=activation, layer=None, isa=isa)
    got = np.asarray(jax.jit(run)(x, *placed))
    products = np.abs(wide) @ np.abs(np.float64(api.dequantize(up))).T
    # What a factor is off by (2^-14 of its products), times the other; the slope is below 1.2.
    of_gate = np.abs(wide) @ np.abs(np.float64(api.dequantize(gate))).T
    bound = 2.0**-14 * (np.abs(g) * products + 1.2 * np.abs(u) * of_gate) + 1e-6
    assert (np.abs(got - want) <= bound).all()
    alone = functools.partial(api.gated, activation=activation, backend="reference")
    reference = np.asarray(
        alone(jnp.asarray(x), *[jax.tree.map(jnp.asarray, w) for w in (gate, up)])
    )
    assert (np.abs(reference - want) <= bound).all()


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_int8_inputs_gated_added_and_together(dtype, rows, isa):
    """Of inputs that 8 bits hold exactly, with weights of different zero points and groups."""
    x = np.random.default_rng(1).integers(-100, 101, (rows, 256)).astype(np.float32)
    x[:, ::32] = 100  # so a step is one, of the whole 2^-11
    x = jnp.asarray(x / 2048, dtype)
    wide = np.float64(x)
    made = [
        weights.for_int8_inputs(w) for w in (make_offsets(56, 256), make_weight("Q6_K", 56, 256))
    ]
    placed = [weights.to_panels(w) for w in made]
    g, u = (wide @ np.float64(api.dequantize(w)).T for w in made)
    of_g, of_u = (np.abs(wide) @ np.abs(np.float64(api.dequantize(w))).T for w in made)
    plus = jnp.asarray(make_rows(rows, 56, seed=3), dtype)
    last_bits = 2.0**-7 if dtype == jnp.bfloat16 else 0.0

    def check(got, want, bound):
        assert (np.abs(np.float64(got) - want) <= bound + last_bits * np.abs(want) + 1e-6).all()

    for got, want, products in zip(cpu.linears(x, placed, isa=isa), (g, u), (of_g, of_u)):
        check(got, want, 2.0**-20 * products)
    added = cpu.linear(x, placed[0], plus=plus, isa=isa)
    check(added, np.float64(plus) + g, 2.0**-20 * (of_g + np.abs(np.float64(plus))))
    got = cpu.gated(x, *placed, "silu", layer=None, isa=isa)
    bound = 2.0**-14 * (np.abs(g) * of_u + 1.2 * np.abs(u) * of_g)
    check(got, g / (1 + np.exp(-g)) * u, bound)


@needs_native
def test_offsets_are_not_for_int8_inputs():
    weight = weights.to_panels(make_offsets(32, 64)).replace(int8_inputs=True)
    with pytest.raises(Exception, match="int8 inputs ask for zero points"):
        jax.block_until_ready(on_cpu(make_rows(6, 64), weight))


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_one_huge_input_does_not_drown_the_rest(kind, isa):
    """Models put thousands into one channel of a first token. With a zero weight on that channel
    the others alone make the result, and must come through as in any row."""
    array = np.random.default_rng(0).standard_normal((48, 256)).astype(np.float32)
    array[:, 7] = 0
    weight = api.quantize(array, kind)
    x = np.random.default_rng(1).standard_normal((6, 256)).astype(np.float32)
    x[1::2, 7] = 30000
    want = x.astype(np.float64) @ np.float64(api.dequantize(weight)).T
    got = on_cpu(x, api.prepare(weight, "stored", "cpu"), isa=isa)
    assert relative_error(got, want) < 2e-5


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("peak", [1.0, 127 / 64, 1.99, 3e4, 1e-20])
def test_how_finely_float32_is_rounded(peak, isa):
    """A block of 32 has up to 127 * 2^16 steps of a power of two; where fewer than 8 of its inputs
    are above a 64th of the largest, 256 times as many. A unit matrix shows it: what is sent comes
    back rounded, exactly where float32 holds that."""
    units = api.quantize(np.float32(127 * np.eye(32)), "int8")  # scales 1
    weight = weights.to_panels(units.replace(codes=np.eye(32, dtype=np.int8)))
    x = np.random.default_rng(0).uniform(-1, 1, (6, 32)) / 70
    x[:3, :7], x[3:, :6] = 0.02, 0.02  # beside the largest: 8, and 7
    x[:, 31] = 1
    x = np.float32(x * peak)
    mantissa, exponent = np.frexp(np.float32(peak) / np.float32(127))
    step = np.ldexp(np.float64(2.0**-16), exponent - (mantissa == 0.5))
    got = np.float64(on_cpu(x, weight, isa="avx512" if isa == "amx" else isa))
    few = np.arange(6)[:, None] >= 3
    steps = np.where(few, step / 256, step)
    want = np.rint(np.float64(x) / steps) * steps
    np.testing.assert_array_equal(got[:, :31], np.float32(want[:, :31]))
    assert (want[:3, :31] != x[:3, :31]).mean() > 0.5


@needs_native
@pytest.mark.parametrize("form", ["int8", "Q4_0", "Q5_K", "Q6_K"])
def test_instruction_sets_agree_to_the_bit(form):
    """Integer sums are exact and the float additions are the same, with fused multiply-add."""
    weight = api.prepare(make_weight(form, 48, 512), "stored", "cpu")
    x = make_rows(19, 512)
    with_fma = [isa for isa in native.isas() if isa in ("avx2", "avx512")]
    results = [np.asarray(on_cpu(x, weight, isa=isa)) for isa in with_fma]
    if "amx" in native.isas():  # two rows go the same way there
        np.testing.assert_array_equal(np.asarray(on_cpu(x[:2], weight)), results[0][:2])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


@needs_native
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "Q4_1"])
@pytest.mark.parametrize(("features", "depth"), [(1, 32), (15, 64), (17, 96), (33, 544)])
def test_odd_sizes(form, features, depth):
    weight = make_weight(form, features, depth)
    x = make_rows(6, depth)
    want = x.astype(np.float64) @ np.float64(api.dequantize(weight)).T
    got = on_cpu(x, api.prepare(weight, "stored", "cpu"))
    assert got.shape == (6, features)
    assert np.abs(np.asarray(got) - want).max() < 2e-5 * np.abs(want).max()


@needs_native
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("depth", [1, 31, 50, 257])
def test_floats_take_any_depth(dtype, depth):
    weight = np.random.default_rng(0).standard_normal((20, depth)).astype(dtype)
    x = np.random.default_rng(1).standard_normal((5, depth)).astype(np.float32)
    x64, w64 = x.astype(np.float64), weight.astype(np.float64)
    bound = (depth + 1) * 2.0**-24 * (np.abs(x64) @ np.abs(w64).T)  # of any order of a float32 sum
    for isa in native.isas():
        got = on_cpu(x, api.prepare(weight, "stored", "cpu"), isa=isa)
        assert (np.abs(np.asarray(got) - x64 @ w64.T) <= bound).all()


@needs_native
@pytest.mark.parametrize("form", ["float32", "bfloat16", "Q8_0", "Q4_1"])
def test_stacked_layers_in_a_scan(form):
    """The whole stack and a traced index give what each layer gives alone, to the bit."""
    layers = [make_weight(form, 64, 64, seed=i) for i in range(5)]
    stacked = jax.tree.map(jnp.asarray, api.prepare(api.stack(layers), "stored", "cpu"))
    x = jnp.asarray(make_rows(3, 64))

    @jax.jit
    def run(x, stacked):
        step = lambda x, layer: (x, cpu.linears(x, (stacked,), layer=layer)[0])
        return jax.lax.scan(step, x, jnp.arange(5, dtype=jnp.int32))[1]

    got = np.asarray(run(x, stacked))
    for layer, weight in enumerate(layers):
        alone = on_cpu(x, api.prepare(weight, "stored", "cpu"))
        np.testing.assert_array_equal(got[layer], np.asarray(alone))


@needs_native
def test_a_scan_copies_no_weights():
    """Temporary memory stays below one layer's weight."""
    stacked = api.prepare(np.zeros((8, 256, 256), np.float32), "float32", "cpu")

    def run(x, stacked):
        step = lambda x, layer: (cpu.linears(x, (stacked,), layer=layer)[0], None)
        return jax.lax.scan(step, x, jnp.arange(8, dtype=jnp.int32))[0]

    x = jnp.zeros((2, 256))
    analysis = jax.jit(run).lower(x, stacked).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 256 * 256 * 4


@needs_native
@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "Q4_1"])
def test_nan_stays_in_its_row(form, isa):
    weight = api.prepare(make_weight(form, 32, 64), "stored", "cpu")
    x = make_rows(20, 64)
    clean = np.asarray(on_cpu(x, weight, isa=isa))
    x[3, 5], x[11, 63], x[12, 0] = np.nan, np.inf, -np.nan
    got = np.asarray(on_cpu(x, weight, isa=isa))
    bad = [3, 11, 12]
    assert not np.isfinite(got[bad]).any(axis=1).all()
    assert np.isnan(got[[3, 12]]).all()
    np.testing.assert_array_equal(np.delete(got, bad, 0), np.delete(clean, bad, 0))


@needs_native
def test_a_wrong_layer_is_an_error():
    weight = api.prepare(np.zeros((2, 32, 32), np.float32), "float32", "cpu")
    with pytest.raises(Exception, match="no such layer"):
        jax.block_until_ready(on_cpu(make_rows(6, 32), weight, jnp.int32(2)))


@needs_native
def test_every_task_runs_once():
    """Jobs of changing size back to back: a late worker must not take from the wrong one."""
    library, _ = native.load()
    library.jaxserve_check_threads.argtypes = [ctypes.c_int64]
    library.jaxserve_check_threads.restype = ctypes.c_int64
    assert library.jaxserve_check_threads(300_000) == 0


@needs_native
def test_x_keeps_its_dtype():
    weight = api.prepare(make_weight("Q8_0", 32, 64), "stored", "cpu")
    x = jnp.ones((2, 64), jnp.bfloat16)
    assert on_cpu(x, weight).dtype == jnp.bfloat16
    assert api.linear(x, weight, backend="cpu", dtype=jnp.float32).dtype == jnp.float32


def test_without_the_library(tmp_path, monkeypatch):
    """No file, or one that is no library: a reason is given and the reference serves."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native.load.cache_clear()
    try:
        assert not native.available() and native.isas() == ()
        assert "without a C++ compiler" in native.describe()
        assert api.choose_backend("cpu") == "reference"
        (tmp_path / ("_native" + sysconfig.get_config_var("EXT_SUFFIX"))).write_bytes(b"junk")
        native.load.cache_clear()
        assert not native.available()
        assert "reinstall" in native.describe()
    finally:
        monkeypatch.undo()
        native.load.cache_clear()


def test_another_ffi_version_is_not_registered():
    """A handler that XLA refuses would take jax's whole CPU backend with it."""
    native._check_version(0, 1)
    with pytest.raises(ImportError, match=r"built for FFI 0\.99"):
        native._check_version(0, 99)
    with pytest.raises(ImportError, match=r"built for FFI 1\.0"):
        native._check_version(1, 0)


def test_the_library_is_built_where_it_can_be():
    """A compiler and no library means that the build broke."""
    if shutil.which("g++") is None and shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    assert native.available(), native.describe()
