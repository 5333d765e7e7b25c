"""The tools for a machine with a GPU, in small on this one: they must run when one is lent."""

import io
import pathlib
import subprocess
import sys

import pytest
from rich.console import Console

from tools import bench_gpu, check_gpu

TOOLS = pathlib.Path(__file__).resolve().parent.parent / "tools"


@pytest.mark.slow
def test_bench_gpu_measures_every_part():
    arguments = "--shapes tiny --batches 2 --context 16 --prompt 24 --budget 8 --requests 4"
    done = subprocess.run(
        [sys.executable, str(TOOLS / "bench_gpu.py"), *arguments.split()],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for part in ("ready in", "decode   2 rows", "prefill 24 tokens", "skewed: 4 requests"):
        assert part in done.stdout


@pytest.mark.slow
def test_check_gpu_times_decode_beside_jax():
    """Its checks of results are test_attention_gpu.py's."""
    course = check_gpu.DRY
    shape = course.shapes[0]
    assert check_gpu.time_step(course, *course.kernels, shape, course.decode) > 0
    assert check_gpu.time_jax_paged(course, shape, course.decode) > 0


def test_a_part_that_fails_is_told_and_the_rest_goes_on():
    console = Console(width=200, record=True, file=io.StringIO())
    course = bench_gpu.Course(60.0, console)

    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory\nand a long story")

    course.line("decode 256 rows", fails)
    course.line("prefill", lambda: "prefill 8 tokens: 1 ms")
    lines = console.export_text().splitlines()
    assert lines[0] == "decode 256 rows: FAILED, RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert lines[1:] == ["prefill 8 tokens: 1 ms"] and not course.good


def test_nothing_begins_without_time():
    console = Console(width=200, record=True, file=io.StringIO())
    course = bench_gpu.Course(0.0, console)
    course.line("prefill", lambda: pytest.fail("begun"))
    assert console.export_text() == "prefill: no time left\n" and course.good


def test_a_reference_that_fails_is_told_and_the_rest_goes_on(capsys, monkeypatch):
    def fails(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(check_gpu, "oracle", fails)
    assert not check_gpu.check_all(check_gpu.DRY, stop=float("inf"))
    printed = capsys.readouterr().out
    told = printed.count("reference FAILED: RuntimeError: out of memory")
    assert told == len(check_gpu.DRY.shapes) + 5


def test_checks_stop_when_time_is_up(capsys):
    assert not check_gpu.check_all(check_gpu.DRY, stop=0.0)
    printed = capsys.readouterr().out
    assert printed.count("not checked: no time left") == len(check_gpu.DRY.shapes) + 5
