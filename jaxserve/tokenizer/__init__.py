"""Text and ids: `load` gives the Tokenizer of a model folder or file."""

from __future__ import annotations

import pathlib

from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.sandbox import TemplateError
from jaxserve.tokenizer.stream import TextStream

__all__ = ["TemplateError", "TextStream", "Tokenizer", "load"]


def load(path: pathlib.Path, override: pathlib.Path | None = None) -> Tokenizer:
    """The tokenizer of a model: a .gguf file, or a folder with tokenizer.json or tokenizer.model.

    override: another such file or folder to use in place of the model's own. Raises ValueError with
    the remedy when there is none or it is not understood.
    """
    path = pathlib.Path(override or path)
    if path.suffix == ".gguf":
        from jaxserve.tokenizer.gguf import from_gguf

        return from_gguf(path)
    raise ValueError(f"{path}: no tokenizer here")
