"""rotary in plain jnp, one of queries and keys at a time."""

import jax.numpy as jnp


def rotate(x_THE, cos_sin_TR):
    """The first 2 R elements of each head turned; see api."""
    cos, sin = (table[:, None, :] for table in cos_sin_TR)
    pairs = cos.shape[-1]
    x = x_THE.astype(jnp.float32)
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x_THE.dtype)
