"""best_token: the most likely token of each row among those that its grammar allows. The only door.

Backends: "cpu", native code, and "reference", plain jnp for any device.
"""

from . import cpu, reference
from .reference import masked

__all__ = ["best_token", "masked"]


def best_token(logits_SV, allowed_SW=None, *, backend: str):
    """Argmax of each row, of equals the first: int32 [S]; -1 where the best is not finite, be it
    that a logit is NaN or that nothing is allowed.

    logits_SV: float32. allowed_SW: int32, bit id % 32 of word id // 32 for each id; what is not
    allowed is not looked at. None allows everything.
    """
    chosen = cpu if backend == "cpu" else reference
    return chosen.best_token(logits_SV, allowed_SW)
