"""GGUF files: hostile headers cost nothing, every block type dequantises to known values."""

import resource
import struct
import time

import gguf
import numpy as np
import pytest
from tiny_checkpoints import LLAMA, random_tensors, write_gguf

from jaxserve.models.loaders.gguf_file import TENSOR_TYPES, read_gguf

STRING, ARRAY, U32, U8 = 8, 9, 4, 0


def text(value):
    return struct.pack("<Q", len(value)) + value


def entry(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def tensor(name=b"x", dims=(32,), kind=0, offset=0):
    shape = b"".join(struct.pack("<Q", n) for n in dims)
    return text(name) + struct.pack("<I", len(dims)) + shape + struct.pack("<IQ", kind, offset)


def build(
    entries=(), tensors=(), *, data=bytes(256), magic=b"GGUF", version=3, counts=None, align=32
):
    count = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, *count) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


def write(path, content):
    path.write_bytes(content)
    return path


ALIGN = lambda value: entry(b"general.alignment", U32, struct.pack("<I", value))
NAME = entry(b"general.name", STRING, text(b"tiny"))
HOSTILE = {
    "empty": b"",
    "magic": build(magic=b"GGML"),
    "big-endian magic": build(magic=b"FUGG"),
    "big-endian version": build(version=0x03000000),
    "version 1": build(version=1),
    "version 9": build(version=9),
    "tensor count": build(counts=(2**63, 0)),
    "metadata count": build(counts=(0, 2**63)),
    "both counts": build(counts=(2**64 - 1, 2**64 - 1)),
    "key length": build([struct.pack("<Q", 2**62)], counts=(0, 1)),
    "long key": build([entry(b"k" * 70000, U8, b"\0")]),
    "string length": build([entry(b"k", STRING, struct.pack("<Q", 2**62))]),
    "bytes array length": build([entry(b"k", ARRAY, struct.pack("<IQ", U8, 2**60))]),
    "string array length": build([entry(b"k", ARRAY, struct.pack("<IQ", STRING, 2**60))]),
    "array of arrays": build([entry(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))]),
    "array of unknown": build([entry(b"k", ARRAY, struct.pack("<IQ", 77, 1))]),
    "value type": build([entry(b"k", 77, b"\0")]),
    "key not UTF-8": build([entry(b"\xff\xfe", U8, b"\0")]),
    "duplicate key": build([NAME, NAME]),
    "alignment 0": build([ALIGN(0)]),
    "alignment 3": build([ALIGN(3)]),
    "alignment as text": build([entry(b"general.alignment", STRING, text(b"32"))]),
    "dims overflow": build(tensors=[tensor(dims=(2**32, 2**32, 2**32, 32))]),
    "dims wrap to small": build(tensors=[tensor(dims=(2**62, 4))]),
    "dims too many": build(tensors=[tensor(dims=(1,) * 5)]),
    "dims none": build(tensors=[tensor(dims=())]),
    "dims zero": build(tensors=[tensor(dims=(0, 4))]),
    "dims huge count": build([], [text(b"x") + struct.pack("<I", 2**31) + bytes(40)]),
    "partial block": build(tensors=[tensor(dims=(33,), kind=8)]),
    "tensor type": build(tensors=[tensor(kind=99)]),
    "offset beyond the end": build(tensors=[tensor(offset=1 << 20)]),
    "offset wraps": build(tensors=[tensor(offset=2**64 - 32)]),
    "offset unaligned": build(tensors=[tensor(offset=5)]),
    "tensors overlap": build(tensors=[tensor(b"a"), tensor(b"b", offset=32)]),
    "duplicate tensor": build(tensors=[tensor(), tensor(offset=128)]),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_headers_that_lie_are_refused_at_once(tmp_path, content):
    """B066: a ValueError naming the file, within a second and without memory."""
    path = write(tmp_path / "x.gguf", content)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(ValueError, match=r"x\.gguf"):
        read_gguf(path)
    assert time.thread_time() - start < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_the_unspoilt_header_is_read(tmp_path):
    """What the cases above mutate is itself accepted, so each is refused for its own fault."""
    path = write(tmp_path / "x.gguf", build([NAME, ALIGN(64)], [tensor()], align=64))
    file = read_gguf(path)
    assert file.metadata["general.name"] == "tiny" and file.tensors["x"].shape == (32,)


def test_truncation_anywhere_is_refused(tmp_path):
    whole = write_gguf(tmp_path / "whole.gguf", LLAMA, random_tensors(LLAMA)).read_bytes()
    for length in range(0, len(whole) - 64, 64 * 37):
        with pytest.raises(ValueError, match="cut"):
            read_gguf(write(tmp_path / "cut.gguf", whole[:length]))
    for length in range(0, 4096, 64):
        with pytest.raises(ValueError, match="cut"):
            read_gguf(write(tmp_path / "cut.gguf", whole[:length]))


