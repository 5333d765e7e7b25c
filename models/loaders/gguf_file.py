"""GGUF files: the header parsed with every length checked first, the tensors mapped, not read.

Layout (little-endian): magic, version, tensor count, metadata count, metadata (key, type, value),
tensor infos (name, dimensions innermost first, type, offset), padding to the alignment, data.

The header is hostile input: each length is compared with the bytes that remain in the file before
anything is allocated for it, so a lie costs a ValueError and no memory. No jax here: the tokenizer
reads vocabularies through this module.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

# type id -> name, elements a block, bytes a block: those that jaxserve computes with.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
PLAIN_TYPES = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
# Named only to refuse them politely.
OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16",
    26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Metadata value types: numpy dtype of the scalars, little-endian.
SCALARS = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"),
    4: np.dtype("<u4"), 5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"),
    10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
}  # fmt: skip
STRING, ARRAY = 8, 9

LENGTH = struct.Struct("<Q")
MAX_NAME_BYTES = 65535  # the format's own bound on keys
MAX_DIMENSIONS = 4
MIN_KEY_VALUE_BYTES = 8 + 4 + 1  # empty key, type, one byte
MIN_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, one dimension
DEFAULT_ALIGNMENT = 32


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor, still in its file's encoding.

    shape: row-major (the file's dimensions reversed). data: uint8 [..., bytes of a row], a
    read-only view of the mapped file whose pages are read when touched.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def quantised(self) -> bool:
        return self.type_name not in PLAIN_TYPES

    def array(self) -> np.ndarray:
        """The values: a view of the file for float types, otherwise dequantised to float32."""
        if self.quantised:
            return self.float32()
        return self.data.view(PLAIN_TYPES[self.type_name]).reshape(self.shape)

    def rows(self, start: int, stop: int) -> GgufTensor:
        """The tensor of some of the rows; blocks never cross them."""
        part = self.data[start:stop]
        return dataclasses.replace(self, shape=(stop - start, *self.shape[1:]), data=part)

    def sample(self) -> bytes:
        """The first and the last bytes: enough to tell one training from another."""
        flat = self.data.reshape(-1)
        return flat[:64].tobytes() + flat[-64:].tobytes()

    def float32(self) -> np.ndarray:
        """The values, dequantised to a new float32 array of `shape`."""
        import gguf.quants

        kind = gguf.GGMLQuantizationType[self.type_name]
        rows = gguf.quants.dequantize(self.data.reshape(-1, self.data.shape[-1]), kind)
        return np.ascontiguousarray(rows, np.float32).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """metadata: str, bool, int or float scalars; arrays as list[str] or numpy. tensors: by name."""

    path: pathlib.Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: str | os.PathLike) -> GgufFile:
    """Reads the header and maps the tensors. Raises ValueError naming the file and the fault."""
    path = pathlib.Path(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < 24:
                raise ValueError("too short to be a GGUF file")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(mapped)
        num_tensors, num_metadata = _read_counts(cursor)
        metadata = _read_metadata(cursor, num_metadata)
        tensors = _read_tensors(cursor, num_tensors, _alignment(metadata))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """A position in the mapped file that refuses to pass its end."""

    def __init__(self, mapped: mmap.mmap):
        self.bytes = memoryview(mapped)
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.bytes) - self.at

    def take(self, count: int, what: str) -> memoryview:
        if count > self.left:
            raise ValueError(f"{what} needs {count} bytes at {self.at}, the file has {self.left}")
        piece = self.bytes[self.at : self.at + count]
        self.at += count
        return piece

    def u32(self, what: str) -> int:
        return struct.unpack("<I", self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return LENGTH.unpack(self.take(8, what))[0]

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise ValueError(f"{what} of {length} bytes; at most {limit} are allowed")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{what} is not valid UTF-8") from None


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    magic = bytes(cursor.take(4, "the magic"))
    if magic != b"GGUF":
        hint = "; it looks big-endian, which is not supported" if magic == b"FUGG" else ""
        raise ValueError(f"not a GGUF file: starts with {magic!r}{hint}")
    version = cursor.u32("the version")
    if version & 0xFFFF == 0:
        raise ValueError("a big-endian GGUF file; convert it to little-endian")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}; versions 2 and 3 are supported")
    num_tensors, num_metadata = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    if num_metadata * MIN_KEY_VALUE_BYTES + num_tensors * MIN_TENSOR_INFO_BYTES > cursor.left:
        raise ValueError(
            f"{num_metadata} metadata entries and {num_tensors} tensors do not fit in the file"
        )
    return num_tensors, num_metadata


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text("a metadata key", MAX_NAME_BYTES)
        if key in metadata:
            raise ValueError(f"metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, cursor.u32(f"the type of {key!r}"), key)
    return metadata


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == STRING:
        return cursor.text(f"metadata {key!r}")
    if kind == ARRAY:
        return _read_array(cursor, key)
    scalar = _read_scalars(cursor, kind, 1, key)[0]
    if scalar.dtype == np.float32:
        return float(str(scalar))  # the shortest decimal: 1e-05 as its author wrote, not 9.99e-06
    return scalar.item()


def _read_array(cursor: _Cursor, key: str) -> list[str] | np.ndarray:
    kind, count = cursor.u32(f"the type of {key!r}"), cursor.u64(f"the length of {key!r}")
    if kind == ARRAY:
        raise ValueError(f"metadata {key!r} is an array of arrays, which is not supported")
    if kind != STRING:
        return _read_scalars(cursor, kind, count, key)
    if count * 8 > cursor.left:
        raise ValueError(f"metadata {key!r} claims {count} strings, more than the file can hold")
    return _read_strings(cursor, count, key)


def _read_strings(cursor: _Cursor, count: int, key: str) -> list[str]:
    """What cursor.text would read, in one loop: vocabularies have some 250,000 strings."""
    data, at, end, length_at = cursor.bytes, cursor.at, len(cursor.bytes), LENGTH.unpack_from
    strings = []
    try:
        for _ in range(count):
            (length,) = length_at(data, at)
            at += 8
            if length > end - at:
                raise ValueError(f"a string of {key!r} reaches past the end of the file")
            strings.append(str(data[at : at + length], "utf-8"))
            at += length
    except UnicodeDecodeError:
        raise ValueError(f"a string of {key!r} is not valid UTF-8") from None
    except struct.error:
        raise ValueError(f"the strings of {key!r} reach past the end of the file") from None
    cursor.at = at
    return strings


def _read_scalars(cursor: _Cursor, kind: int, count: int, key: str) -> np.ndarray:
    dtype = SCALARS.get(kind)
    if dtype is None:
        raise ValueError(f"metadata {key!r} has the unknown type {kind}")
    return np.frombuffer(cursor.take(count * dtype.itemsize, f"metadata {key!r}"), dtype)


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value < 8 or value & (value - 1):
        raise ValueError(f"general.alignment is {value!r}; it must be a power of two from 8")
    return value


@dataclasses.dataclass(frozen=True)
class _Info:
    """A tensor info: where its data lies, relative to the data section."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    row_bytes: int
    offset: int

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * math.prod(self.shape[:-1])


