"""Ragged paged attention: the contract, and the only door to the op.

One call writes a step's new keys and values into their pages and attends, for any mix of rows with
one token (decode) and rows with many (prefill chunks). Backends:

  tpu        Pallas kernel (tpu.py); "interpret" runs the same body on a CPU, for tests
  gpu        Pallas kernel for Hopper (gpu.py)
  cpu        native code (cpu.py), where a compiler was at hand when jaxserve was installed
  reference  plain jnp (reference.py): read this one first

A token's output depends on its own row alone: not on the rows or padding that share the step, their
order, or how its prompt was cut into chunks. "reference" and "cpu" hold this to the last bit for a
given number of packed tokens T, "cpu" for all T.
"""

from __future__ import annotations

import flax.struct
import jax

from .. import dispatch
from .kv import (
    KVPages,
    KVSpec,
    init_kv_pages,
    kv_bytes_per_page,
    kv_page_shape,
    kv_page_specs,
)

__all__ = [
    "KVPages",
    "KVSpec",
    "RaggedBatch",
    "choose_backend",
    "init_kv_pages",
    "kv_bytes_per_page",
    "kv_page_shape",
    "kv_page_specs",
    "ragged_paged_attention",
]


@flax.struct.dataclass
class RaggedBatch:
    """Which tokens belong to which row, and where each row's KV lives. All int32.

    Rows may share pages, but not one that any of them writes in this step: when its tokens are in
    it is the backend's choice.
    Rows [0, num_decode) have one token each. Rows from num_rows on are padding: kv_len 0 and
    cu_q_len flat. Tokens from cu_q_len_S1[num_rows] on are padding: they write nothing, and their
    output is zero.
    """

    page_table_SP: jax.Array  # page ids; entries past a row's length are never read
    kv_len_S: jax.Array  # length of the row, this step's tokens included
    cu_q_len_S1: jax.Array  # row s has the tokens [cu_q_len[s], cu_q_len[s + 1])
    num_rows: jax.Array  # [1]
    num_decode: jax.Array  # [1]


def choose_backend(platform: str) -> str:
    """The fastest backend for a jax platform name: "cpu", "gpu" or "cuda", "tpu"."""
    return dispatch.choose(platform, __package__)


def ragged_paged_attention(
    q_THE,
    k_TJE,
    v_TJE,
    kv_pages: KVPages,
    batch: RaggedBatch,
    *,
    layer,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks=None,
    backend: str,
):
    """-> (out_THE in q's dtype, kv_pages with the new K and V written).

    The token at position p of a row sees positions (p - window, p] of that row, or [0, p] without a
    window. Scores are `scale * q.k`, then `soft_cap * tanh(score / soft_cap)` where asked. sinks:
    [H] logits that take part in each head's softmax and carry no value. layer: int or traced int32
    scalar, an index into the stacked cache. H must be a multiple of J. Donate kv_pages: every
    backend then updates it in place.
    """
    T, H, E = q_THE.shape
    J = k_TJE.shape[1]
    if H % J:
        raise ValueError(f"{H} query heads are not a multiple of {J} KV heads")
    if k_TJE.shape != (T, J, E) or v_TJE.shape != (T, J, E):
        raise ValueError(f"K {k_TJE.shape} and V {v_TJE.shape} must both be {(T, J, E)}")
    if window is not None and window < 1:
        raise ValueError(f"window={window}: must be at least 1, or None for no window")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap={soft_cap}: must be above 0, or None for no cap")
    if sinks is not None and sinks.shape != (H,):
        raise ValueError(f"sinks {sinks.shape}: must be one per query head, {(H,)}")
    module = dispatch.module(__package__, backend)
    run = module.interpreted if backend == "interpret" else module.ragged_paged_attention
    return run(
        q_THE,
        k_TJE,
        v_TJE,
        kv_pages,
        batch,
        layer=layer,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
    )
