"""rms_norm: x / rms(x) * weight over the last axis (arXiv:1910.07467). The only door.

Backends: "cpu", native code, and "reference", plain jnp for any device.
"""

from . import cpu, reference

__all__ = ["rms_norm"]


def rms_norm(x, weight, eps: float, *, layer=None, backend: str):
    """-> x [..., D] normalised, computed in float32, in its own dtype.

    weight: float32 [D], the factor itself; or [L, D], of which `layer`, an int or a traced int32
    scalar, takes one. eps is added to the mean square.
    """
    chosen = cpu if backend == "cpu" else reference
    return chosen.rms_norm(x, weight, eps, layer=layer)
