"""The kernels through the real TPU and GPU compilers, no chip needed. Skipped without the extras.

One chip a process (libtpu allows one), a head shape each; `tools/deviceless.py` does any other.
"""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TOOL = ROOT / "tools" / "deviceless.py"
TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='needs pip install -e ".[tpu]"'
)
CUDA = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason='needs pip install -e ".[cuda-deviceless]"',
)


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(TOOL), "compile", *arguments], capture_output=True, text=True
    )


def compile_here(*arguments):
    """-> what the tool prints, after checking that the cache is updated in place."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"cache updated in place +yes", done.stdout), done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "shape", "page_size"),
    [
        pytest.param("v5e", "llama-3-8b", 16, marks=TPU),
        pytest.param("v6e", "gpt-oss-20b", 128, marks=TPU),
        pytest.param("7x", "smollm2", 16, marks=TPU),
        pytest.param("h200", "gemma-2-9b", 16, marks=CUDA),
        pytest.param("h200", "phi-3-mini", 16, marks=CUDA),
    ],
)
def test_compiles(topology, shape, page_size):
    printed = compile_here(f"--topology={topology}", f"--shape={shape}", f"--page_size={page_size}")
    if topology != "h200":
        decode = printed.split("_decode", 1)[1].split("_mixed", 1)[0]
        assert "MXU" in decode
        assert "spills" not in decode and "fills" not in decode


@TPU
@pytest.mark.slow
def test_a_whole_step_updates_the_cache_in_place():
    compile_here("--topology=v6e", "--step", "--config=smollm2-135m-cpu", "--page_size=16")


def test_what_is_missing_is_said_in_one_line():
    known = "h200" if importlib.util.find_spec("jax_cuda13_plugin") is None else None
    known = known or ("v6e" if importlib.util.find_spec("libtpu") is None else "v99z:2x2")
    done = run(f"--topology={known}")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    if known != "v99z:2x2":
        assert "pip install" in lines[0]


@pytest.mark.parametrize(
    ("argument", "words"), [("--shape=nobody", "llama-3-8b"), ("--config=nobody", "llama-3.1-8b")]
)
def test_unknown_names_list_the_known(argument, words):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip('needs pip install -e ".[tpu]"')
    step = ["--step"] if "config" in argument else []
    done = run("--topology=v6e", argument, *step)
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr
