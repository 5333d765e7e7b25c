"""The soak tool for some seconds, over the real engine with a pretended device."""

import argparse
import asyncio
import importlib.util
import pathlib

from test_engine_end_to_end import real_engine

from tests.server.conftest import serving

TOOL = pathlib.Path(__file__).resolve().parents[2] / "tools" / "soak.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("soak", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bad_company_leaves_no_trace(capsys):
    options = argparse.Namespace(
        minutes=3 / 60, clients=8, abort_rate=0.3, bad_rate=0.2, slow_rate=0.1, seed=1,
        max_slope_mb_per_min=float("inf"), grammar_rate=0,
    )  # fmt: skip
    with real_engine(max_model_len=4096, num_pages=4200, token_budget=512) as (engine, runner):
        runner.pause = 0.002
        with serving(engine) as running:
            status = asyncio.run(load_tool().soak(running.url, options))
    assert status == 0, capsys.readouterr().out


def test_the_tool_notices_a_leak(capsys):
    """A server that forgets to free a page must not pass."""
    options = argparse.Namespace(
        minutes=1 / 60, clients=2, abort_rate=0, bad_rate=0, slow_rate=0, seed=1,
        max_slope_mb_per_min=float("inf"), grammar_rate=0,
    )  # fmt: skip
    tool = load_tool()
    tool.IDLE_S = 0.2
    with real_engine(max_model_len=4096, num_pages=4200, token_budget=512) as (engine, _):
        stats = engine.stats
        engine.stats = lambda: _with_a_page_taken(stats())
        with serving(engine) as running:
            status = asyncio.run(tool.soak(running.url, options))
    assert status == 1 and "not idle" in capsys.readouterr().out


def _with_a_page_taken(stats):
    stats.pages_free -= 1
    return stats
