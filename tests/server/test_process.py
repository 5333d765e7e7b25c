"""jaxserve as an operator meets it: a process that is killed, whose disk is full, whose cache is
damaged, that is asked to stop."""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import threading

import httpx
import pytest
from fake_engine import EOS, TEMPLATE, write_byte_tokenizer

from jaxserve.bench import process
from tests.conftest import DATA

# Programs that need not be fast are compiled in a third of the time.
ENVIRONMENT = os.environ | {
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
}
FULL = pathlib.Path("/dev/full")  # every write to it fails as on a full disk
ASKED = {"prompt": "the same", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """A tiny model and an empty cache of programs."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(DATA / "models" / "llama_llama3" / "model.safetensors", folder)
    config = json.loads((DATA / "models" / "llama_llama3" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    write_byte_tokenizer(folder, TEMPLATE)
    return [
        f"--model={folder}", f"--compile_cache={folder / 'programs'}", "--num_slots=2",
        "--token_budget=16", "--num_pages=65", "--max_model_len=512", "--deterministic",
    ]  # fmt: skip


@contextlib.contextmanager
def served(flags, log):
    """(process, base URL) of a server that is ready; its words go to the open file."""
    port = process.free_port()
    command = process.command("serve", f"--port={port}", *flags)
    child = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
    try:
        url = f"http://127.0.0.1:{port}"
        process.await_ready(child, url + "/ready", 600)
        yield child, url
    finally:
        child.kill()
        child.wait()


def listening(pid: int) -> list[tuple[str, int]]:
    """Where the process listens: (address, port), as Linux tells it."""
    proc = pathlib.Path(f"/proc/{pid}")
    links = (os.readlink(fd) for fd in (proc / "fd").iterdir())
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in (proc / "net" / table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in own:
                host, port = local.split(":")
                found.append((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def garble(folder: pathlib.Path) -> None:
    """Cuts or damages the smaller half of the files: what takes least to compile again."""
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    assert len(files) > 4
    draw = random.Random(1)
    for number, path in enumerate(files[: len(files) // 2]):
        content = bytearray(path.read_bytes())
        if number % 2:
            content = content[: len(content) // 2]
        else:
            for at in draw.choices(range(len(content)), k=100):
                content[at] ^= 0xFF
        path.write_bytes(content)


def test_killed_then_started_from_a_damaged_cache_on_a_full_disk(flags, tmp_path):
    """The clients of a killed server hear of it at once. The next one compiles what it cannot read,
    says nothing where nothing can be written, and gives the same answers; asked to stop, it ends
    what runs and exits with 0."""
    with (tmp_path / "log").open("wb") as log, served(flags, log) as (child, url):
        assert listening(child.pid) == [("127.0.0.1", int(url.rpartition(":")[2]))]
        first = httpx.post(url + "/v1/completions", json=ASKED, timeout=60).json()
        endless = ASKED | {"max_tokens": 400, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=endless, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            child.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)
    garble(pathlib.Path(flags[1].partition("=")[2]))
    if not FULL.exists():
        pytest.skip("no /dev/full on this system")
    with FULL.open("wb") as log, served([*flags, f"--decision_log={FULL}"], log) as (child, url):
        again = httpx.post(url + "/v1/completions", json=ASKED, timeout=60).json()
        assert again["choices"] == first["choices"]
        finished = []
        ask = lambda: httpx.post(url + "/v1/completions", json=ASKED | {"max_tokens": 150})
        asking = threading.Thread(target=lambda: finished.append(ask()))
        asking.start()
        while httpx.get(url + "/stats").json()["engine"]["running"] == 0 and asking.is_alive():
            pass
        child.send_signal(signal.SIGTERM)
        asking.join(60)
        assert finished[0].json()["usage"]["completion_tokens"] == 150
        assert child.wait(60) == 0
