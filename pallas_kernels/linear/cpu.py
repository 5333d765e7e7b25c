"""linear on the CPU in native code (cpu_floats.cc, cpu_groups*.cc), called through XLA's FFI."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import native
from .weights import QuantizedWeight


def available() -> bool:
    """Whether the native library is built and loads."""
    return native.available()


ACTIVATIONS = ("silu", "gelu_tanh")  # that `gated` computes


def linears(x_TD, weights, *, layer=None, isa: str | None = None) -> tuple:
    """y_TF in x's dtype for each of the weights in panels; see api.linears. isa: a name of
    native.ISAS, for tests; None takes the best."""
    if all(isinstance(weight, QuantizedWeight) for weight in weights):
        return _groups(x_TD, weights, layer, [w.out_features for w in weights], None, isa)
    return tuple(_one(x_TD, weight, layer, isa) for weight in weights)


def gated(x_TD, gate: QuantizedWeight, up: QuantizedWeight, activation: str, *, layer, isa=None):
    """activation(x gate^T) * (x up^T) in x's dtype, in one call that writes neither factor."""
    (y_TF,) = _groups(x_TD, (gate, up), layer, [gate.out_features], activation, isa)
    return y_TF


def _one(x_TD, weight, layer, isa):
    if isinstance(weight, QuantizedWeight):
        (y_TF,) = _groups(x_TD, (weight,), layer, [weight.out_features], None, isa)
        return y_TF
    assert native.available(), native.describe()
    result = jax.ShapeDtypeStruct((x_TD.shape[0], weight.out_features), jnp.float32)
    call = jax.ffi.ffi_call("jaxserve_linear_floats", result)
    isa = np.int64(native.isa_code(isa))
    panels = _with_layers(weight, layer).panels
    return call(x_TD.astype(jnp.float32), panels, _index(layer), isa=isa).astype(x_TD.dtype)


def _groups(x_TD, weights, layer, features, activation, isa) -> tuple:
    assert native.available(), native.describe()
    operands, forms = [], []
    for weight in weights:
        stacked = _with_layers(weight, layer)
        offset = stacked.offset
        if offset is None:
            offset = jnp.zeros((0,), stacked.scale.dtype)
        operands += [stacked.codes, stacked.scale, offset]
        forms += [weight.bits, weight.group, weight.zero]
    shape = lambda count: jax.ShapeDtypeStruct((x_TD.shape[0], count), jnp.float32)
    call = jax.ffi.ffi_call("jaxserve_linear_groups", tuple(shape(n) for n in features))
    results = call(
        x_TD.astype(jnp.float32),
        _index(layer),
        *operands,
        forms=np.array(forms, np.int64),
        activation=np.int64(-1 if activation is None else ACTIVATIONS.index(activation)),
        isa=np.int64(native.isa_code(isa)),
    )
    return tuple(y_TF.astype(x_TD.dtype) for y_TF in results)


def _with_layers(weight, layer):
    """The kernels always see a layer axis; without one it costs a reshape, which copies nothing."""
    return weight if layer is not None else jax.tree.map(lambda a: a[None], weight)


def _index(layer):
    return jnp.asarray(0 if layer is None else layer, jnp.int32)
