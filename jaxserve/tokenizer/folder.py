"""What the small files of a Hugging Face folder say about its tokenizer."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

MAX_JSON_BYTES = 64 * 1024 * 1024


class TokenizerFolder:
    """tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json and
    chat_template.jinja, as far as they are there. Raises ValueError naming a damaged file."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.config = self._json("tokenizer_config.json")
        self._roles = self._json("special_tokens_map.json")
        self._generation = self._json("generation_config.json")

    def role(self, name: str) -> str | None:
        """Text of the bos, eos, pad or unk token."""
        key = f"{name}_token"
        value = self.config.get(key)
        if value is None:
            value = self._roles.get(key)
        return value.get("content") if isinstance(value, Mapping) else value

    def end_ids(self) -> set[int]:
        """Ids that generation_config.json ends on."""
        ids = self._generation.get("eos_token_id")
        return set(ids) if isinstance(ids, list) else {ids} - {None}

    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Tokens that are found whole in text, by id."""
        added = {}
        for text, token in self._json("added_tokens.json").items():
            added[int(token)] = tokenizers.AddedToken(text, normalized=False)
        for token, entry in self.config.get("added_tokens_decoder", {}).items():
            special = bool(entry.get("special", False))
            added[int(token)] = tokenizers.AddedToken(
                entry["content"],
                single_word=bool(entry.get("single_word", False)),
                lstrip=bool(entry.get("lstrip", False)),
                rstrip=bool(entry.get("rstrip", False)),
                normalized=bool(entry.get("normalized", not special)),
                special=special,
            )
        return added

    def chat_template(self) -> str | None:
        """The file chat_template.jinja, else the entry of tokenizer_config.json; of several named
        ones the default."""
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text("utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default")
        return template

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            return {}
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"{file}: larger than {MAX_JSON_BYTES} bytes")
        try:
            value = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{file}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{file}: not a JSON object")
        return value


def extend(tokenizer: tokenizers.Tokenizer, added: Mapping[int, tokenizers.AddedToken]) -> None:
    """Adds tokens that the library does not know yet, under the ids their folder gives them."""
    known = tokenizer.get_added_tokens_decoder()
    is_new = lambda token: token not in known or known[token].content != added[token].content
    new = {token: added[token] for token in sorted(added) if is_new(token)}
    tokenizer.add_tokens(list(new.values()))
    for token, entry in new.items():
        if tokenizer.token_to_id(entry.content) != token:
            raise ValueError(
                f"added token {entry.content!r} should have id {token}, the vocabulary gives it "
                f"{tokenizer.token_to_id(entry.content)}; the tokenizer's files do not fit together"
            )
