"""Text and ids: `load` gives the Tokenizer of a model folder or file."""

from __future__ import annotations

import pathlib

from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.sandbox import TemplateError
from jaxserve.tokenizer.stream import TextStream

__all__ = ["TemplateError", "TextStream", "Tokenizer", "load"]


def load(path: pathlib.Path, override: pathlib.Path | None = None) -> Tokenizer:
    """The tokenizer of a model: a .gguf file, or a folder with tokenizer.json or tokenizer.model.

    override: another such file or folder, used in place of the model's own. Raises ValueError with
    the remedy when there is none, or when it holds something we do not understand.
    """
    from jaxserve.tokenizer import folder, gguf, hf, sentencepiece

    path = pathlib.Path(override or path)
    if path.suffix == ".gguf":
        return gguf.from_gguf(path)
    place = path if path.is_dir() else path.parent
    if path.is_dir():
        path = next(
            (p for p in (path / "tokenizer.json", path / "tokenizer.model") if p.is_file()), path
        )
    if path.is_file() and path.name == "tokenizer.json":
        return hf.from_folder(folder.TokenizerFolder(place))
    if path.is_file() and path.suffix == ".model":
        return sentencepiece.from_model_file(path, folder.TokenizerFolder(place))
    raise ValueError(
        f"{path}: no tokenizer here (tokenizer.json, tokenizer.model or a .gguf file); name one "
        "with --tokenizer"
    )
