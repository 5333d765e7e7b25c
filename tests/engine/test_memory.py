"""How many pages: what the slots can use, within the bound."""

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.memory import count_pages


@pytest.mark.parametrize(
    ("gib", "pages"), [(None, 41), (float("inf"), 41), (1e308, 41), (0.02, 20)]
)
def test_pages(gib, pages):
    config = EngineConfig(num_slots=4, max_model_len=160, kv_memory_gib=gib)
    assert count_pages(config, 1 << 20, free=1 << 40, platform="gpu") == pages
