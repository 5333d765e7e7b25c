"""rotary: turns queries and keys by their positions (RoPE, arXiv:2104.09864). The only door.

Elements i and i + R of a head are a pair, turned by the angle whose cosine and sine the tables hold
for its token; elements from 2 R on pass through. Backends: "cpu", native code, and "reference",
plain jnp for any device.
"""

from . import cpu, reference

__all__ = ["rotate"]


def rotate(q_THE, k_TJE, cos_sin_TR, *, backend: str):
    """-> (q, k) turned, computed in float32, in their own dtype. cos_sin_TR: two float32 tables."""
    if backend == "cpu":
        return cpu.rotate(q_THE, k_TJE, cos_sin_TR)
    return tuple(reference.rotate(x, cos_sin_TR) for x in (q_THE, k_TJE))
