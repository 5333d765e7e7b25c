"""Safetensors: one file, or a folder of shards under an index, as named arrays mapped from disk.

The safetensors library checks each header (bounded size, offsets that tile the data) before
anything is mapped; arrays are then views through ml_dtypes, since numpy alone has no bfloat16.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES = 100 << 20
SHARD_NAME = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")


@dataclasses.dataclass(frozen=True)
class SafeTensor:
    """One tensor. data: a read-only view of the mapped file, in the dtype it is stored in."""

    name: str
    type_name: str
    data: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def array(self) -> np.ndarray:
        return self.data

    def rows(self, start: int, stop: int) -> SafeTensor:
        """The tensor of some of the rows."""
        return dataclasses.replace(self, data=self.data[start:stop])

    def sample(self) -> bytes:
        """The first and the last bytes: enough to tell one training from another."""
        flat = self.data.reshape(-1).view(np.uint8)
        return flat[:64].tobytes() + flat[-64:].tobytes()


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; ValueError naming the file otherwise."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = sorted({key for key in names if names.count(key) > 1})
        raise ValueError(f"{', '.join(twice)} appears twice")
    return found


def read_safetensors(path: pathlib.Path) -> dict[str, SafeTensor]:
    """Every tensor of one file, by name. Raises ValueError naming the file and the fault."""
    try:
        with safetensors.safe_open(path, framework="numpy") as checked:
            names = set(checked.keys())
        with path.open("rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        header_bytes = int.from_bytes(mapped[:8], "little")
        header = json.loads(bytes(mapped[8 : 8 + header_bytes]), object_pairs_hook=_unique_keys)
        header.pop("__metadata__", None)
        assert names == set(header), "the library and the header agree on the names"
        data = mapped[8 + header_bytes :]
        return {name: _map(name, entry, data) for name, entry in header.items()}
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from None


def _map(name: str, entry: dict[str, Any], data: memoryview) -> SafeTensor:
    type_name, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type_name not in DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {type_name}, which is not supported")
    array = np.frombuffer(data[start:end], np.uint8).view(DTYPES[type_name]).reshape(shape)
    return SafeTensor(name, type_name, array)


def read_folder(folder: pathlib.Path) -> dict[str, SafeTensor]:
    """Every tensor of a folder: from its index's shards, or its one file.

    Raises one ValueError with all that is wrong: shards missing or outside the folder, shards the
    index does not know, tensors that are not where the index says.
    """
    if (folder / INDEX).is_file():
        return _read_indexed(folder)
    files = sorted(folder.glob("*.safetensors"))
    if folder / SINGLE in files:
        files = [folder / SINGLE]
    if not files:
        raise ValueError(f"{folder}: no .safetensors file in it; convert the checkpoint first")
    if len(files) > 1:
        raise ValueError(f"{folder}: several .safetensors files and no {INDEX}")
    return read_safetensors(files[0])


def _read_indexed(folder: pathlib.Path) -> dict[str, SafeTensor]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{folder / INDEX}: has no weight_map")
    shards = sorted(set(map(str, weight_map.values())))
    faults = [f"{shard}: not a plain file name" for shard in shards if not _is_plain(shard)]
    missing = [shard for shard in shards if not (folder / shard).is_file()] if not faults else []
    faults += [f"{shard}: listed in the index, missing from the folder" for shard in missing]
    present = {path.name for path in folder.glob("*.safetensors") if SHARD_NAME.match(path.name)}
    faults += [f"{shard}: in the folder, not in the index" for shard in present - set(shards)]
    tensors: dict[str, SafeTensor] = {}
    for shard in shards if not faults else ():
        for name, tensor in read_safetensors(folder / shard).items():
            if weight_map.get(name) != shard:
                listed = weight_map.get(name, "nowhere")
                faults.append(f"{name}: found in {shard}, the index says {listed}")
            tensors[name] = tensor
    if not faults:
        faults = [
            f"{name}: not in {weight_map[name]}" for name in weight_map.keys() - tensors.keys()
        ]
    if faults:
        raise ValueError(
            f"{folder}: the shards do not match {INDEX}:\n  " + "\n  ".join(sorted(faults))
        )
    return tensors


def _is_plain(name: str) -> bool:
    """A name that cannot lead out of its folder."""
    return (
        name.endswith(".safetensors") and pathlib.PurePath(name).name == name and "\\" not in name
    )
