"""The `tokenizers` library as an Encoder, and Hugging Face folders with a tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

import tokenizers

from jaxserve.tokenizer.seal import SEAL

# How many characters can become one before tokens are counted. Composing accents (NFC) joins four
# at most. Rules that drop white space, or one <unk> for a whole word, have no bound: texts that
# rely on them for more than this are refused as too long.
COMPOSING, DROPPING = 4, 8
COMPOSING_RULES = {"NFC", "NFKC"}
LENGTH_KEEPING_RULES = {"Sequence", "Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel"}


class FastEncoder:
    """Encoder over a `tokenizers.Tokenizer`, which releases the GIL and is safe to share."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self.chars_shrink = _chars_shrink(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def sealed(self, control: Collection[str]) -> Callable[[str], list[int]]:
        """Encodes with a twin that shares the model but knows control tokens only with a seal."""
        twin = tokenizers.Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            twin.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            twin.pre_tokenizer = self._tokenizer.pre_tokenizer
        unseal = {}
        for token, added in sorted(self._tokenizer.get_added_tokens_decoder().items()):
            is_control = added.content in control
            content = SEAL + added.content if is_control else added.content
            twin.add_tokens([
                tokenizers.AddedToken(
                    content,
                    single_word=added.single_word,
                    lstrip=added.lstrip,
                    rstrip=added.rstrip,
                    normalized=added.normalized and not is_control,
                )
            ])  # fmt: skip
            unseal[twin.token_to_id(content)] = token

        def encode(text: str) -> list[int]:
            ids = twin.encode(text, add_special_tokens=False).ids
            return [unseal.get(token, token) for token in ids]

        return encode


def _chars_shrink(tokenizer: tokenizers.Tokenizer) -> int:
    strips = (t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
    if any(strips) or _can_be_unknown(tokenizer):
        return DROPPING
    if tokenizer.normalizer is None:
        return 1
    rules = list(_rules(json.loads(tokenizer.normalizer.__getstate__())))
    shrink = 1
    for rule in rules:
        if rule["type"] in COMPOSING_RULES:
            shrink = COMPOSING
        elif rule["type"] == "Replace" and len(rule["pattern"].get("String", "")) == 1:
            if not rule["content"]:
                return DROPPING
        elif rule["type"] not in LENGTH_KEEPING_RULES:
            return DROPPING
    return shrink


def _can_be_unknown(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether one <unk> may stand for a whole word."""
    model = tokenizer.model
    if isinstance(model, tokenizers.models.BPE):
        return model.unk_token is not None and not model.byte_fallback
    return not isinstance(model, tokenizers.models.Unigram)


def _rules(state: dict):
    """A normalizer's or decoder's parts, flattened."""
    yield state
    for part in state.get("normalizers", state.get("decoders", ())):
        yield from _rules(part)
