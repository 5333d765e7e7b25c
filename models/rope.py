"""Rotary position embeddings: from a checkpoint's parameters to inverse frequencies and cos/sin.

Frequencies are computed on the host in float64 and phases on the device in float32: in bfloat16
they would drift by whole turns within a few thousand positions.

Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071), and the frequency smoothing that
Llama 3.1 was released with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# rope type -> the parameters it has beside rope_theta and partial_rotary_factor.
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    ),
    "divisors": ("divisors",),  # GGUF's rope_freqs tensor: one divisor a frequency
}  # fmt: skip
REFUSED = {
    "dynamic": "its rotation depends on the cache's history, on chunks and shared prefixes",
    "longrope": "past the original length every cached key would have to be rotated again",
    "su": "an old name of longrope, which rotates cached keys again past the original length",
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """How queries and keys of a layer turn: equal objects are equal rotations.

    inv_freq: radians a position, one per rotated pair; the first 2 * len(inv_freq) elements of a
    head turn, element i with element i + len(inv_freq). scale multiplies cos and sin (YaRN).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


def make_rope(parameters: Mapping[str, Any], *, head_dim: int, max_positions: int) -> Rope:
    """The rotation that one flat dict of checkpoint parameters describes.

    parameters: rope_theta, rope_type (or type), and those of PARAMETERS. Raises ValueError for a
    type that is unknown or refused, and for any parameter that the type does not have.
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    kind = _kind(given)
    theta, part = _number(given, "rope_theta"), _number(given, "partial_rotary_factor", 1.0)
    dim = int(head_dim * part)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise ValueError(f"rope turns {dim} of {head_dim} head elements; it must be an even number")
    allowed = ("rope_theta", "partial_rotary_factor", *PARAMETERS[kind])
    unknown = sorted(key for key in given if key not in allowed and given[key])
    if unknown:
        raise ValueError(f"rope type {kind!r} has no parameter {', '.join(unknown)}")
    inv_freq = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if kind == "linear":
        inv_freq = inv_freq / _number(given, "factor")
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, given)
    elif kind == "yarn":
        return _yarn(inv_freq, theta, given, max_positions)
    elif kind == "divisors":
        inv_freq = inv_freq / _divisors(given, len(inv_freq))
    return Rope(tuple(inv_freq.tolist()))


def _kind(given: dict[str, Any]) -> str:
    """Takes the type out of the parameters; published files say type, newer ones rope_type."""
    names = [given.pop(key) for key in ("rope_type", "type") if key in given]
    if any(name != names[0] for name in names):
        raise ValueError(f"rope type and rope_type disagree: {names}")
    kind = names[0] if names else "default"
    if not isinstance(kind, str):
        raise ValueError(f"rope_type={kind!r} in the config: must be a name")
    if kind in REFUSED:
        raise ValueError(f"rope type {kind!r} is not supported: {REFUSED[kind]}")
    if kind not in PARAMETERS:
        raise ValueError(f"unknown rope type {kind!r}; known: {', '.join(PARAMETERS)}")
    return kind


def positive_number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
        raise ValueError(f"{name}={value!r} in the config: must be a number above 0")
    return float(value)


def _number(given: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A parameter as a number above 0; required unless it has a default."""
    if given.get(name, default) is None:
        raise ValueError(f"the rope needs the parameter {name}")
    return positive_number(given.get(name, default), name)


def _divisors(given: Mapping[str, Any], count: int) -> np.ndarray:
    divisors = given.get("divisors")
    if not isinstance(divisors, tuple) or len(divisors) != count:
        raise ValueError(f"rope divisors must be {count} numbers, one for each rotated pair")
    return np.array([positive_number(value, "a rope divisor") for value in divisors])


def _llama3(inv_freq: np.ndarray, given: Mapping[str, Any]) -> np.ndarray:
    """Slow frequencies are divided by factor, fast ones kept, those between blended."""
    factor, low, high, original = (_number(given, name) for name in PARAMETERS["llama3"])
    turns = original * inv_freq / (2 * math.pi)  # within the original context
    if high > low:
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    else:
        kept = np.where(turns < low, 0.0, 1.0)  # no band between: nothing is blended
    return inv_freq * (kept + (1.0 - kept) / factor)


def _yarn(inv_freq: np.ndarray, theta: float, given: Mapping[str, Any], max_positions: int) -> Rope:
    """Fast frequencies are kept, slow ones divided by factor, with a linear ramp between."""
    if theta <= 1:
        raise ValueError(f"rope_theta={theta}: must be above 1 with rope type 'yarn'")
    factor = _number(given, "factor")
    original = _number(given, "original_max_position_embeddings", float(max_positions))
    dim = 2 * len(inv_freq)

    def pair_turning(times: float) -> float:
        """Index of the pair that turns so many times within the original context."""
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_turning(_number(given, "beta_fast", 32.0))
    high = pair_turning(_number(given, "beta_slow", 1.0))
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (np.arange(dim // 2) - low) / max(high - low, 1e-3)
    stretched = np.clip(ramp, 0.0, 1.0)  # share of each frequency that is interpolated
    inv_freq = inv_freq * (stretched / factor + (1.0 - stretched))
    return Rope(tuple(inv_freq.tolist()), _yarn_scale(factor, given))


def _yarn_scale(factor: float, given: Mapping[str, Any]) -> float:
    """YaRN's attention temperature, as a factor on cos and sin."""
    if given.get("attention_factor") is not None:
        return _number(given, "attention_factor")

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return temperature(_number(given, "mscale")) / temperature(_number(given, "mscale_all_dim"))
    return temperature(1.0)


def cos_sin(rope: Rope, positions_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-> cos and sin [T, pairs] in float32, scaled."""
    inv_freq = jnp.asarray(np.float32(rope.inv_freq))
    phase = positions_T.astype(jnp.float32)[:, None] * inv_freq[None, :]
    return jnp.cos(phase) * rope.scale, jnp.sin(phase) * rope.scale
