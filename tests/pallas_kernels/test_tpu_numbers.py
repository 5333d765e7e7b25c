"""float32 as sums of bfloat16, and their products, apart from the kernel that multiplies them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.pallas_kernels.ragged_paged_attention import tpu_numbers


def test_a_float32_is_three_bfloat16():
    """Worked by hand: each part has eight bits of it, the sign included."""
    x = np.float32([1 + 2.0**-8 + 2.0**-16, -(3 + 2.0**-20), 0, 2.0**100])
    parts = jax.jit(tpu_numbers.split_float32)(x)
    for part in parts:
        np.testing.assert_array_equal(np.asarray(part.astype(jnp.bfloat16), np.float32), part)
    assert np.asarray(parts, np.float64).T.tolist() == [
        [1, 2.0**-8, 2.0**-16],
        [-3, -(2.0**-20), 0],
        [0, 0, 0],
        [2.0**100, 0, 0],
    ]


def test_parts_add_up_to_every_bit():
    x = np.random.default_rng(1).standard_normal(4096, np.float32) * np.float32(1e3)
    parts = jax.jit(tpu_numbers.split_float32)(x)
    np.testing.assert_array_equal(np.sum(np.asarray(parts, np.float64), axis=0), x)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("b_dtype", [jnp.float32, jnp.bfloat16])
def test_products_are_float32s(b_dtype, transposed):
    """What six products of parts leave out is 2**-24 of the factors; sums round as float32."""
    rng = np.random.default_rng(2)
    a = rng.standard_normal((9, 256), np.float32)
    b = jnp.asarray(rng.standard_normal((256, 128), np.float32)).astype(b_dtype)
    parts = tpu_numbers.split_float32(b) if b_dtype == jnp.float32 else [b]
    parts = [(part.T if transposed else part).astype(jnp.bfloat16) for part in parts]
    got = jax.jit(functools.partial(tpu_numbers.matmul, transposed=transposed))(a, parts)
    exact_b = np.asarray(b, np.float64)
    allowed = 2.0**-21 * (np.abs(a) @ np.abs(exact_b)).max()
    np.testing.assert_allclose(got, a.astype(np.float64) @ exact_b, rtol=0, atol=allowed)


def test_bfloat16_is_multiplied_as_it_is():
    a = jnp.asarray([[1.5, -2.0]], jnp.bfloat16)
    b = jnp.asarray([[2.0], [0.25]], jnp.bfloat16)
    product = tpu_numbers.matmul(a, [b], transposed=False)
    assert product.dtype == jnp.float32 and product.tolist() == [[2.5]]
