"""Tokenizers from the vocabularies inside GGUF files.

Three kinds exist for text decoders. "gpt2" is byte-level BPE with explicit merges, its
pre-tokenizer named by `tokenizer.ggml.pre`. "llama" is sentencepiece BPE, where the merges follow
from scores. "gemma4" spells words as sentencepiece does and lists its merges. All become
`tokenizers` objects.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers

from jaxserve.tokenizer.base import Tokenizer, TokenTable
from jaxserve.tokenizer.bytelevel import piece_bytes
from jaxserve.tokenizer.hf import FastEncoder
from jaxserve.tokenizer.pretokenizers import find_pre_tokenizer

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

WORD_MARK = "\u2581"  # sentencepiece spells a space so

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
    """The tokenizer that `tokenizer.*` metadata describes."""
    kind = metadata["tokenizer.ggml.model"]
    build = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _listed_merges}.get(kind)
    if build is None:
        raise ValueError(
            f"tokenizer.ggml.model is {kind!r}; gpt2, llama and gemma4 are supported. Give the "
            "model's tokenizer folder with --tokenizer"
        )
    vocabulary = _Vocabulary(metadata)
    encoder, data, settings = build(vocabulary)
    hidden = vocabulary.of_kind(CONTROL, UNKNOWN)
    added = {vocabulary.pieces[t]: t for t in [*hidden, *vocabulary.of_kind(USER_DEFINED)]}
    adds_bos = bool(vocabulary.get("add_bos_token", settings["adds_bos"]))
    adds_eos = bool(vocabulary.get("add_eos_token", False))
    bos_id, eos_id = vocabulary.token_id("bos"), vocabulary.token_id("eos")
    return Tokenizer(
        FastEncoder(encoder),
        TokenTable(
            vocabulary.pieces, data, frozenset(hidden), added, settings["drops_first_space"]
        ),
        bos_id=bos_id,
        adds_bos=adds_bos and bos_id is not None,
        adds_eos_id=eos_id if adds_eos else None,
        eos_ids=_end_ids(vocabulary),
        pad_id=vocabulary.token_id("padding"),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


class _Vocabulary:
    """The vocabulary arrays, checked against each other."""

    def __init__(self, metadata: Mapping[str, Any]):
        self._metadata = metadata
        self.pieces: list[str] = list(metadata["tokenizer.ggml.tokens"])
        kinds = metadata.get("tokenizer.ggml.token_type")
        self.kinds = [NORMAL] * len(self.pieces) if kinds is None else [int(k) for k in kinds]
        if len(self.kinds) != len(self.pieces):
            raise ValueError(
                f"tokenizer.ggml.token_type has {len(self.kinds)} entries for "
                f"{len(self.pieces)} tokens; the file is damaged"
            )
        self.ids = {piece: token for token, piece in enumerate(self.pieces)}

    def get(self, key: str, default=None):
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def require(self, key: str):
        return self._metadata[f"tokenizer.ggml.{key}"]

    def of_kind(self, *kinds: int) -> list[int]:
        return [token for token, kind in enumerate(self.kinds) if kind in kinds]

    def token_id(self, role: str) -> int | None:
        """Id of the bos, eos, eot, eom, unknown or padding token; None when the file names none."""
        token = self.get(f"{role}_token_id")
        if token is None:
            return None
        if not 0 <= token < len(self.pieces):
            raise ValueError(
                f"tokenizer.ggml.{role}_token_id is {token}, outside the {len(self.pieces)} tokens"
            )
        return int(token)

    def data(self, spell: Callable[[str], bytes]) -> list[bytes]:
        """Bytes by id; `spell` gives those of normal pieces, added tokens stand for themselves."""

        def bytes_of(piece: str, kind: int) -> bytes:
            if kind == NORMAL:
                return spell(piece)
            if kind == BYTE:
                return _byte_piece(piece)
            return b"" if kind == UNUSED else piece.encode("utf-8", "replace")

        return [bytes_of(piece, kind) for piece, kind in zip(self.pieces, self.kinds)]

    def merges(self) -> list[tuple[str, str]]:
        """The listed merges, best first."""
        pairs = [tuple(merge.split(" ", 1)) for merge in self._metadata["tokenizer.ggml.merges"]]
        for pair in pairs:
            if len(pair) != 2 or any(part not in self.ids for part in (*pair, "".join(pair))):
                raise ValueError(
                    f"tokenizer.ggml.merges joins {' + '.join(pair)!r}, which are not tokens of "
                    "this vocabulary; the file is damaged"
                )
        return pairs

    def scored_merges(self) -> list[tuple[str, str]]:
        """The merges that sentencepiece scores imply: every split of a piece into two pieces.

        Better scores merge first. User-defined pieces are found whole in text, so whatever forms
        them goes before all else.
        """
        scores = self._metadata["tokenizer.ggml.scores"]
        if len(scores) != len(self.pieces):
            raise ValueError(
                f"tokenizer.ggml.scores has {len(scores)} entries for {len(self.pieces)} tokens; "
                "the file is damaged"
            )
        ids, merges = self.ids, []
        for piece, score, kind in zip(self.pieces, scores.tolist(), self.kinds):
            if kind not in (NORMAL, USER_DEFINED):
                continue
            rank = 0.0 if kind == USER_DEFINED else -score
            splits = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
            found = [(ids[a], ids[b], a, b) for a, b in splits if a in ids and b in ids]
            merges += [(rank, a, b) for _, _, a, b in sorted(found)]
        merges.sort(key=lambda merge: merge[0])  # stable: equal scores stay in order of the piece
        return [(a, b) for _, a, b in merges]


def _byte_piece(piece: str) -> bytes:
    """The byte that a piece like <0x0A> stands for."""
    try:
        return bytes([int(piece.removeprefix("<0x").removesuffix(">"), 16)])
    except ValueError:
        raise ValueError(f"byte token {piece!r} is not spelled like <0x0A>") from None


def _byte_level(vocabulary: _Vocabulary):
    """Byte-level BPE. Returns (tokenizers.Tokenizer, bytes by id, settings), as all builders do."""
    kind = find_pre_tokenizer(vocabulary.require("pre"))
    encoder = tokenizers.Tokenizer(
        models.BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=kind.ignore_merges)
    )
    encoder.pre_tokenizer = kind.build()
    if vocabulary.get("add_space_prefix", False):
        encoder.normalizer = normalizers.Prepend(" ")
    _add_tokens(encoder, vocabulary)
    settings = {"adds_bos": kind.adds_bos, "drops_first_space": False}
    return encoder, vocabulary.data(piece_bytes), settings


def _sentencepiece(vocabulary: _Vocabulary):
    """Sentencepiece BPE with byte fallback; merges from the scores."""
    return _word_marked(vocabulary, vocabulary.scored_merges())


def _listed_merges(vocabulary: _Vocabulary):
    """Sentencepiece spelling with the merges listed."""
    return _word_marked(vocabulary, vocabulary.merges(), space_prefix=False)


def _word_marked(vocabulary: _Vocabulary, merges, space_prefix=True):
    unknown = vocabulary.token_id("unknown")
    encoder = tokenizers.Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges,
            unk_token=None if unknown is None else vocabulary.pieces[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        )
    )
    space_prefix = bool(vocabulary.get("add_space_prefix", space_prefix))
    mark_spaces = normalizers.Replace(" ", WORD_MARK)
    if space_prefix:
        encoder.normalizer = normalizers.Sequence([normalizers.Prepend(WORD_MARK), mark_spaces])
    else:
        encoder.normalizer = mark_spaces
    _add_tokens(encoder, vocabulary)
    spell = lambda piece: piece.replace(WORD_MARK, " ").encode("utf-8", "replace")
    settings = {"adds_bos": True, "drops_first_space": space_prefix}
    return encoder, vocabulary.data(spell), settings


def _add_tokens(encoder: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    pieces = vocabulary.pieces
    special = [pieces[t] for t in vocabulary.of_kind(CONTROL, UNKNOWN)]
    plain = [pieces[t] for t in vocabulary.of_kind(USER_DEFINED)]
    encoder.add_special_tokens([AddedToken(p, special=True, normalized=False) for p in special])
    encoder.add_tokens([AddedToken(p, special=False, normalized=False) for p in plain])


def _end_ids(vocabulary: _Vocabulary) -> set[int]:
    """The tokens that end a turn: those the file names, and control tokens known for it."""
    named = {vocabulary.token_id(role) for role in ("eos", "eot", "eom")} - {None}
    control = {vocabulary.pieces[token]: token for token in vocabulary.of_kind(CONTROL)}
    known = TURN_ENDS & control.keys()
    if "<|return|>" in known:
        known.discard("<|end|>")  # harmony: it ends a message, and the turn goes on
    return named | {control[text] for text in known}
