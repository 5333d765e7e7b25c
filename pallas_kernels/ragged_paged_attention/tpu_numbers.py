"""Numbers of the pages as what the TPU's matrix unit multiplies: bfloat16, results in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from .kv import LANES

SUBLANES = 8  # of a register, of LANES each
E4M3_STEP = 2.0**60  # twice this is by how much unpacked fp8 numbers are too small, see unpack_e4m3
PARTS = 3  # bfloat16 numbers that a float32 one is the sum of


def matmul(a, b_parts, *, transposed):
    """a @ b, or a @ b.T, with float32 results; b is the sum of its bfloat16 parts, largest first.

    A float32 `a` is split too. Of the products of parts, those that a float32 result has no bits
    for are left out. Each part of b is loaded into the unit once: the parts of `a` that it meets
    are its rows.
    """
    dot = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1 if transposed else 0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    if a.dtype != jnp.float32:
        (b,) = b_parts
        return dot(a, b)
    rows = a.shape[0]
    spare = -rows % SUBLANES
    if spare:
        a = jnp.concatenate([a, jnp.zeros((spare, a.shape[1]), a.dtype)])
    a_parts, total = split_float32(a), 0
    for n, part in reversed(list(enumerate(b_parts))):
        meets = jnp.concatenate(a_parts[: PARTS - n]).astype(jnp.bfloat16)
        products = dot(meets, part)
        for m in reversed(range(PARTS - n)):
            first = m * (rows + spare)
            total = total + products[first : first + rows]
    return total


def split_float32(x):
    """-> PARTS float32 arrays that are exact in bfloat16 and add up to x: its bits, by eights."""
    parts = []
    for _ in range(PARTS - 1):
        high = jax.lax.bitcast_convert_type(x, jnp.int32) & -0x10000
        parts.append(jax.lax.bitcast_convert_type(high, jnp.float32))
        x = x - parts[-1]
    return [*parts, x]


def unpack_e4m3(codes):
    """float8_e4m3fn [128, w] -> bfloat16 [64, w] of the even rows and of the odd, times 2**-120.

    Sign, 4 bits of exponent and 3 of fraction are moved to their places in a bfloat16, whose
    exponent has another bias: 127, not 7. For a word of four rows that takes nine operations; TPUs
    before 7x have no conversion of their own. Right for normal numbers and zero, and there are no
    others in the pages.
    """
    word = pltpu.bitcast(codes, jnp.int32)
    even = ((word & 0x00800080) << 8) | ((word & 0x007F007F) << 4)
    odd = (word & (0x80008000 - 2**32)) | ((word & 0x7F007F00) >> 4)
    return pltpu.bitcast(even, jnp.bfloat16), pltpu.bitcast(odd, jnp.bfloat16)


def unpacked_order(column):
    """Of each 128 tokens, unpack_e4m3 leaves those at even places, then those at odd places."""
    lane = column & (LANES - 1)
    return column - lane + jnp.where(lane < LANES // 2, 2 * lane, 2 * lane - (LANES - 1))
