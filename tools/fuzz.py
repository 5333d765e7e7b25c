"""Fuzzes what reads model files: out of any bytes may come a ValueError with a message, or a model.

    python tools/fuzz.py gguf -max_total_time=600

Coverage-guided, by atheris (pip install atheris); flags with one dash are libFuzzer's. What it
finds lies in crash-* files; a reduced one belongs into tests/data/hostile/TARGET. The suite damages
the files there for some seconds too, with hypothesis (tests/test_hostile_files.py).
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
from collections.abc import Callable

CORPUS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data" / "hostile"
CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a", "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ]},
    {"role": "tool", "content": "t", "tool_call_id": "call00000"},
    {"role": "user", "content": "u"},
]  # fmt: skip


def gguf(folder: pathlib.Path, data: bytes) -> None:
    from jaxserve.models.loaders.checkpoint import open_checkpoint
    from jaxserve.models.loaders.gguf_file import read_gguf
    from jaxserve.tokenizer import load

    path = _written(folder / "model.gguf", data)
    for tensor in read_gguf(path).tensors.values():
        tensor.array()
        tensor.sample()
    _tried(lambda: open_checkpoint(path))
    _used(load(path))


def safetensors(folder: pathlib.Path, data: bytes) -> None:
    from jaxserve.models.loaders.safetensors_file import read_safetensors

    for tensor in read_safetensors(_written(folder / "model.safetensors", data)).values():
        tensor.array().sum(dtype=None if tensor.array().dtype.kind != "V" else "float32")
        tensor.sample()


def tokenizer_json(folder: pathlib.Path, data: bytes) -> None:
    from jaxserve.tokenizer import load

    _written(folder / "tokenizer.json", data)
    _used(load(folder))


def sentencepiece(folder: pathlib.Path, data: bytes) -> None:
    from jaxserve.tokenizer import load

    _written(folder / "tokenizer.model", data)
    _used(load(folder))


def settings(folder: pathlib.Path, data: bytes) -> None:
    """tokenizer_config.json beside a sound tokenizer.json."""
    from jaxserve.tokenizer import load

    sound = (CORPUS / "tokenizer_json" / "byte_level.json").read_bytes()
    _written(folder / "tokenizer.json", sound)
    _written(folder / "tokenizer_config.json", data)
    _used(load(folder))


def config(folder: pathlib.Path, data: bytes) -> None:
    from jaxserve.models.loaders.checkpoint import read_config
    from jaxserve.models.loaders.safetensors_file import read_json

    read_config(read_json(_written(folder / "config.json", data)))


def template(folder: pathlib.Path, data: bytes) -> None:
    from jaxserve.tokenizer.chat import ChatTemplate

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    ChatTemplate(data.decode("utf-8", "replace"), ["<|end|>"]).render(CHAT, tools=tools)


TARGETS: dict[str, Callable[[pathlib.Path, bytes], None]] = {
    target.__name__: target
    for target in (gguf, safetensors, tokenizer_json, sentencepiece, settings, config, template)
}


def _written(path: pathlib.Path, data: bytes) -> pathlib.Path:
    path.write_bytes(data)
    return path


def _used(tokenizer) -> None:
    """What a server does with a tokenizer that loaded."""
    ids = tokenizer.encode("Hi <|end|> é \U0001f600")
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    tokenizer.decode(ids)
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat(CHAT)


def _tried(read: Callable[[], object]) -> None:
    """One of several readers of a file: a refusal by it does not end the others' turn."""
    try:
        read()
    except ValueError as refusal:
        assert str(refusal)


def attempt(target: str, data: bytes) -> str | None:
    """Runs a target on some bytes; the message of its refusal, None if it took them.

    Anything but a ValueError with a message is raised as an AssertionError.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            TARGETS[target](pathlib.Path(folder), data)
        except ValueError as refusal:
            assert str(refusal), "a refusal without a message"
            return str(refusal)
        except BaseException as error:  # panics of libraries in Rust are no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise AssertionError(f"{target}: {type(error).__name__}: {error}") from error
    return None


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python tools/fuzz.py {'|'.join(TARGETS)} [libFuzzer's flags]")
    import atheris

    target = sys.argv.pop(1)
    with atheris.instrument_imports(include=["jaxserve"]):
        attempt(target, b"")  # its modules are loaded now, and watched
    found = tempfile.mkdtemp(prefix=f"fuzz-{target}-")
    print(f"inputs that reach new code are kept in {found}")
    atheris.Setup([*sys.argv, found, str(CORPUS / target)], lambda data: attempt(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
