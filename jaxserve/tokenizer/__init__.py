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
    path = pathlib.Path(override or path)
    try:
        return _load(path)
    except ValueError:
        raise
    except BaseException as error:  # files are hostile input: libraries raise bare Exception or,
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # in Rust, panic
        raise ValueError(
            f"{path}: its tokenizer is damaged ({type(error).__name__}: {error}); name another "
            "with --tokenizer"
        ) from error


def _load(path: pathlib.Path) -> Tokenizer:
    from jaxserve.tokenizer import folder, gguf, hf, sentencepiece

    if path.suffix == ".gguf":
        return gguf.from_gguf(path)
    place = path if path.is_dir() else path.parent
    names = ("tokenizer.json", "tokenizer.model") if path.is_dir() else (path.name,)
    file = next((place / name for name in names if (place / name).is_file()), path)
    if file.name == "tokenizer.json" and file.is_file():
        return hf.from_folder(folder.TokenizerFolder(place))
    if file.suffix == ".model" and file.is_file():
        return sentencepiece.from_model_file(file, folder.TokenizerFolder(place))
    raise ValueError(
        f"{path}: no tokenizer here (tokenizer.json, tokenizer.model or a .gguf file); name one "
        "with --tokenizer"
    )
