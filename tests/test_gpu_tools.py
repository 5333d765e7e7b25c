"""The tools for a machine with a GPU, in small on this one: they must run when one is lent."""

import pathlib
import subprocess
import sys

import pytest

from tools import check_gpu

pytestmark = pytest.mark.slow
TOOLS = pathlib.Path(__file__).resolve().parent.parent / "tools"


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


def test_check_gpu_times_decode_beside_jax():
    """Its checks of results are test_attention_gpu.py's."""
    course = check_gpu.DRY
    for measure in (check_gpu.time_step, check_gpu.time_jax_paged):
        assert measure(course, course.shapes[0], course.decode) > 0
