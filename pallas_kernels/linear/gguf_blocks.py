"""GGUF's quantised blocks as QuantizedWeight, exactly: same value for every element.

Block layouts after ggml's `block_q*` structures (sizes in bytes, all little-endian): a block holds
32 elements (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0) or a super-block of 256 (Q4_K, Q5_K, Q6_K) whose groups
have integer scales under one or two float16 ones.
"""

import numpy as np

from .weights import QuantizedWeight, pack_nibbles

BLOCK = {  # type: (elements, bytes) of a block
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


def from_gguf_blocks(data: np.ndarray, kind: str) -> QuantizedWeight:
    """`data` uint8 [..., F, bytes of a row] of GGUF type `kind` ("Q4_0" ... "Q6_K").

    ValueError for other types, or a row that is not a whole number of blocks.
    """
    if kind not in BLOCK:
        raise ValueError(f"GGUF type {kind} is not supported; supported: {', '.join(BLOCK)}")
    elements, size = BLOCK[kind]
    if data.dtype != np.uint8 or data.ndim < 2 or data.shape[-1] % size or not data.shape[-1]:
        raise ValueError(f"{kind} rows of {data.shape[-1]} bytes: not a whole number of {size}")
    blocks = data.reshape(*data.shape[:-1], -1, size)
    codes, scale, offset, zero = _DECODERS[kind](blocks)
    features, depth = data.shape[-2], blocks.shape[-2] * elements
    rows = lambda a: None if a is None else np.ascontiguousarray(a.reshape(*data.shape[:-1], -1))
    scale = rows(scale)
    bits = 4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8
    return QuantizedWeight(
        rows(codes),
        scale,
        rows(offset),
        features,
        depth,
        bits=bits,
        group=depth // scale.shape[-1],
        zero=zero,
    )


# Each decoder takes blocks uint8 [..., blocks, bytes] and gives codes [..., blocks, n], scale and
# offset [..., blocks, groups] and the zero point.


def _half(blocks, at):
    """The float16 at byte `at` of each block: [..., blocks, 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _q4_0(b):
    return b[..., 2:], _half(b, 0), None, 8


def _q4_1(b):
    return b[..., 4:], _half(b, 0), _half(b, 2), 0


def _fifth_bits(b, at):
    """32 codes of 0..31: nibbles from byte at + 4, the fifth bits a uint32 at byte `at`."""
    high = np.unpackbits(b[..., at : at + 4], axis=-1, bitorder="little")
    nibbles = b[..., at + 4 :]
    low = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1)
    return (low | (high << 4)).astype(np.int8)


def _q5_0(b):
    return _fifth_bits(b, 2) - np.int8(16), _half(b, 0), None, 0


def _q5_1(b):
    return _fifth_bits(b, 4), _half(b, 0), _half(b, 2), 0


def _q8_0(b):
    return b[..., 2:].view(np.int8), _half(b, 0), None, 0


def _k_scales(b):
    """Q4_K and Q5_K: float32 scale and offset of the 8 groups, from d, dmin and 12 bytes of 6-bit
    integers: groups 0-3 in the low six bits of bytes 0-3 (scale) and 4-7 (min); groups 4-7 have
    four bits in bytes 8-11 and their upper two in the top bits of the first eight."""
    d, dmin = _half(b, 0).astype(np.float32), _half(b, 2).astype(np.float32)
    first, second, third = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1)
    least = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1)
    return d * scale.astype(np.float32), -(dmin * least.astype(np.float32))


def _k_nibbles(b):
    """The last 128 bytes: four runs of 32 bytes, low halves 32 elements, high halves the next."""
    runs = b[..., -128:].reshape(*b.shape[:-1], 4, 32)
    return np.stack([runs & 15, runs >> 4], axis=-2).reshape(*b.shape[:-1], 256)


def _q4_k(b):
    return pack_nibbles(_k_nibbles(b)), *_k_scales(b), 0


def _q5_k(b):
    """The fifth bit of element 32 i + j is bit i of byte j among bytes 16-47."""
    high = b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    codes = _k_nibbles(b) | (high.reshape(*b.shape[:-1], 256) << 4)
    return codes.astype(np.int8), *_k_scales(b), 0


def _q6_k(b):
    """Two halves of 128: 64 bytes of low nibbles and 32 of high bit pairs; then 16 int8 scales of
    groups of 16, and d."""
    low = b[..., :128].reshape(*b.shape[:-1], 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=-2).reshape(*b.shape[:-1], 2, 4, 32)
    high = b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32)
    high = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scale = _half(b, 208).astype(np.float32) * b[..., 192:208].view(np.int8).astype(np.float32)
    return codes.reshape(*b.shape[:-1], 256), scale, None, 0


_DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
