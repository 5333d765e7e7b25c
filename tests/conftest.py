"""What every test shares: strict jax, and the large reference files when they are there."""

import pathlib

import jax
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = pathlib.Path(__file__).resolve().parent / "data"

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
    """Long tests first: at the end of a run no worker waits for another's."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def shared() -> pathlib.Path:
    """Folder of the large references (goldens, traces, templates) beside a developer's checkout."""
    folder = ROOT.parent / "shared"
    if not (folder / "goldens").is_dir():
        pytest.skip("the large reference files (../shared) are not on this machine")
    return folder
