"""The forms in which `linear` holds a weight matrix.

A weight is one of three things, each with an optional leading layer axis L:

- a plain array [F, D], row f holding the D inputs of output feature f;
- a `QuantizedWeight`: small integers with a scale (and sometimes an offset) per group of inputs;
- a `PackedWeight`: floats in the order in which the native kernel reads them.

Everything here runs at load time on numpy arrays; `to_floats` and `pick_rows` also trace.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32  # inputs that share a scale, unless the checkpoint says 16
PANEL = 16  # output features side by side in the packed order: float32 lanes of AVX-512


@flax.struct.dataclass
class QuantizedWeight:
    """value[f, d] = scale[f, d // group] * (code[f, d] - zero) + offset[f, d // group], or, with a
    zero point for each group, scale[f, d // group] * (code[f, d] - offset[f, d // group] / 8).

    In layout "rows" (numpy, or jax for the reference backend):
      codes   bits 8: int8 [..., F, D]; bits 4: uint8 [..., F, D / 2], where byte i of a group's 16
              holds code i in its low and code i + 16 in its high half
      scale   float16 or float32 [..., F, D / group];  offset: the same, or uint8 (zero points
              in eighths of a 4-bit code), or None
    In layout "panels" (what the native kernel reads; F padded to a multiple of 16 with zeros):
      codes   [..., F / 16, rows' last axis / 4, 16, 4], dtype as above
      scale   [..., F / 16, D / group, 16];  offset: the same, or None

    int8_inputs: native code rounds what it is multiplied with to 8 bits; see for_int8_inputs.
    """

    codes: jax.Array | np.ndarray
    scale: jax.Array | np.ndarray
    offset: jax.Array | np.ndarray | None
    out_features: int = flax.struct.field(pytree_node=False)
    in_features: int = flax.struct.field(pytree_node=False)
    bits: int = flax.struct.field(pytree_node=False, default=8)
    group: int = flax.struct.field(pytree_node=False, default=GROUP)
    zero: int = flax.struct.field(pytree_node=False, default=0)
    layout: str = flax.struct.field(pytree_node=False, default="rows")
    int8_inputs: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading axes: () or (L,)."""
        return self.codes.shape[: -2 if self.layout == "rows" else -4]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix it stands for: [F, D] or [L, F, D]."""
        return (*self.lead, self.out_features, self.in_features)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scale, self.offset)
        return sum(p.size * p.dtype.itemsize for p in parts if p is not None)


@flax.struct.dataclass
class PackedWeight:
    """Floats in panels of 16 output features, padded with zeros.

    panels: float32 [..., F / 16, D, 16], or bfloat16 [..., F / 16, ceil(D / 32) * 16, 16, 2] with
    the inputs in pairs and padded with zeros to a multiple of 32.
    """

    panels: jax.Array | np.ndarray
    out_features: int = flax.struct.field(pytree_node=False)
    in_features: int = flax.struct.field(pytree_node=False)

    @property
    def lead(self) -> tuple[int, ...]:
        return self.panels.shape[: -3 if self.panels.dtype == np.float32 else -4]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.lead, self.out_features, self.in_features)

    @property
    def nbytes(self) -> int:
        return self.panels.size * self.panels.dtype.itemsize


Weight = jax.Array | np.ndarray | QuantizedWeight | PackedWeight


# ---- making quantised weights ----------------------------------------------------------------


def quantize(array: np.ndarray, kind: str = "int8") -> QuantizedWeight:
    """Rounds [..., F, D] to `kind`, "int8" or "int4", in symmetric groups of 32 inputs.

    Each group's largest value maps to 127 (or 7); scales are float16, rounded up so that nothing
    clips. ValueError if D is not a multiple of 32 or a value is not finite.
    """
    if kind not in ("int8", "int4"):
        raise ValueError(f"quantize kind {kind!r}: use int8 or int4")
    array = np.asarray(array, np.float32)
    *lead, features, depth = array.shape
    if depth % GROUP:
        raise ValueError(f"quantize needs inputs in groups of {GROUP}, got {depth}: keep float32")
    groups = array.reshape(*lead, features, depth // GROUP, GROUP)
    peak = np.abs(groups).max(axis=-1)
    top = 127 if kind == "int8" else 7
    if not (peak < 65504.0 * top).all():
        raise ValueError("quantize: weights hold NaN, infinity or values beyond float16 scales")
    scale = (peak / top).astype(np.float16)
    clips = scale.astype(np.float32) * top < peak
    scale = np.where(clips, np.nextafter(scale, np.float16(np.inf)), scale)
    inverse = np.divide(1.0, scale, out=np.zeros_like(peak), where=scale > 0, dtype=np.float32)
    codes = np.rint(groups * inverse[..., None]).astype(np.int8).reshape(array.shape)
    if kind == "int4":
        return QuantizedWeight(
            pack_nibbles((codes + 8).astype(np.uint8)), scale, None, features, depth, bits=4, zero=8
        )
    return QuantizedWeight(codes, scale, None, features, depth)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 codes below 16 [..., D] -> [..., D / 2] in the order QuantizedWeight describes."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, 16)
    packed = halves[..., 0, :] | (halves[..., 1, :] << 4)
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_nibbles(packed):
    """The inverse of pack_nibbles, for numpy and jax arrays."""
    groups = packed.reshape(*packed.shape[:-1], -1, 1, 16)
    xp = jnp if isinstance(packed, jax.Array) else np
    codes = xp.concatenate([groups & np.uint8(15), groups >> np.uint8(4)], axis=-2)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


# ---- putting weights together (layout "rows", numpy, at load time) -----------------------------


def stack(weights: list) -> np.ndarray | QuantizedWeight:
    """Adds a leading layer axis. Quantised layers of different forms meet in one that holds all of
    them exactly (8 bits, the smaller group, the wider scale); a plain one makes all plain."""
    return _join(weights, lambda parts: np.stack(parts), axis_is_new=True)


def concatenate(weights: list) -> np.ndarray | QuantizedWeight:
    """Joins along the output features, so that one product serves all (q, k and v; gate and up)."""
    return _join(weights, lambda parts: np.concatenate(parts, axis=-2), axis_is_new=False)


def take_rows(weight: np.ndarray | QuantizedWeight, order_F) -> np.ndarray | QuantizedWeight:
    """The output features `order_F`, in that order."""
    if not isinstance(weight, QuantizedWeight):
        return np.asarray(weight)[..., order_F, :]
    assert weight.layout == "rows"
    pick = lambda a: None if a is None else np.ascontiguousarray(a[..., order_F, :])
    return weight.replace(
        codes=pick(weight.codes),
        scale=pick(weight.scale),
        offset=pick(weight.offset),
        out_features=len(np.arange(weight.out_features)[order_F]),
    )


def _join(weights, join, axis_is_new):
    if not all(isinstance(w, QuantizedWeight) for w in weights):
        plain = [to_floats(w) if isinstance(w, QuantizedWeight) else np.asarray(w) for w in weights]
        if len({p.dtype for p in plain}) > 1:
            plain = [p.astype(np.float32) for p in plain]
        return join(plain)
    weights = _common_form(weights)
    first = weights[0]
    return first.replace(
        codes=join([w.codes for w in weights]),
        scale=join([w.scale for w in weights]),
        offset=None if first.offset is None else join([w.offset for w in weights]),
        out_features=first.out_features if axis_is_new else sum(w.out_features for w in weights),
    )


def _common_form(weights):
    assert len({w.in_features for w in weights}) == 1 and all(w.layout == "rows" for w in weights)
    if len({(w.bits, w.zero) for w in weights}) > 1:
        weights = [_widen_codes(w) for w in weights]
    group = min(w.group for w in weights)
    scale_dtype = np.result_type(*[w.scale.dtype for w in weights])
    any_offset = any(w.offset is not None for w in weights)

    def convert(w):
        spread = lambda a: np.repeat(a.astype(scale_dtype), w.group // group, axis=-1)
        scale = spread(w.scale)
        offset = w.offset
        if any_offset:
            offset = np.zeros_like(scale) if offset is None else spread(offset)
        return w.replace(scale=scale, offset=offset, group=group)

    return [convert(w) for w in weights]


def _widen_codes(weight):
    """4-bit codes as 8-bit ones, the zero point already taken off."""
    if weight.bits == 8:
        return weight
    codes = unpack_nibbles(weight.codes).astype(np.int8) - np.int8(weight.zero)
    return weight.replace(codes=codes, bits=8, zero=0)


def for_int8_inputs(weight: QuantizedWeight) -> QuantizedWeight:
    """The weight in a form that is multiplied as integers, by inputs rounded to 8 bits.

    For that it must not have offsets. Those of 4-bit codes become zero points, to the nearest
    eighth of a code (rounding to 4 bits left errors of up to four eighths). Wider codes, and
    weights of which a group's zero point is not among its codes, are rounded anew to 8 bits.
    """
    assert weight.layout == "rows"
    if weight.offset is None:
        return weight.replace(int8_inputs=True)
    if weight.bits == 4:
        scale, offset = weight.scale.astype(np.float32), weight.offset.astype(np.float32)
        constant = np.where(offset == 0, np.float32(0), np.float32(np.inf))  # groups of one value
        above_zero = np.divide(offset, scale, out=constant, where=scale != 0)  # in codes
        eighths = np.rint(8 * (weight.zero - above_zero))
        if ((eighths >= 0) & (eighths <= 128)).all():
            return weight.replace(offset=eighths.astype(np.uint8), int8_inputs=True)
    return quantize(to_floats(weight), "int8").replace(int8_inputs=True)


# ---- the native kernel's order ----------------------------------------------------------------


def to_panels(weight: QuantizedWeight) -> QuantizedWeight:
    """rows -> panels: 16 output features side by side, four bytes of each at a time. numpy."""
    assert weight.layout == "rows"
    quads = _pad_features(np.asarray(weight.codes)).view(np.uint32)
    quads = np.ascontiguousarray(_features_inside(quads))
    codes = quads.view(weight.codes.dtype).reshape(*quads.shape, 4)
    turn = lambda a: None if a is None else np.ascontiguousarray(_features_inside(_pad_features(a)))
    return weight.replace(
        codes=codes, scale=turn(weight.scale), offset=turn(weight.offset), layout="panels"
    )


def pack_floats(array: np.ndarray) -> PackedWeight:
    """[..., F, D] float32 or bfloat16 -> the same values in panels. numpy."""
    *_, features, depth = array.shape
    if array.dtype == np.float32:
        panels = np.ascontiguousarray(_features_inside(_pad_features(array)))
        return PackedWeight(panels, features, depth)
    assert array.dtype == jnp.bfloat16, array.dtype
    bits = np.ascontiguousarray(array).view(np.uint16)
    bits = np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -depth % 32)])
    pairs = _features_inside(_pad_features(bits).view(np.uint32))
    pairs = np.ascontiguousarray(pairs)
    return PackedWeight(pairs.view(jnp.bfloat16).reshape(*pairs.shape, 2), features, depth)


def _pad_features(rows):
    """Zero rows up to a multiple of 16 of the axis before the last."""
    spare = -rows.shape[-2] % PANEL
    if spare:
        rows = np.pad(rows, [(0, 0)] * (rows.ndim - 2) + [(0, spare), (0, 0)])
    return np.ascontiguousarray(rows)


def _features_inside(rows):
    """[..., F, n] -> [..., F / 16, n, 16]."""
    *lead, features, n = rows.shape
    return rows.reshape(*lead, features // PANEL, PANEL, n).swapaxes(-1, -2)


# ---- floats again ------------------------------------------------------------------------------


def to_floats(weight):
    """The float32 matrix [..., F, D] that a weight stands for, exact but for the one rounding of
    scale * code + offset. Takes and gives numpy or jax arrays."""
    if isinstance(weight, QuantizedWeight) and weight.layout == "rows":
        return _values(weight, weight.codes, weight.scale, weight.offset)
    if isinstance(weight, QuantizedWeight):
        codes = _features_outside(weight.codes, weight.out_features)
        scale = _features_outside(weight.scale[..., None], weight.out_features)
        offset = weight.offset
        if offset is not None:
            offset = _features_outside(offset[..., None], weight.out_features)
        return _values(weight, codes, scale, offset)
    if isinstance(weight, PackedWeight):
        lanes = _lanes(weight)
        rows = _features_outside(lanes, weight.out_features)
        return rows[..., : weight.in_features].astype(np.float32)
    return weight.astype(np.float32)


def pick_rows(weight, ids_T):
    """float32 [T, D]: rows `ids_T` of one matrix (no leading axis), without touching the others."""
    panelled = lambda a: a[ids_T // PANEL, :, ids_T % PANEL].reshape(len(ids_T), -1)
    if isinstance(weight, PackedWeight):
        return panelled(_lanes(weight))[:, : weight.in_features].astype(np.float32)
    if not isinstance(weight, QuantizedWeight):
        return weight[ids_T].astype(np.float32)
    pick = panelled if weight.layout == "panels" else (lambda a: a[ids_T])
    offset = None if weight.offset is None else pick(weight.offset)
    return _values(weight, pick(weight.codes), pick(weight.scale), offset)


def _lanes(packed):
    """PackedWeight's panels as [..., F / 16, n, 16, inputs per lane]."""
    return packed.panels[..., None] if packed.panels.dtype == np.float32 else packed.panels


def _features_outside(panels, features):
    """[..., F / 16, n, 16, m] -> [..., F, n * m], the padding rows cut off."""
    *lead, count, n, _, m = panels.shape
    rows = panels.swapaxes(-2, -3).reshape(*lead, count * PANEL, n * m)
    return rows[..., :features, :]


def _values(weight, codes, scale, offset):
    """scale * (code - zero) + offset for any set of rows, all given as [..., n]."""
    if weight.bits == 4:
        codes = unpack_nibbles(codes)
    groups = codes.astype(np.float32).reshape(*scale.shape, weight.group)
    of_groups = offset is not None and offset.dtype == np.uint8
    zero = offset.astype(np.float32)[..., None] / 8 if of_groups else np.float32(weight.zero)
    values = (groups - zero) * scale.astype(np.float32)[..., None]
    if offset is not None and not of_groups:
        values = values + offset.astype(np.float32)[..., None]
    return values.reshape(codes.shape)
