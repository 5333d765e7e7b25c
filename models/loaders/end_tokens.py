"""Which tokens end a text: the union of all the files that say so.

Checkpoints name end tokens in up to three files, which rarely agree: one has the end of text, one
the end of a chat turn. Stopping at any of them is what their authors meant, so the set is the union
of config.json, generation_config.json and tokenizer_config.json; for GGUF, of the eos, eot and eom
keys and of control tokens whose names say that a turn ends.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxserve.models.loaders.safetensors_file import read_json

# Control tokens that end a turn or a text in the chat formats in use.
TURN_ENDS = frozenset(
    {
        "<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<EOT>",
    }
)  # fmt: skip
GGUF_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id", "eos_token_ids")
CONTROL_TOKEN = 3


def folder_eos_ids(folder: pathlib.Path, config: Mapping[str, Any]) -> frozenset[int]:
    """From a folder's files, each of which may be absent. `config` is config.json."""
    found = _ids(config.get("eos_token_id")) | _ids(_text_part(config).get("eos_token_id"))
    found |= _ids(_optional(folder / "generation_config.json").get("eos_token_id"))
    tokenizer = _optional(folder / "tokenizer_config.json")
    token = tokenizer.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if isinstance(token, str):
        found |= _ids_of_token(folder, tokenizer, token)
    return frozenset(found)


def gguf_eos_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for key in GGUF_KEYS:
        found |= _ids(metadata.get(f"tokenizer.ggml.{key}"))
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    types = metadata.get("tokenizer.ggml.token_type", ())
    return frozenset(found) | {
        index
        for index, (token, kind) in enumerate(zip(tokens, types))
        if kind == CONTROL_TOKEN and token in TURN_ENDS
    }


def _ids(value: Any) -> set[int]:
    """A token id, a list of them, or nothing; anything else is an error."""
    if value is None:
        return set()
    ids = value.tolist() if hasattr(value, "tolist") else value
    ids = ids if isinstance(ids, list) else [ids]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError(f"eos_token_id={value!r}: must be token ids")
    return set(ids)


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or {}


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _ids_of_token(folder: pathlib.Path, tokenizer: Mapping[str, Any], token: str) -> set[int]:
    """The id of a token given by its text: among the added tokens, else in the vocabulary."""
    for key, entry in (tokenizer.get("added_tokens_decoder") or {}).items():
        if entry.get("content") == token:
            return {int(key)}
    full = _optional(folder / "tokenizer.json")
    for entry in full.get("added_tokens") or ():
        if entry.get("content") == token:
            return {int(entry["id"])}
    vocabulary = (full.get("model") or {}).get("vocab")
    return _ids(vocabulary.get(token)) if isinstance(vocabulary, dict) else set()