def test_unsupported_types_are_named(tmp_path):
    path = write(tmp_path / "x.gguf", build(tensors=[tensor(dims=(256,), kind=16)]))
    with pytest.raises(ValueError, match="IQ2_XXS"):
        read_gguf(path)


def test_metadata_values_of_every_type(tmp_path):
    numbers = {
        0: ("<B", 255), 1: ("<b", -128), 2: ("<H", 65535), 3: ("<h", -5), 4: ("<I", 2**32 - 1),
        5: ("<i", -7), 6: ("<f", 0.5), 7: ("<?", True), 10: ("<Q", 2**64 - 1), 11: ("<q", -(2**63)),
        12: ("<d", 0.1),
    }  # fmt: skip
    entries = [
        entry(b"k%d" % kind, kind, struct.pack(form, value))
        for kind, (form, value) in numbers.items()
    ]
    words = struct.pack("<IQ", STRING, 2) + text("naïve".encode()) + text(b"")
    entries.append(entry(b"words", ARRAY, words))
    entries.append(entry(b"ints", ARRAY, struct.pack("<IQ3i", 5, 3, 1, -2, 3)))
    metadata = read_gguf(write(tmp_path / "x.gguf", build(entries))).metadata
    for kind, (_, value) in numbers.items():
        assert metadata[f"k{kind}"] == value
        assert type(metadata[f"k{kind}"]) is type(value)
    assert metadata["words"] == ["naïve", ""]
    assert metadata["ints"].tolist() == [1, -2, 3]


# Types that the gguf package can also write: rounding is bounded by half a step of each block.
STEPS = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "F16": 2048, "BF16": 256}


@pytest.mark.parametrize("kind", STEPS)
def test_simple_types_come_back_within_half_a_step(tmp_path, kind):
    values = np.random.default_rng(0).uniform(-1, 1, (6, 64)).astype(np.float32)
    number = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", gguf.quants.quantize(values, number), raw_dtype=number)
    for stage in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{stage}_to_file")()
    writer.close()
    found = read_gguf(tmp_path / "x.gguf").tensors["x"]
    assert found.type_name == kind and found.shape == values.shape
    blocks = values.reshape(6, -1, 32)
    reach = np.abs(blocks).max(-1) if kind[-1] != "1" else np.ptp(blocks, -1)
    error = np.abs(found.float32() - values).reshape(blocks.shape).max(-1)
    assert (error <= 1.05 * reach / STEPS[kind]).all()
    assert error.max() > 0


def k_block(kind, d, dmin, scale, minimum, code):
    """One super-block in which all groups have the same scale, minimum and code; the value of each
    element is then d * scale * code - dmin * minimum (Q6_K: d * scale * (code - 32))."""
    half = np.array([d, dmin], np.float16).tobytes()
    if kind == "Q6_K":
        low, high = code & 15, code >> 4
        body = bytes([low | low << 4] * 128) + bytes([high * 0b01010101] * 64)
        return body + np.full(16, scale, np.int8).tobytes() + half[:2]
    assert scale < 16 and minimum < 16  # then the upper two bits of the later groups are zero
    scales = bytes([scale] * 4 + [minimum] * 4 + [scale | minimum << 4] * 4)
    low, high = code & 15, code >> 4
    nibbles = bytes([low | low << 4] * 128)
    return half + scales + (bytes([255 * high] * 32) if kind == "Q5_K" else b"") + nibbles


@pytest.mark.parametrize(
    ("kind", "code", "value"),
    [
        ("Q4_K", 11, 0.5 * 3 * 11 - 0.25 * 5),
        ("Q5_K", 27, 0.5 * 3 * 27 - 0.25 * 5),
        ("Q5_K", 11, 0.5 * 3 * 11 - 0.25 * 5),
        ("Q6_K", 45, 0.5 * 3 * (45 - 32)),
        ("Q6_K", 7, 0.5 * 3 * (7 - 32)),
    ],
)
def test_super_blocks_by_their_formula(tmp_path, kind, code, value):
    block = k_block(kind, 0.5, 0.25, 3, 5, code)
    number = {name: kind for kind, (name, *_) in TENSOR_TYPES.items()}[kind]
    path = write(tmp_path / "x.gguf", build(tensors=[tensor(dims=(256,), kind=number)], data=block))
    np.testing.assert_array_equal(read_gguf(path).tensors["x"].float32(), np.full(256, value, "f4"))


def test_reading_a_vocabulary_needs_no_jax():
    import subprocess
    import sys

    code = "import sys, jaxserve.models.loaders.gguf_file; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
