"""Kernels and whole steps through the real TPU and GPU compilers, no chip needed.

Skipped without the extras. A process compiles for one chip, several may at once.
`tools/bench_attention.py` keeps the cycles of every shape as tuned data, which
test_attention_sizes.py holds to their goals.
"""

import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

from jaxserve.pallas_kernels.ragged_paged_attention import shapes
from tools import machine_code

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
        [sys.executable, str(TOOL), "compile", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
    )


def compile_here(*arguments, count=1):
    """-> what the tool prints, after checking that each cache is updated in place."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.findall(r"cache updated in place +(\w+)", done.stdout) == ["yes"] * count, done.stdout
    return done.stdout


def decode_loops(printed):
    """The text of each decode kernel's loops."""
    return re.findall(r"_decode\S*: loops.*?\n\n", printed, re.DOTALL)


@TPU
def test_llama_on_v6e_decodes_in_registers():
    (decode,) = decode_loops(compile_here("--topology=v6e", "--shape=llama-3-8b"))
    assert "MXU" in decode
    assert "spills" not in decode and "fills" not in decode


@TPU
def test_a_whole_step_on_v5e():
    """SmolLM2: 9 query heads, an embedding that is the head too and whose rows a TPU would turn."""
    step = ("--step", "--config=smollm2-135m-cpu", "--tokens=16")
    printed = compile_here("--topology=v5e", *step)
    assert re.search(r"every weight read once +yes", printed), printed
    temporary = re.search(r"temporary +([\d.]+) MB", printed)[1]
    assert float(temporary) < 8


@CUDA
@pytest.mark.parametrize("kernel", ["--kernel=triton", "--kernel=mosaic"])
def test_gemma_2_on_h200(kernel):
    compile_here("--topology=h200", "--shape=gemma-2-9b", kernel)


@CUDA
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "shape", "count"),
    [
        ("bfloat16", "all", len(shapes.SHAPES)),
        ("int8", "32/32/80", 1),
        ("float8_e4m3fn", "llama-3-8b", 1),
    ],
)
def test_mosaic_spills_no_register(kv_dtype, shape, count, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    printed = compile_here(
        "--topology=h200", "--kernel=mosaic", f"--shape={shape}", f"--kv_dtype={kv_dtype}",
        "--no_loops", count=count,
    )  # fmt: skip
    assert set(re.findall(r"(\d+) bytes spill stores", printed)) == {"0"}


@CUDA
@pytest.mark.slow
@pytest.mark.skipif(
    not machine_code.disassembler_found(), reason="needs pip install nvidia-cuda-nvdisasm"
)
@pytest.mark.parametrize(
    ("kv_dtype", "names"),
    [
        ("bfloat16", [shape.name for shape in shapes.SHAPES]),
        ("int8", ["llama-3-8b", "gemma-2-9b", "phi-3-mini"]),
    ],
)
def test_mosaic_decode_waits_for_memory(kv_dtype, names):
    """A multiprocessor has issued a block's instructions, of the warps that attend and of those
    that copy, before its share of an H200's 4.8 TB/s has brought the block's 64 tokens."""
    bytes_per_cycle = 4.8e12 / 132 / 1.98e9
    for name in names:
        printed = compile_here(
            "--topology=h200", "--kernel=mosaic", f"--shape={name}", f"--kv_dtype={kv_dtype}",
            "--page_size=64",
        )  # fmt: skip
        (decode,) = re.findall(r"_decode\S*: loops of the machine code.*?\n\n", printed, re.DOTALL)
        copying, attending = (int(n) for n in re.findall(r"(\d+) of \d+ instructions", decode))
        assert "tensor" in decode and "TMA" in decode and "spills" not in decode
        (shape,) = (shape for shape in shapes.SHAPES if shape.name == name)
        block_bytes = 64 * 2 * shape.E * (1 if kv_dtype == "int8" else 2)
        assert copying + attending < block_bytes / bytes_per_cycle


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("7x", marks=TPU),
        pytest.param("v6e", marks=TPU),
        pytest.param("v5e", marks=TPU),
        pytest.param("h200", marks=[CUDA, pytest.mark.slow]),
    ],
)
def test_every_shape_compiles(topology):
    arguments = (f"--topology={topology}", "--shape=all", "--page_size=128", "--no_loops")
    compile_here(*arguments, count=len(shapes.SHAPES))


@TPU
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e", "v6e", "7x"])
def test_every_shape_decodes_in_registers(topology):
    """Of today's kernel; test_attention_sizes.py holds what was counted last to the same."""
    printed = compile_here(
        f"--topology={topology}", "--shape=all", "--page_size=128", count=len(shapes.SHAPES)
    )
    loops = decode_loops(printed)
    assert len(loops) == len(shapes.SHAPES)
    for decode in loops:
        assert "spills" not in decode and "fills" not in decode


@pytest.mark.parametrize(
    ("topology", "arguments"),
    [
        # 16 of 32 layers: a v5e has 16 GB, which the weights of all would fill.
        pytest.param("v5e", ["--config=llama-3.1-8b-v6e", "--layers=16"], marks=TPU),
        pytest.param("v6e", ["--config=llama-3.1-8b-v6e"], marks=TPU),
        pytest.param("7x", ["--config=llama-3.1-8b-v6e"], marks=TPU),
        pytest.param("v6e", ["--config=smollm2-135m-cpu"], marks=TPU),
        pytest.param("7x", ["--config=smollm2-135m-cpu"], marks=TPU),
        pytest.param("h200", ["--config=llama-3.1-8b-h200"], marks=[CUDA, pytest.mark.slow]),
    ],
)
def test_whole_steps_read_every_weight_once(topology, arguments):
    printed = compile_here(f"--topology={topology}", "--step", *arguments)
    assert re.search(r"every weight read once +yes", printed), printed


def test_what_is_missing_is_said_in_one_line():
    known = "h200" if importlib.util.find_spec("jax_cuda13_plugin") is None else None
    known = known or ("v6e" if importlib.util.find_spec("libtpu") is None else "v99z:2x2")
    done = run(f"--topology={known}")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    if known != "v99z:2x2":
        assert "pip install" in lines[0]


@TPU
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape=nobody"], "llama-3-8b"),
        (["--step", "--config=nobody"], "llama-3.1-8b"),
        (["--step", "--config=llama-3.1-8b-v6e", "--num_pages=100000"], "RESOURCE_EXHAUSTED"),
    ],
)
def test_what_cannot_be_compiled_says_what_can(arguments, words):
    done = run("--topology=v6e", *arguments)
    assert done.returncode == 1
    assert words in done.stderr and "Traceback" not in done.stderr
