"""Turning heads: every backend against the closed form in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.rotary import cpu, reference

ISAS = native.isas()[:3]  # no code for those above avx512


def closed_form(x, phase):
    pairs = phase.shape[1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = np.cos(phase)[:, None], np.sin(phase)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize(
    ("T", "E", "pairs"), [(1, 64, 32), (70, 80, 40), (37, 96, 20), (600, 6, 3)]
)
def test_equals_the_closed_form(isa, dtype, T, E, pairs):
    random = np.random.default_rng(T)
    phase = random.uniform(-4e4, 4e4, (T, pairs))
    q, k = (jnp.asarray(random.standard_normal((T, heads, E)), dtype) for heads in (9, 3))
    wants = [closed_form(np.float64(x), phase) for x in (q, k)]
    tables = tuple(jnp.asarray(f(phase), jnp.float32) for f in (np.cos, np.sin))
    if isa == "reference":
        got = [jax.jit(reference.rotate)(x, tables) for x in (q, k)]
    else:
        got = jax.jit(cpu.rotate, static_argnames="isa")(q, k, tables, isa=isa)
    for turned, want in zip(got, wants):
        assert turned.dtype == dtype
        # Two products of at most 5 and their sum in float32; then half a unit of bfloat16.
        bound = 1e-6 if dtype == jnp.float32 else 2.0**-8
        np.testing.assert_allclose(np.float64(turned), want, rtol=bound, atol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_rounds_as_numpy_does_and_keeps_nan(isa):
    """Turned by nothing, after a factor that leaves ties, halves of units and no numbers at all."""
    values = np.array([1.0, 1.00390625, 1.01171875, -3.3e38, 1e-40, np.inf, -np.inf, np.nan] * 8)
    q = jnp.asarray(values.reshape(1, 1, 64), jnp.bfloat16)
    scale = np.float32(1.001953125)
    tables = jnp.full((1, 32), scale), jnp.zeros((1, 32), jnp.float32)
    got, _ = jax.jit(cpu.rotate, static_argnames="isa")(q, q, tables, isa=isa)
    finite = np.abs(values) < np.inf
    want = (np.float32(q).reshape(64) * scale).astype(jnp.bfloat16)
    got = np.float32(got).reshape(64)
    normal = finite & (np.abs(values) > 1e-30)
    np.testing.assert_array_equal(got[normal], np.float32(want)[normal])
    assert np.isnan(got[~finite]).all()  # infinity times the sine 0 is no number
