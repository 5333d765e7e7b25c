"""Tokenizers from the vocabularies inside GGUF files.

Three kinds exist for text decoders. "gpt2" is byte-level BPE with explicit merges, its
pre-tokenizer named by `tokenizer.ggml.pre`. "llama" is sentencepiece BPE, where the merges follow
from scores. "gemma4" spells words as sentencepiece does and lists its merges. All become
`tokenizers` objects.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.bytelevel import piece_bytes
from jaxserve.tokenizer.hf import FastEncoder
from jaxserve.tokenizer.pretokenizers import find_pre_tokenizer
from jaxserve.tokenizer.vocabulary import CONTROL, WORD_MARK, Merges, Vocabulary, words

# Control tokens that end a turn. A file names one end token; chat models have more, and without
# them a model talks on past its turn.
TURN_ENDS = {
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>",
    "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>", "<EOT>",
}  # fmt: skip


def from_gguf(path: pathlib.Path) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises ValueError naming what is missing or unknown."""
    from jaxserve.models.loaders.gguf_file import read_gguf

    try:
        return from_metadata(read_gguf(path).metadata)
    except KeyError as error:
        raise ValueError(
            f"{path}: no {error.args[0]} in its metadata; give the model's tokenizer folder with "
            "--tokenizer"
        ) from None


def from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `tokenizer.*` metadata describes. KeyError names a missing key."""
    kind = metadata["tokenizer.ggml.model"]
    build = {"gpt2": _byte_level, "llama": _scored, "gemma4": _listed}.get(kind)
    if build is None:
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; gpt2, llama and gemma4 are supported. Give the "
            "model's tokenizer folder with --tokenizer"
        )
    settings = _Settings(metadata)
    vocabulary = Vocabulary(
        metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type")
    )
    encoder, table, adds_bos = build(vocabulary, settings)
    bos_id, eos_id = settings.token_id("bos"), settings.token_id("eos")
    adds_bos = settings.get("add_bos_token", adds_bos) and bos_id is not None
    adds_eos = settings.get("add_eos_token", False) and eos_id is not None
    return Tokenizer(
        FastEncoder(encoder),
        table,
        bos_id=bos_id,
        begin=(bos_id,) if adds_bos else (),
        end=(eos_id,) if adds_eos else (),
        eos_id=eos_id,
        eos_ids=_end_ids(vocabulary, settings),
        pad_id=settings.token_id("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


class _Settings:
    """The `tokenizer.ggml.*` scalars."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self._num_tokens = len(metadata["tokenizer.ggml.tokens"])

    def __getitem__(self, key: str):
        return self._metadata[f"tokenizer.ggml.{key}"]

    def get(self, key: str, default=None):
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def token_id(self, role: str) -> int | None:
        """Id of the bos, eos, eot, eom, unknown or padding token; None when the file names none."""
        token = self.get(f"{role}_token_id")
        if token is not None and not 0 <= token < self._num_tokens:
            raise ValueError(
                f"tokenizer.ggml.{role}_token_id is {token}, outside the {self._num_tokens} tokens"
            )
        return token


def _byte_level(vocabulary: Vocabulary, settings: _Settings):
    """Encoder, table, and whether prompts begin with BOS when the file does not say."""
    kind = find_pre_tokenizer(settings["pre"])
    merges = _listed_merges(vocabulary, settings)
    encoder = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, merges, ignore_merges=kind.ignore_merges)
    )
    encoder.pre_tokenizer = kind.build()
    if settings.get("add_space_prefix", False):
        encoder.normalizer = normalizers.Prepend(" ")
    vocabulary.add_to(encoder)
    return encoder, vocabulary.table(piece_bytes, drops_first_space=False), kind.adds_bos


def _scored(vocabulary: Vocabulary, settings: _Settings):
    merges = vocabulary.scored_merges(settings["scores"])
    return _word_marked(vocabulary, settings, merges, settings.get("add_space_prefix", True))


def _listed(vocabulary: Vocabulary, settings: _Settings):
    merges = _listed_merges(vocabulary, settings)
    return _word_marked(vocabulary, settings, merges, settings.get("add_space_prefix", False))


def _word_marked(vocabulary: Vocabulary, settings: _Settings, merges: Merges, prefix: bool):
    rules = [normalizers.Prepend(WORD_MARK)] if prefix else []
    encoder = vocabulary.word_marked_bpe(merges, settings.token_id("unknown"), rules)
    return encoder, vocabulary.table(words, drops_first_space=prefix), True


def _listed_merges(vocabulary: Vocabulary, settings: _Settings) -> Merges:
    return vocabulary.check_merges([tuple(merge.split(" ", 1)) for merge in settings["merges"]])


def _end_ids(vocabulary: Vocabulary, settings: _Settings) -> set[int]:
    """The tokens that end a turn: those the file names, and control tokens known for it."""
    named = {settings.token_id(role) for role in ("eos", "eot", "eom")} - {None}
    control = {vocabulary.pieces[token]: token for token in vocabulary.of_kind(CONTROL)}
    known = TURN_ENDS & control.keys()
    if "<|return|>" in known:
        known.discard("<|end|>")  # there it ends a message, and the turn goes on
    return named | {control[text] for text in known}
