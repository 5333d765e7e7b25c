"""linear in plain jnp. Read this first.

It serves where no native library is built, and on TPUs and GPUs. There weights and activations are
bfloat16, and so are the factors of the product: the matrix units' own form, in which a product is
exact in float32. A quantised weight is turned into floats at every call: right and small, not fast;
`prepare` chooses float32 for this backend unless told otherwise.
"""

import jax
import jax.numpy as jnp

from . import weights


def linear(x_TD, weight, *, layer=None):
    """y_TF = x_TD @ weight_FD^T, float32: products and sums are float32's, whatever the factors."""
    if layer is not None:
        pick = lambda a: jax.lax.dynamic_index_in_dim(a, layer, axis=0, keepdims=False)
        weight = jax.tree.map(pick, weight)
    narrow = isinstance(weight, jax.Array) and weight.dtype == x_TD.dtype == jnp.bfloat16
    if not narrow:
        x_TD, weight = x_TD.astype(jnp.float32), weights.to_floats(weight)
    return jax.lax.dot_general(
        x_TD,
        weight,
        (((1,), (1,)), ((), ())),
        precision=None if narrow else jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def activate(x, name: str):
    """A gated unit's activation: "silu", "gelu", "gelu_tanh" or "relu"."""
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")
