"""Damaged model files: a ValueError with a message or a model, in bounded time and memory.

The seeds in data/hostile are sound files; hypothesis damages them anew in every run. For longer
hunts there is tools/fuzz.py, which has the targets.
"""

import contextlib
import copy
import json
import pathlib
import resource
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.tokenizer.vocabulary import Vocabulary
from tools.fuzz import CORPUS, TARGETS, attempt

ROOM_BYTES = 1 << 30  # that a load may ask for beyond what the process has
LIMIT_S = 20  # of processor time, for all of a test's files
NUMBERS = [0, 1, 2**7, 2**8 - 1, 2**15, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
WEIRD = [
    None, True, -1, 0, 7, 2**31, 2**63, 2**64, 1e308, "", "a", "\u2581", "x" * 3000, "\ud800", "{{",
    [], [[]], [None], {}, {"a": None}, {"type": "Sequence"}, ["a", "b", "c"],
]  # fmt: skip


def seeds(target):
    return {path.name: path.read_bytes() for path in sorted((CORPUS / target).iterdir())}


@contextlib.contextmanager
def bounded():
    """At most ROOM_BYTES more memory and LIMIT_S seconds of work."""

    def stop(*_):
        raise TimeoutError(f"still busy after {LIMIT_S} s")

    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    handler = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def damaged_bytes(contents):
    """A file with some bytes flipped, overwritten by numbers, cut, moved or taken from another."""

    @st.composite
    def build(draw):
        data = bytearray(draw(st.sampled_from(contents)))
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, max(len(data) - 1, 0)))
            size = draw(st.sampled_from([1, 2, 4, 8, 16, 64, 300]))
            match draw(st.sampled_from(["flip", "number", "cut", "end", "repeat", "splice"])):
                case "flip":
                    data[at : at + 1] = bytes([draw(st.integers(0, 255))])
                case "number":
                    width = draw(st.sampled_from([4, 8]))
                    number = draw(st.sampled_from(NUMBERS)) % 2 ** (8 * width)
                    data[at : at + width] = number.to_bytes(width, "little")
                case "cut":
                    del data[at : at + size]
                case "end":
                    del data[at:]
                case "repeat":
                    data[at:at] = data[at : at + size] * draw(st.sampled_from([1, 3, 50]))
                case "splice":
                    other = draw(st.sampled_from(contents))
                    start = draw(st.integers(0, len(other)))
                    data[at : at + size] = other[start : start + size]
        return bytes(data)

    return build()


def damaged_json(contents):
    """A JSON file with some of its values replaced, taken away, or under another name."""

    @st.composite
    def build(draw):
        value = json.loads(draw(st.sampled_from(contents)))
        for _ in range(draw(st.integers(1, 3))):
            holders = [each for each in walk(value) if each]
            if not holders:
                break
            holder = draw(st.sampled_from(holders))
            key = draw(
                st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder)))
            )
            match draw(st.sampled_from(["replace", "remove", "rename"])):
                case "remove":
                    del holder[key]
                case "rename" if isinstance(holder, dict):
                    holder[draw(st.sampled_from(["", "type", "vocab", "\u2581"]))] = holder.pop(key)
                case _:
                    holder[key] = copy.deepcopy(draw(st.sampled_from(WEIRD)))
        return json.dumps(value).encode()

    return build()


def walk(value):
    """Every list and object in a JSON value."""
    if isinstance(value, dict | list):
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from walk(child)


def damaged(target):
    contents = list(seeds(target).values())
    if target in ("tokenizer_json", "settings", "config"):
        return damaged_json(contents) | damaged_bytes(contents)
    if target == "safetensors":
        headers = [content[8 : 8 + int.from_bytes(content[:8], "little")] for content in contents]
        with_length = lambda header: len(header).to_bytes(8, "little") + header + bytes(64)
        return damaged_json(headers).map(with_length) | damaged_bytes(contents)
    return damaged_bytes(contents)


@pytest.mark.parametrize("target", TARGETS)
def test_the_seeds_are_sound(target):
    for name, content in seeds(target).items():
        assert attempt(target, content) is None, name
        assert attempt(target, b"") is not None or target == "template"


@pytest.mark.parametrize("target", TARGETS)
def test_damaged_files_are_refused_or_read(target):
    @settings(
        max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(data=damaged(target))
    def run(data):
        attempt(target, data)

    with bounded():
        run()


def tokenizer_with(change):
    value = json.loads(seeds("tokenizer_json")["byte_level.json"])
    change(value)
    return json.dumps(value).encode()


def without_special(value):
    value["post_processor"]["special_tokens"] = {}


def beyond_the_vocabulary(value):
    value["post_processor"]["special_tokens"]["<|end|>"]["ids"] = [10**6]


def unknown_unknown(value):
    value["model"]["unk_token"] = "missing"


@pytest.mark.parametrize("change", [without_special, beyond_the_vocabulary, unknown_unknown])
def test_faults_that_once_showed_late_or_as_a_panic(change):
    assert attempt("tokenizer_json", tokenizer_with(change))


def test_endless_tokens_cost_no_endless_work():
    with bounded(), pytest.raises(ValueError, match="too many characters"):
        Vocabulary(["a" * 200_000, "b"]).scored_merges([0.0, 0.0])
