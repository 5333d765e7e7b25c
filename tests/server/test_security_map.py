"""SECURITY.md names tests; they must exist, or the page promises what nobody checks."""

import itertools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))
PROMISES = [*(f"S{n}" for n in range(1, 23)), *(f"R{n}" for n in range(1, 21))]


def test_every_promise_has_a_row_that_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "`tests/" in line]
    found = itertools.chain.from_iterable(re.findall(r"\b[SR]\d+\b", row) for row in rows)
    assert set(PROMISES) <= set(found)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_named_tests_exist(file, name):
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
