"""Ragged paged attention on the CPU in native code (cpu.cc), called through XLA's FFI."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import native
from .kv import KVPages


def available() -> bool:
    """Whether the native library is built and loads."""
    return native.available()


def ragged_paged_attention(
    q_THE,
    k_TJE,
    v_TJE,
    kv_pages: KVPages,
    batch,
    *,
    layer,
    scale,
    window=None,
    soft_cap=None,
    sinks=None,
    isa: str | None = None,
):
    """See api.ragged_paged_attention. kv_pages.data: [L, G, J, 2, K, E], its K turned (see kv.py),
    updated in place.

    AMX's tile unit or AVX-512's vector units, where they can, multiply queries and weights over a
    cache in int8 as two bytes each, and queries in bfloat16 over one in bfloat16 as that, with
    weights rounded to it; everything else is multiplied in float32.
    isa: a name of native.ISAS, for tests; None takes the best.
    """
    assert native.available(), native.describe()
    data, scales = kv_pages.data, kv_pages.scale
    none = jnp.zeros((0,), jnp.float32)
    all_scales = none if scales is None else scales
    q = q_THE if q_THE.dtype == jnp.bfloat16 else q_THE.astype(jnp.float32)
    like = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    call = jax.ffi.ffi_call(
        "jaxserve_ragged_attention",
        (like(q), like(data), like(all_scales)),
        input_output_aliases={3: 1, 4: 2},
    )
    out_THE, data, all_scales = call(
        q,
        k_TJE.astype(q.dtype),
        v_TJE.astype(q.dtype),
        data,
        all_scales,
        batch.page_table_SP,
        batch.kv_len_S,
        batch.cu_q_len_S1,
        batch.num_rows,
        jnp.asarray(layer, jnp.int32),
        none if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int64(window or 0),
        isa=np.int64(native.isa_code(isa)),
    )
    return out_THE.astype(q_THE.dtype), KVPages(data, None if scales is None else all_scales)
