"""rms_norm in plain jnp."""

import jax
import jax.numpy as jnp


def rms_norm(x, weight, eps: float, *, layer=None):
    """See api.rms_norm."""
    if layer is not None:
        weight = jax.lax.dynamic_index_in_dim(weight, layer, keepdims=False)
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = wide * jax.lax.rsqrt(mean_square + eps)
    return (normed * weight.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)
