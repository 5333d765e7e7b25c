"""Vocabularies as GGUF and sentencepiece files list them: pieces, their kinds, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers

from jaxserve.tokenizer.base import TokenTable

# Kinds of piece; both formats use these numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# Squares of the tokens' lengths in all, which is what finding their splits costs: 100 times what
# the largest published vocabularies have.
MAX_SPLIT_CHARS = 10**9

WORD_MARK = "\u2581"  # sentencepiece spells a space so

Merges = Sequence[tuple[str, str]]


class Vocabulary:
    """Pieces by id and their kinds. Raises ValueError when the two do not fit together."""

    def __init__(self, pieces: Sequence[str], kinds: Sequence[int] | None = None):
        self.pieces = list(pieces)
        self.kinds = [NORMAL] * len(self.pieces) if kinds is None else [int(k) for k in kinds]
        if len(self.kinds) != len(self.pieces):
            raise ValueError(
                f"{len(self.kinds)} token types for {len(self.pieces)} tokens; the file is damaged"
            )
        self.ids = {piece: token for token, piece in enumerate(self.pieces)}

    def of_kind(self, *kinds: int) -> list[int]:
        return [token for token, kind in enumerate(self.kinds) if kind in kinds]

    def table(self, spell: Callable[[str], bytes], drops_first_space: bool) -> TokenTable:
        """What ids stand for. spell: the bytes of a normal or user-defined piece."""

        def data(piece: str, kind: int) -> bytes:
            if kind in (NORMAL, USER_DEFINED):
                return spell(piece)
            if kind == BYTE:
                return byte_of(piece)
            return b"" if kind == UNUSED else piece.encode("utf-8", "replace")

        special = self.of_kind(CONTROL, UNKNOWN)
        return TokenTable(
            pieces=self.pieces,
            data=[data(piece, kind) for piece, kind in zip(self.pieces, self.kinds)],
            special=frozenset(special),
            added={self.pieces[t]: t for t in [*special, *self.of_kind(USER_DEFINED)]},
            drops_first_space=drops_first_space,
        )

    def scored_merges(self, scores: Sequence[float]) -> Merges:
        """The merges that sentencepiece scores imply: every split of a piece into two pieces.

        Better scores merge first, of equal ones the earlier piece. User-defined pieces are found
        whole in text, so whatever forms them goes before all else.
        """
        if len(scores) != len(self.pieces):
            raise ValueError(
                f"{len(scores)} scores for {len(self.pieces)} tokens; the file is damaged"
            )
        work = sum(len(piece) ** 2 for piece in self.pieces)
        if work > MAX_SPLIT_CHARS:
            raise ValueError("the vocabulary has tokens of too many characters; it is damaged")
        ids, joined, lefts, rights = self.ids, [], [], []
        for token, (piece, kind) in enumerate(zip(self.pieces, self.kinds)):
            if kind not in (NORMAL, USER_DEFINED):
                continue
            for cut in range(1, len(piece)):  # plain loop: millions of turns in a large vocabulary
                left = ids.get(piece[:cut])
                if left is not None and (right := ids.get(piece[cut:])) is not None:
                    joined.append(token)
                    lefts.append(left)
                    rights.append(right)
        user_defined = np.array(self.kinds) == USER_DEFINED
        rank = np.where(user_defined, 0.0, -np.asarray(scores, np.float64))
        order = np.lexsort((rights, lefts, joined, rank[joined]))
        return [(self.pieces[lefts[n]], self.pieces[rights[n]]) for n in order.tolist()]

    def check_merges(self, merges: Merges) -> Merges:
        for pair in merges:
            if len(pair) != 2 or any(part not in self.ids for part in (*pair, "".join(pair))):
                raise ValueError(
                    f"the merge of {' + '.join(pair)!r} is not between tokens of this vocabulary; "
                    "the file is damaged"
                )
        return merges

    def word_marked_bpe(
        self, merges: Merges, unknown: int | None, rules: Iterable[normalizers.Normalizer]
    ) -> tokenizers.Tokenizer:
        """Sentencepiece's BPE. rules: normalisation before spaces become word marks."""
        model = models.BPE(
            self.ids,
            merges,
            unk_token=None if unknown is None else self.pieces[unknown],
            fuse_unk=True,
            byte_fallback=BYTE in self.kinds,
        )
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", WORD_MARK)])
        self.add_to(tokenizer)
        return tokenizer

    def add_to(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Tells the encoder which pieces are found whole in text."""
        special = [self.pieces[t] for t in self.of_kind(CONTROL, UNKNOWN)]
        plain = [self.pieces[t] for t in self.of_kind(USER_DEFINED)]
        tokenizer.add_special_tokens(
            [AddedToken(p, special=True, normalized=False) for p in special]
        )
        tokenizer.add_tokens([AddedToken(p, special=False, normalized=False) for p in plain])


def words(piece: str) -> bytes:
    """Bytes of a piece spelled sentencepiece's way."""
    return piece.replace(WORD_MARK, " ").encode("utf-8", "replace")


def byte_of(piece: str) -> bytes:
    """The byte that a piece like <0x0A> stands for."""
    try:
        return bytes([int(piece.removeprefix("<0x").removesuffix(">"), 16)])
    except ValueError:
        raise ValueError(f"byte token {piece!r} is not spelled like <0x0A>") from None
