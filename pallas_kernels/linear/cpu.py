"""linear on the CPU in native code (cpu_floats.cc, cpu_groups*.cc), called through XLA's FFI."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import native
from .weights import PackedWeight, QuantizedWeight


def available() -> bool:
    """Whether the native library is built and loads."""
    return native.available()


def linear(x_TD, weight: QuantizedWeight | PackedWeight, *, layer=None, isa: str | None = None):
    """y_TF in x's dtype for a weight in panels; see api.linear. isa: a name of native.ISAS, for
    tests; None takes the best."""
    assert native.available(), native.describe()
    x = x_TD.astype(jnp.float32)
    # The kernels always see a layer axis; without one it costs a reshape, which copies nothing.
    stacked = weight if weight.lead else jax.tree.map(lambda a: a[None], weight)
    layer = jnp.asarray(0 if layer is None else layer, jnp.int32)
    result = jax.ShapeDtypeStruct((x.shape[0], weight.out_features), jnp.float32)
    code = np.int64(native.isa_code(isa))
    if isinstance(weight, PackedWeight):
        call = jax.ffi.ffi_call("jaxserve_linear_floats", result)
        y = call(x, stacked.panels, layer, isa=code)
    else:
        offset = stacked.offset
        if offset is None:
            offset = jnp.zeros((0,), stacked.scale.dtype)
        call = jax.ffi.ffi_call("jaxserve_linear_groups", result)
        y = call(
            x,
            stacked.codes,
            stacked.scale,
            offset,
            layer,
            bits=np.int64(weight.bits),
            group=np.int64(weight.group),
            zero=np.int64(weight.zero),
            isa=code,
        )
    return y.astype(x_TD.dtype)
