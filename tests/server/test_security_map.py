"""SECURITY.md names tests; they must exist, or the page promises what nobody checks."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())))


def test_the_page_names_tests():
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_named_tests_exist(file, name):
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
