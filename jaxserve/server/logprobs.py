"""Log-probabilities in the two shapes OpenAI has, and in vLLM's for prompts."""

from __future__ import annotations

import codecs
import math

from jaxserve.types import TokenLogprob

FLOOR = -9999.0  # JSON has no -Infinity; OpenAI sends this for tokens that cannot come


def finite(logprob: float) -> float:
    return float(logprob) if math.isfinite(logprob) else FLOOR


class CompletionLogprobs:
    """Builds /v1/completions' logprobs of one choice piece by piece.

    tokens[i] starts text_offset[i] characters into the choice's text (prompt included with echo).
    The bytes of all tokens are decoded in a row to know that, as a character may span tokens.
    """

    def __init__(self, tokenizer, count: int, *, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._count = count  # alternatives a token, 0 for none
        self._skip_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(self, ids: list[int], scores: list[TokenLogprob | None]) -> dict:
        """The logprobs object of these tokens; a None score (the first of a prompt) stays null."""
        assert len(ids) == len(scores)
        offsets = [self._advance(token) for token in ids]
        text = self._tokenizer.token_text
        return {
            "text_offset": offsets,
            "token_logprobs": [s and finite(s.logprob) for s in scores],
            "tokens": [text(token) for token in ids],
            "top_logprobs": [s and self._alternatives(s) for s in scores],
        }

    def _advance(self, token: int) -> int:
        start = self._offset
        if not (self._skip_special and self._tokenizer.is_special(token)):
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return start

    def _alternatives(self, score: TokenLogprob) -> dict[str, float]:
        """The best `count` and the chosen token itself; nothing when count is 0."""
        if self._count == 0:
            return {}
        text = self._tokenizer.token_text
        best = {text(token): finite(value) for token, value in reversed(score.top[: self._count])}
        best = dict(reversed(best.items()))
        best.setdefault(text(score.token_id), finite(score.logprob))
        return best


def chat_content(tokenizer, scores: list[TokenLogprob], count: int) -> list[dict]:
    """choices[].logprobs.content of /v1/chat/completions: each token with its `count` best."""
    return [
        _entry(tokenizer, score.token_id, score.logprob)
        | {"top_logprobs": [_entry(tokenizer, *pair) for pair in score.top[:count]]}
        for score in scores
    ]


def _entry(tokenizer, token: int, logprob: float) -> dict:
    return {
        "token": tokenizer.token_text(token),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def prompt_scores(tokenizer, scores: list[TokenLogprob | None] | None, count: int) -> list | None:
    """vLLM's prompt_logprobs: for each prompt token null or {id: {logprob, rank, decoded_token}}.

    rank is 1 for the most likely token; null where the token is beyond the alternatives asked for.
    """
    if scores is None:
        return None
    return [score and _ranked(tokenizer, score, count) for score in scores]


def _ranked(tokenizer, score: TokenLogprob, count: int) -> dict:
    entries = {}
    for rank, (token, logprob) in enumerate(score.top, start=1):
        if rank <= count or token == score.token_id:
            entries[str(token)] = _scored(tokenizer, token, logprob, rank)
    own = str(score.token_id)
    if own not in entries:
        entries[own] = _scored(tokenizer, score.token_id, score.logprob, None)
    return entries


def _scored(tokenizer, token, logprob, rank) -> dict:
    return {
        "logprob": finite(logprob),
        "rank": rank,
        "decoded_token": tokenizer.token_text(token),
    }
