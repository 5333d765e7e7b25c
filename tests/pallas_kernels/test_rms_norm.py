"""Normalising rows: every backend against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels import native
from jaxserve.pallas_kernels.rms_norm import cpu, reference

ISAS = native.isas()[:3]  # no code for those above avx512


def run(isa, x, weight, eps, layer=None):
    if isa == "reference":
        return jax.jit(reference.rms_norm, static_argnames="eps")(x, weight, eps=eps, layer=layer)
    program = jax.jit(cpu.rms_norm, static_argnames=("eps", "isa"))
    return program(x, weight, eps=eps, layer=layer, isa=isa)


@pytest.mark.parametrize("isa", ("reference", *ISAS))
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("shape", [(1, 64), (70, 576), (5, 9, 80), (200, 4096), (3, 7)])
def test_equals_float64(isa, dtype, shape):
    random = np.random.default_rng(shape[-1])
    x = jnp.asarray(random.standard_normal(shape) * 30, dtype)
    weight_LD = jnp.asarray(random.standard_normal((3, shape[-1])), jnp.float32)
    eps = 1e-5
    wide = np.float64(x)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * np.float64(weight_LD[2])
    stacked = run(isa, x, weight_LD, eps, layer=jnp.int32(2))
    assert stacked.dtype == dtype
    bound = 2e-6 if dtype == jnp.float32 else 2.0**-8
    np.testing.assert_allclose(np.float64(stacked), want, rtol=bound)
    np.testing.assert_array_equal(np.asarray(run(isa, x, weight_LD[2], eps)), np.asarray(stacked))


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_its_own(isa):
    """Alone or among others, that may hold no numbers: the same bits. Zeros stay zeros."""
    x = np.random.default_rng(0).standard_normal((130, 96)).astype(np.float32)
    x[7], x[8] = np.nan, 0
    weight = jnp.ones(96, jnp.float32)
    together = np.asarray(run(isa, jnp.asarray(x), weight, 1e-6))
    assert (together[8] == 0).all()
    for row in (0, 6, 9, 129):
        alone = np.asarray(run(isa, jnp.asarray(x[row : row + 1]), weight, 1e-6))
        np.testing.assert_array_equal(alone[0], together[row])
