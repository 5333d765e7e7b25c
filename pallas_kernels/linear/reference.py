"""linear in plain jnp: the weight as floats, then a dot in float32. Read this first.

It serves where no native library is built. A quantised weight is turned into floats at every call:
right and small, not fast; `prepare` chooses float32 for this backend unless told otherwise.
"""

import jax
import jax.numpy as jnp

from . import weights


def linear(x_TD, weight, *, layer=None):
    """y_TF = x_TD @ weight_FD^T, products and sums in float32."""
    if layer is not None:
        pick = lambda a: jax.lax.dynamic_index_in_dim(a, layer, axis=0, keepdims=False)
        weight = jax.tree.map(pick, weight)
    w_FD = weights.to_floats(weight)
    contract_last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x_TD.astype(jnp.float32),
        w_FD,
        contract_last,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def activate(x, name: str):
    """A gated unit's activation: "silu", "gelu", "gelu_tanh" or "relu"."""
    if name == "silu":
        return jax.nn.silu(x)
    if name == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=name == "gelu_tanh")
