"""jaxserve as another process: started by its command line, awaited, and ended."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence

_POLL_S = 0.1


def flags_of(*configs) -> list[str]:
    """Command line flags that make these configs: one for each field that is not at its default."""
    flags = []
    for config in configs:
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if value != field.default:
                text = str(value).lower() if isinstance(value, bool) else value
                flags.append(f"--{field.name}={text}")
    return flags


def command(verb: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "jaxserve.main", verb, *arguments]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(arguments: Sequence[str], ready_url: str, timeout_s: float = 600.0) -> Iterator[None]:
    """Runs a server command for the length of the block. ValueError when it ends or stays silent
    before ready_url answers; its last words are in the message."""
    with tempfile.TemporaryFile("w+") as words:
        child = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=words)
        try:
            try:
                await_ready(child, ready_url, timeout_s)
            except ValueError as error:
                words.seek(0)
                raise ValueError(f"{error}: {words.read()[-500:]}") from None
            yield
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def await_ready(child: subprocess.Popen, url: str, timeout_s: float) -> None:
    """Returns once the URL answers. ValueError when the child ends first, or time does."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if child.poll() is not None:
            raise ValueError("the server ended")
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(_POLL_S)
    raise ValueError(f"the server was not ready after {timeout_s:.0f} s")


def anonymous_bytes(pid: int | str = "self") -> int | None:
    """Memory of a process that is its own, files it maps left out; None where /proc is not."""
    path = pathlib.Path(f"/proc/{pid}/status")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return None
