"""rotary on the CPU in native code (cpu.cc), called through XLA's FFI.

XLA joins the halves of a head an element at a time on one core: of a step of 256 tokens that was
seven milliseconds in a hundred.
"""

import jax
import numpy as np

from .. import native


def rotate(q_THE, k_TJE, cos_sin_TR, *, isa: str | None = None):
    """See api.rotate; q and k in float32 or bfloat16. isa: a name of native.ISAS, for tests."""
    assert native.available(), native.describe()
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("jaxserve_rotate", (like(q_THE), like(k_TJE)))
    return tuple(call(q_THE, k_TJE, *cos_sin_TR, isa=np.int64(native.isa_code(isa))))
