"""best_token on the CPU in native code (cpu.cc), called through XLA's FFI.

XLA unpacks the bits into a second array of logits before it looks for the best of them: of a step
of 16 rows with grammars that was a millisecond in eighteen.
"""

import jax
import jax.numpy as jnp
import numpy as np

from .. import native


def best_token(logits_SV, allowed_SW=None, *, isa: str | None = None):
    """See api.best_token. isa: a name of native.ISAS, for tests."""
    assert native.available(), native.describe()
    if allowed_SW is None:
        allowed_SW = jnp.zeros((logits_SV.shape[0], 0), jnp.int32)
    token_S = jax.ShapeDtypeStruct(logits_SV.shape[:1], jnp.int32)
    call = jax.ffi.ffi_call("jaxserve_best_token", token_S)
    return call(logits_SV, allowed_SW, isa=np.int64(native.isa_code(isa)))
