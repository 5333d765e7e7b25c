"""rms_norm on the CPU in native code (cpu.cc), called through XLA's FFI.

XLA makes four kernels of it, on one core: of a step of 64 rows that was a tenth, of a chunk of 256
tokens a seventh.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .. import native


def rms_norm(x, weight, eps: float, *, layer=None, isa: str | None = None):
    """See api.rms_norm; x in float32 or bfloat16. isa: a name of native.ISAS, for tests."""
    assert native.available(), native.describe()
    call = jax.ffi.ffi_call("jaxserve_rms_norm", jax.ShapeDtypeStruct(x.shape, x.dtype))
    weight_LD = weight.reshape(-1, x.shape[-1])
    index = jnp.asarray(0 if layer is None else layer, jnp.int32)
    return call(x, weight_LD, index, eps=np.float32(eps), isa=np.int64(native.isa_code(isa)))
