"""Safetensors files made by hand: every dtype without torch, and every way an index can lie."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import LLAMA, random_tensors, write_folder, write_shards

from jaxserve.models.loaders.safetensors_file import read_folder, read_safetensors

VALUES = {
    "F32": np.array([1.5, -0.0, 3e38], np.float32),
    "F16": np.array([1.5, -2.0, 65504.0], np.float16),
    "BF16": np.array([1.5, -2.0, 3e38], ml_dtypes.bfloat16),
    "F8_E4M3": np.array([1.5, -2.0, 448.0], ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.array([1.5, -2.0, 57344.0], ml_dtypes.float8_e5m2),
    "I8": np.array([-128, 0, 127], np.int8),
    "U8": np.array([0, 1, 255], np.uint8),
    "BOOL": np.array([True, False, True]),
    "I64": np.array([-(2**63), 0, 2**63 - 1], np.int64),
}


def write_file(path, entries):
    """entries: (name, dtype, shape, bytes), written as the format says: length, JSON, data."""
    header, data = {}, b""
    for name, dtype, shape, content in entries:
        end = len(data) + len(content)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), end]}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("dtype", VALUES)
def test_every_dtype_arrives_with_its_values(tmp_path, dtype):
    """B064: bfloat16 and float8 have no name in numpy alone."""
    want = VALUES[dtype]
    got = read_safetensors(write_file(tmp_path / "a", [("x", dtype, [3], want.tobytes())]))["x"]
    assert got.array().dtype == want.dtype
    np.testing.assert_array_equal(got.array(), want)


def test_empty_and_scalar_tensors_keep_their_shapes(tmp_path):
    scalar = np.float32(2.5).tobytes()
    path = write_file(tmp_path / "a", [("none", "F32", [0], b""), ("one", "F32", [], scalar)])
    tensors = read_safetensors(path)
    assert tensors["none"].shape == (0,)
    assert tensors["one"].shape == () and tensors["one"].array() == 2.5


def test_an_unknown_dtype_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"F4|unknown variant"):
        read_safetensors(write_file(tmp_path / "a", [("x", "F4X", [2], b"\0")]))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_broken_headers_are_value_errors(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_safetensors(tmp_path / "a")


@pytest.mark.parametrize(
    ("shape", "content"), [([4], b"\0" * 8), ([2**62, 2**62], b""), ([-1], b"")]
)
def test_shapes_that_lie_are_value_errors(tmp_path, shape, content):
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_safetensors(write_file(tmp_path / "a", [("x", "F32", shape, content)]))


# ---- folders ------------------------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path / "model", LLAMA, random_tensors(LLAMA), cut=7)


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_shards_hold_what_one_file_would(shards):
    tensors, found = random_tensors(LLAMA), read_folder(shards)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name].array(), array)


def test_a_missing_shard_is_named(shards):
    (shards / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002"):
        read_folder(shards)


def test_a_shard_that_the_index_does_not_know_is_named(shards):
    extra = shards / "model-00003-of-00003.safetensors"
    extra.write_bytes((shards / "model-00002-of-00002.safetensors").read_bytes())
    with pytest.raises(ValueError, match="model-00003-of-00003"):
        read_folder(shards)


@pytest.mark.parametrize(
    "name",
    ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors", "..\\c.safetensors", ".."],
)
def test_an_index_cannot_lead_out_of_its_folder(shards, name):
    edit_index(shards, lambda weights: weights.update({"lm_head.weight": name}))
    with pytest.raises(ValueError, match="not a plain file name"):
        read_folder(shards)


def test_tensors_must_be_where_the_index_says(shards):
    def swap(weights):
        weights["lm_head.weight"] = "model-00002-of-00002.safetensors"
        weights["ghost.weight"] = "model-00001-of-00002.safetensors"
        del weights["model.norm.weight"]

    edit_index(shards, swap)
    with pytest.raises(ValueError, match="index") as caught:
        read_folder(shards)
    message = str(caught.value)
    assert "lm_head.weight" in message and "model.norm.weight" in message


def test_a_tensor_in_two_shards_is_named(shards):
    first, second = sorted(shards.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        read_folder(shards)


def test_folders_without_weights_or_with_too_many_say_so(tmp_path):
    with pytest.raises(ValueError, match=r"no \.safetensors"):
        read_folder(tmp_path)
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    with pytest.raises(ValueError, match="several"):
        read_folder(tmp_path)
