"""The paged KV cache: its specification, its layout, and its numbers as codes with a scale.

Position p of a row lives in page `page_table_SP[row, p // K]`, slot `p % K`. Page 0 is the null
page: no row owns it.
"""

from __future__ import annotations

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp

from .. import dispatch, native

FP8_MAX = 448.0  # largest finite float8_e4m3fn; a cast of more gives NaN, not 448
LANES = 128  # of a TPU register
CODE_MAX = {"int8": 127.0, "int16": 32767.0, "float8_e4m3fn": FP8_MAX}
FP8_LEAST = 2.0**-6  # smallest normal one; below it, processors that flush disagree with others


@dataclasses.dataclass(frozen=True)
class KVSpec:
    """What one model keeps per token. dtype: float32, bfloat16, int8, int16 or float8_e4m3fn.

    int16 is half of float32 at 15 bits of each vector's largest element, for native CPU code and
    the reference only. As good as float32 to read text by, but no default: where keys have a few
    huge elements (Qwen2.5) single log-probabilities move by up to 0.016.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: jnp.dtype

    def __post_init__(self):
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        known = ("float32", "bfloat16", *CODE_MAX)
        if self.dtype.name not in known:
            raise ValueError(f"KV dtype {self.dtype.name}: choose one of {', '.join(known)}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    @property
    def quantised(self) -> bool:
        return self.dtype.name in CODE_MAX


@flax.struct.dataclass
class KVPages:
    """The stacked cache of all layers. Donated to every step and updated in place.

    data: [L, G, J, 2, K, E] (2: K then V), or on TPU [L, G, C, K, 128]: all K heads, then all V
      heads, side by side in C columns of 128 lanes.
      In native code on the CPU a page's K are turned, [K / 16, E, 16] in the place of [K, E] (whole
      where 16 does not divide K): there a vector holds one element of 16 keys.
    scale: None, or for codes float32 [L, G, J, 2, K], on TPU [L, G, 2J, K]: value = data *
      scale. A page carries a scale per head and slot, not one for all slots: it fills over many
      steps, a shared scale would have to be revised, and results would depend on a prompt's chunks.
    """

    data: jax.Array
    scale: jax.Array | None = None


def kv_page_shape(spec: KVSpec, num_pages: int, backend: str) -> tuple[int, ...]:
    """Shape of `KVPages.data` for `backend`."""
    dispatch.check(backend)
    if spec.dtype == jnp.int16 and backend not in ("cpu", "reference"):
        raise ValueError("KV dtype int16 is for the CPU: choose bfloat16, int8 or float8_e4m3fn")
    L, J, K, E = spec.num_layers, spec.num_kv_heads, spec.page_size, spec.head_dim
    if backend in ("tpu", "interpret"):
        return (L, num_pages, tpu_columns(J, E), K, LANES)
    return (L, num_pages, J, 2, K, E)


def tpu_columns(num_kv_heads: int, head_dim: int) -> int:
    """How many columns of 128 lanes all K heads and all V heads take on TPU."""
    return -(-2 * num_kv_heads * head_dim // LANES)


def kv_page_specs(spec: KVSpec, num_pages: int, backend: str) -> KVPages:
    """The cache as ShapeDtypeStructs: what to lower a step with."""
    shape = kv_page_shape(spec, num_pages, backend)
    scale = None
    if spec.quantised:
        per_slot = shape[:-1]
        if backend in ("tpu", "interpret"):
            per_slot = (*shape[:2], 2 * spec.num_kv_heads, spec.page_size)
        scale = jax.ShapeDtypeStruct(per_slot, jnp.float32)
    return KVPages(jax.ShapeDtypeStruct(shape, spec.dtype), scale)


def init_kv_pages(spec: KVSpec, num_pages: int, backend: str) -> KVPages:
    """An empty cache: zeros."""
    specs = kv_page_specs(spec, num_pages, backend)
    zeros = native.zeros if backend == "cpu" else jnp.zeros
    return jax.tree.map(lambda array: zeros(array.shape, array.dtype), specs)


def kv_bytes_per_page(spec: KVSpec, backend: str) -> int:
    """Bytes that one page takes over all layers, scales included."""
    leaves = jax.tree.leaves(kv_page_specs(spec, 1, backend))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def quantise(x, dtype):
    """x [..., E] -> (codes of `dtype` [..., E], scale float32 [...]) with x ~ codes * scale.

    Scales make the largest magnitude of each vector the largest code. A vector of zeros keeps scale
    1; infinities become the largest finite value: nothing here makes a NaN of a number. An fp8 code
    below the smallest normal number becomes that or zero, whichever is nearer.
    """
    limit = CODE_MAX[jnp.dtype(dtype).name]
    largest = float(jnp.finfo(jnp.float32).max)
    x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    amax = jnp.max(jnp.abs(x), axis=-1)
    scale = jnp.where(amax > 0, jnp.maximum(amax * (1 / limit), jnp.finfo(jnp.float32).tiny), 1.0)
    codes = jnp.clip(x * (1 / scale)[..., None], -limit, limit)  # as XLA would rewrite a division
    if jnp.issubdtype(dtype, jnp.integer):
        codes = jnp.round(codes)
    else:
        small = jnp.round(codes / FP8_LEAST) * FP8_LEAST
        codes = jnp.where(jnp.abs(codes) < FP8_LEAST, small, codes)
    return codes.astype(dtype), scale


def to_layout(pages: KVPages, backend: str) -> KVPages:
    """Pages in the plain layout [L, G, J, 2, K, E] -> the backend's."""
    if backend == "cpu":
        return pages.replace(data=_turn_keys(pages.data, to_cpu=True))
    if backend not in ("tpu", "interpret"):
        return pages
    L, G, J, _, K, E = pages.data.shape
    rows = pages.data.transpose(0, 1, 4, 3, 2, 5).reshape(L, G, K, 2 * J * E)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, -2 * J * E % LANES)))
    columns = rows.reshape(L, G, K, -1, LANES).swapaxes(2, 3)
    if pages.scale is None:
        return KVPages(columns)
    return KVPages(columns, pages.scale.transpose(0, 1, 3, 2, 4).reshape(L, G, 2 * J, K))


def from_layout(pages: KVPages, backend: str, num_kv_heads: int, head_dim: int) -> KVPages:
    """The backend's layout -> the plain one."""
    if backend == "cpu":
        return pages.replace(data=_turn_keys(pages.data, to_cpu=False))
    if backend not in ("tpu", "interpret"):
        return pages
    L, G, _, K, _ = pages.data.shape
    J, E = num_kv_heads, head_dim
    rows = pages.data.swapaxes(2, 3).reshape(L, G, K, -1)[..., : 2 * J * E]
    rows = rows.reshape(L, G, K, 2, J, E).transpose(0, 1, 4, 3, 2, 5)
    if pages.scale is None:
        return KVPages(rows)
    return KVPages(rows, pages.scale.reshape(L, G, 2, J, K).transpose(0, 1, 3, 2, 4))


def _turn_keys(data, *, to_cpu: bool):
    *lead, _, K, E = data.shape
    lanes = 16 if K % 16 == 0 else K
    turned = (lanes, E) if to_cpu else (E, lanes)
    keys = data[..., 0, :, :].reshape(*lead, K // lanes, *turned).swapaxes(-1, -2)
    return jnp.stack([keys.reshape(*lead, K, E), data[..., 1, :, :]], axis=-3)
