"""Text to ids and back: one `Tokenizer`, whatever file it came from.

Encoding is a library's work (an `Encoder`). Decoding is ours and the same for every vocabulary: an
id stands for some bytes, and text is those bytes joined and read as UTF-8. That one table serves
`decode`, the streaming `TextStream` and the tokens shown with log-probabilities, so they agree.

Nothing changes after construction: any number of threads may call a Tokenizer at once.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from jaxserve.tokenizer.chat import ChatTemplate, Prompt
from jaxserve.tokenizer.sandbox import TemplateError

PROBED_CHARS_PER_TOKEN = 8
# Words, numbers, code, spaces, scripts and an emoji: tokenizers that differ split it differently.
_PROBE = "It's 3.14159 o'clock;\n    def f(x):\treturn x**2  # naïve Straße 東京 Привет 👍🏽"
NEVER_MERGED = "\x02"  # in no vocabulary part of a longer token


class Encoder(Protocol):
    """What a tokenizer library does for us. Adds no begin or end tokens.

    encode: added tokens spelled in the text become their ids.
    sealed: an encode for which the given control tokens count only directly behind a `seal.SEAL`
    (the seal goes away); spelled without one they are ordinary text.
    chars_shrink: how many characters of text normalisation can turn into one, at most.
    """

    chars_shrink: int

    def encode(self, text: str) -> list[int]: ...
    def sealed(self, control: Collection[str]) -> Callable[[str], list[int]]: ...


@dataclasses.dataclass(frozen=True)
class TokenTable:
    """What each id stands for; lists are indexed by id.

    pieces: the token as its vocabulary spells it. data: the bytes it decodes to. special: control
    tokens, which skip_special_tokens hides. added: text -> id of every token that is found as a
    whole in text, special or not. drops_first_space: the encoder puts a space before text that
    begins a sequence, so decoding takes one away there.
    """

    pieces: list[str]
    data: list[bytes]
    special: frozenset[int]
    added: dict[str, int]
    drops_first_space: bool = False

    def __post_init__(self):
        assert len(self.pieces) == len(self.data)


class Tokenizer:
    """Encodes, decodes and lays out chats for one model.

    bos_id: the token that begins a sequence, or None. begin: the tokens the model wants before
    every prompt, mostly none or (bos_id,). end: those it wants after a raw prompt, mostly none.
    eos_id: the token that files call eos. eos_ids: all tokens that end a turn, it among them.
    chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        encoder: Encoder,
        table: TokenTable,
        *,
        bos_id: int | None = None,
        begin: Sequence[int] = (),
        end: Sequence[int] = (),
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        pad_id: int | None = None,
        chat_template: str | None = None,
    ):
        self.vocab_size = len(table.pieces)
        self.bos_id = bos_id
        self.begin = list(begin)
        self.end = list(end)
        self.eos_id = eos_id
        self.eos_ids = frozenset(eos_ids) | ({eos_id} - {None})
        self.pad_id = pad_id
        self.special_ids = table.special
        self.drops_first_space = table.drops_first_space
        self._encoder = encoder
        self._added = table.added
        self._pieces = table.pieces
        self._data = table.data
        self._visible = [b"" if i in table.special else d for i, d in enumerate(table.data)]
        self._longest = _longest(table.data)
        self._set_template(chat_template)

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another template, which is Jinja source."""
        changed = copy.copy(self)
        changed._set_template(source)
        return changed

    def _set_template(self, source: str | None) -> None:
        self.chat_template, self._chat = source, None
        if source is not None:
            special = self._special_texts()
            self._chat = ChatTemplate(source, special, self._added, self.named_tokens)
            self._encode_sealed = self._encoder.sealed(self._chat.control)

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt. Control tokens spelled in it become control tokens.

        With add_special_tokens a model that wants a begin token gets exactly one, also when the
        text spells it already.
        """
        ids = self._encoder.encode(text)
        if not add_special_tokens:
            return ids
        if self.end and ids[-len(self.end) :] != self.end:
            ids = ids + self.end
        return self._begun_once(ids)

    def encode_chat(self, messages: Sequence[dict], **arguments) -> list[int]:
        """Ids of a chat, laid out by the model's template: render_chat, then encode_rendered."""
        return self.encode_rendered(self.render_chat(messages, **arguments))

    def render_chat(
        self, messages: Sequence[dict], *, tools=None, add_generation_prompt=True, **template_kwargs
    ) -> Prompt:
        """A chat as the model's template lays it out.

        Control tokens come from the template alone: spelled in a message, a tool or an argument
        they are ordinary text. Raises TemplateError, a ValueError that says what to do.
        """
        if self._chat is None:
            raise TemplateError(
                "this model has no chat template; send the text to /v1/completions (LLM.generate), "
                "or give a Jinja file with --chat_template"
            )
        return self._chat.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )

    def encode_rendered(self, prompt: Prompt) -> list[int]:
        """Ids of a laid out chat, with exactly one begin token if the model wants one."""
        encode = self._encode_sealed if prompt.sealed else self._encoder.encode
        return self._begun_once(encode(prompt.text))

    def output_encoder(self) -> Callable[[str], list[int]]:
        """An encode for text inside an output: its tokens stand for the text's own bytes, with no
        space put before them, and control tokens spelled in it are ordinary text."""
        encode = self._encoder.sealed(self._special_texts())
        return self._without_first_space(encode) if self.drops_first_space else encode

    def _without_first_space(self, encode: Callable[[str], list[int]]):
        def inside(text: str) -> list[int]:
            ids, begun = encode(NEVER_MERGED + text), b""
            for at, token in enumerate(ids):
                begun += self._data[token]
                if begun.endswith(NEVER_MERGED.encode()):
                    return ids[at + 1 :]
            ids = encode(text)  # a normaliser took it away
            return ids[1:] if ids and self._data[ids[0]] == b" " else ids

        return inside

    def max_chars_for(self, max_tokens: int) -> int:
        """No text of more characters fits in max_tokens: a free check before tokenising."""
        return max_tokens * self._longest * self._encoder.chars_shrink

    def cannot_fit(self, text: str, max_tokens: int) -> bool:
        """Whether a text surely has more than max_tokens tokens; False when unsure.

        Looks at the number of characters, and at how many tokens a beginning of the text has, so
        the work is bounded by max_tokens however long the text is.
        """
        if len(text) > self.max_chars_for(max_tokens):
            return True
        beginning = PROBED_CHARS_PER_TOKEN * max_tokens
        if len(text) <= beginning:
            return False
        # Twice, because the cut itself may cost the beginning's last word some tokens.
        return len(self._encoder.encode(text[:beginning])) > 2 * max_tokens

    def _begun_once(self, ids: list[int]) -> list[int]:
        size, at = len(self.begin), 0
        while size and ids[at : at + size] == self.begin:
            at += size
        return self.begin + ids[at:]

    # ---- ids to text

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids outside the vocabulary are nothing; broken UTF-8 shows as U+FFFD."""
        data = b"".join(map(self.table(skip_special_tokens).__getitem__, self._known(ids)))
        if self.drops_first_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def table(self, skip_special_tokens: bool) -> list[bytes]:
        """Bytes by id, for readers of single tokens. Not to be changed."""
        return self._visible if skip_special_tokens else self._data

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; none outside the vocabulary."""
        return self._data[token] if 0 <= token < self.vocab_size else b""

    def token_text(self, token: int) -> str:
        """One token as text, for display: halves of characters show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def control_tokens(self, texts: Iterable[str]) -> dict[str, int]:
        """Those of the texts that are control tokens of the vocabulary, with their ids."""
        ids = {text: self._added[text] for text in texts if text in self._added}
        return {text: token for text, token in ids.items() if token in self.special_ids}

    def _special_texts(self) -> set[str]:
        return {text for text, token in self._added.items() if token in self.special_ids}

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def fingerprint(self) -> str:
        """sha256 of what it does, not of its files: the bytes of every id, the ids with a part to
        play, the chat template, and the ids of a text that shows how it splits."""
        roles = (
            sorted(self.special_ids), sorted(self._added.items()), self.bos_id, self.begin,
            self.end, self.eos_id, sorted(self.eos_ids), self.chat_template,
            self._encoder.encode(_PROBE),
        )  # fmt: skip
        digest = hashlib.sha256(repr(roles).encode())
        for data in self._data:
            digest.update(len(data).to_bytes(4))
            digest.update(data)
        return digest.hexdigest()

    def _known(self, ids: Iterable[int]) -> Iterable[int]:
        return (token for token in ids if 0 <= token < self.vocab_size)

    @property
    def named_tokens(self) -> dict[str, str]:
        """The tokens that templates call by name, as text; "" for those the model lacks."""
        named = {"bos": self.bos_id, "eos": self.eos_id, "pad": self.pad_id}
        return {f"{k}_token": "" if v is None else self._pieces[v] for k, v in named.items()}


def _longest(data: list[bytes]) -> int:
    """The most characters that begin within one token."""
    longest = 1
    for token in data:
        if len(token) > longest:
            longest = max(longest, sum(byte & 0xC0 != 0x80 for byte in token))
    return longest
