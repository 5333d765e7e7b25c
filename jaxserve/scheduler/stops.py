"""StopRules: which tokens end which sequences."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from jaxserve.types import FinishReason, Sequence


class StopRules:
    """Finds the few rows of a step that may have ended without asking each of them.

    watched_V counts, for each token id, the running sequences that end at it; end-of-text ids count
    always. A step's tokens are looked up at once, and only hits are asked.
    """

    def __init__(self, vocab_size: int, eos_ids: Iterable[int]):
        self._eos_ids = frozenset(eos_ids)
        self._watched_V = np.zeros(vocab_size, np.int32)
        self._watched_V[list(self._eos_ids)] = 1

    def admit(self, sequence: Sequence) -> None:
        for token in sequence.request.params.stop_token_ids:
            self._watched_V[token] += 1

    def leave(self, sequence: Sequence) -> None:
        for token in sequence.request.params.stop_token_ids:
            self._watched_V[token] -= 1

    def find_ends(
        self, sequences: SequenceOf[Sequence], token_S: np.ndarray, tokens: list[int], full_S
    ) -> dict[int, tuple[FinishReason, int | None]]:
        """Which of these rows have ended with their new token: row -> (reason, stop id, if it is
        one that the client named).

        tokens: token_S as a list. full_S: whether the row has all the tokens that it may have.
        """
        ends = {}
        for row in (full_S | self.suspects(token_S)).nonzero()[0].tolist():
            if self.ends(sequences[row], tokens[row]):
                # An end token at the very last place is still the model's own end.
                named = tokens[row] in sequences[row].request.params.stop_token_ids
                ends[row] = (FinishReason.STOP, tokens[row] if named else None)
            elif full_S[row]:
                ends[row] = (FinishReason.LENGTH, None)
        return ends

    def suspects(self, token_S: np.ndarray) -> np.ndarray:
        """Rows whose token ends somebody, if perhaps not them. bool [S]."""
        return self._watched_V[token_S] > 0

    def ends(self, sequence: Sequence, token: int) -> bool:
        """Whether the sequence, whose last token this is, ends with it."""
        params = sequence.request.params
        if sequence.num_output <= params.min_tokens:
            return False
        is_eos = token in self._eos_ids and not params.ignore_eos
        return is_eos or token in params.stop_token_ids

    def check_invariants(self, running: list[Sequence]) -> None:
        expected = sum(len(sequence.request.params.stop_token_ids) for sequence in running)
        assert self._watched_V.sum() == expected + len(self._eos_ids)
        assert (self._watched_V >= 0).all()
