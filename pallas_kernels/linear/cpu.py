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
WITH_BFLOAT16 = ("avx512bf16", "amx")  # instruction sets that multiply it


def faster_with_int8_inputs() -> bool:
    """Whether products of bytes are the fastest here: AMX is as fast with bfloat16."""
    return native.isas()[-1] != "amx"


def linear(x_TD, weight, *, plus=None, dtype=None, layer=None, isa: str | None = None):
    """y_TF of a weight in panels; see api.linear. isa: a name of native.ISAS, for tests; None takes
    the best."""
    dtype = dtype or x_TD.dtype
    if isinstance(weight, QuantizedWeight):
        features = [weight.out_features]
        (y_TF,) = _groups(x_TD, (weight,), features, dtype, layer, isa, plus=plus)
        return y_TF
    y_TF = _floats(x_TD, weight, layer, isa).astype(dtype)
    return y_TF if plus is None else plus + y_TF


def linears(x_TD, weights, *, layer=None, isa: str | None = None) -> tuple:
    """`linear` of one x with several weights, together where they are quantised."""
    if all(isinstance(weight, QuantizedWeight) for weight in weights):
        features = [weight.out_features for weight in weights]
        return _groups(x_TD, weights, features, x_TD.dtype, layer, isa)
    return tuple(linear(x_TD, weight, layer=layer, isa=isa) for weight in weights)


def gated(x_TD, gate: QuantizedWeight, up: QuantizedWeight, activation: str, *, layer, isa=None):
    """activation(x gate^T) * (x up^T) in x's dtype, in one call that writes neither factor."""
    features = [gate.out_features]
    (y_TF,) = _groups(x_TD, (gate, up), features, x_TD.dtype, layer, isa, activation=activation)
    return y_TF


def _floats(x_TD, weight, layer, isa):
    assert native.available(), native.describe()
    result = jax.ShapeDtypeStruct((x_TD.shape[0], weight.out_features), jnp.float32)
    call = jax.ffi.ffi_call("jaxserve_linear_floats", result)
    panels = _with_layers(weight, layer).panels
    isa = np.int64(native.isa_code(isa))
    return call(x_TD.astype(jnp.float32), panels, _index(layer), isa=isa)


def _groups(x_TD, weights, features, dtype, layer, isa, *, activation=None, plus=None) -> tuple:
    assert native.available(), native.describe()
    best, half = isa or native.isas()[-1], x_TD.dtype == jnp.bfloat16
    int8 = all(weight.int8_inputs for weight in weights)
    as_it_is = half and (int8 or best in WITH_BFLOAT16)
    computed = dtype if as_it_is else jnp.float32
    operands, forms = [], []
    for weight in weights:
        stacked = _with_layers(weight, layer)
        offset = stacked.offset
        if offset is None:
            offset = jnp.zeros((0,), stacked.scale.dtype)
        operands += [stacked.codes, stacked.scale, offset]
        forms += [weight.bits, weight.group, weight.zero]
    shape = lambda count: jax.ShapeDtypeStruct((x_TD.shape[0], count), computed)
    call = jax.ffi.ffi_call("jaxserve_linear_groups", tuple(shape(n) for n in features))
    results = call(
        x_TD if as_it_is else x_TD.astype(jnp.float32),
        _index(layer),
        *operands,
        jnp.zeros((0,), computed) if plus is None else plus.astype(computed),
        forms=np.array(forms, np.int64),
        activation=np.int64(-1 if activation is None else ACTIVATIONS.index(activation)),
        bytes=np.int64(1 if int8 else 4),
        isa=np.int64(native.isa_code(isa)),
    )
    return tuple(y_TF.astype(dtype) for y_TF in results)


def _with_layers(weight, layer):
    """The kernels always see a layer axis; without one it costs a reshape, which copies nothing."""
    return weight if layer is not None else jax.tree.map(lambda a: a[None], weight)


def _index(layer):
    return jnp.asarray(0 if layer is None else layer, jnp.int32)