def _read_info(cursor: _Cursor) -> _Info:
    name = cursor.text("a tensor name", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dimensions = cursor.u32(what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{what} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} allowed")
    shape = tuple(cursor.u64(what) for _ in range(num_dimensions))[::-1]
    kind, offset = cursor.u32(what), cursor.u64(what)
    if kind not in TENSOR_TYPES:
        raise ValueError(
            f"{what} is of type {OTHER_TYPES.get(kind, kind)}, which is not supported; use a file "
            f"of {', '.join(known for known, _, _ in TENSOR_TYPES.values())}"
        )
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"{what} has shape {shape}; its rows must be whole {type_name} blocks")
    return _Info(name, shape, type_name, shape[-1] // block * block_bytes, offset)


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    infos: dict[str, _Info] = {}
    for _ in range(count):
        info = _read_info(cursor)
        if info.name in infos:
            raise ValueError(f"tensor {info.name!r} appears twice")
        infos[info.name] = info
    start = -(-cursor.at // alignment) * alignment
    end_of_last = 0
    for info in sorted(infos.values(), key=lambda info: info.offset):
        if info.offset % alignment:
            raise ValueError(f"tensor {info.name!r} is not aligned to {alignment} bytes")
        if info.offset < end_of_last:
            raise ValueError(f"tensor {info.name!r} overlaps the one before it")
        end_of_last = info.offset + info.num_bytes
        if start + end_of_last > len(cursor.bytes):
            raise ValueError(f"tensor {info.name!r} reaches past the end of the file: truncated?")
    return {name: _map_tensor(cursor.bytes, start, info) for name, info in infos.items()}


def _map_tensor(file: memoryview, start: int, info: _Info) -> GgufTensor:
    data = np.frombuffer(file, np.uint8, info.num_bytes, start + info.offset)
    return GgufTensor(
        info.name, info.shape, info.type_name, data.reshape(*info.shape[:-1], info.row_bytes)
    )
