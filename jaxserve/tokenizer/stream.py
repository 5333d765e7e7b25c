"""Tokens to text while they arrive: whole characters only, and never a piece of a stop string.

`TextStream` is one sequence's detokenizer. It keeps the bytes of an unfinished character and the
characters that may be the beginning of a stop string; everything else leaves at once. Each token
costs the same however long the output is.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from jaxserve.tokenizer.base import Tokenizer

# A UTF-8 character has at most 4 bytes, so this many bytes before a position decide whether it is
# inside a character.
MAX_CHARACTER_BYTES = 4


class TextStream:
    """Text of one sequence, token by token.

    The deltas of `push`, then `finish`, join to the text of all tokens: what `tokenizer.decode`
    gives after the prompt (a leading space that belongs between prompt and output is kept, and a
    character begun by the prompt is completed), cut before the first stop string.

    stop: texts that end the output; found whatever the tokens' boundaries. Of several, the one
    complete first wins, the longest of those that end together. include_stop: the text keeps it.
    stopped: the stop string found, or None so far; after it nothing more comes out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
    ):
        self.stopped: str | None = None
        self._table = tokenizer.table(skip_special_tokens)
        self._pending = b""  # bytes of a character that is not complete
        self._held = ""  # text that may be the beginning of a stop string
        self._stops = StopStrings(stop) if stop else None
        self._state = 0
        self._include_stop = include_stop
        context = self._last_bytes(prompt_ids)
        self._drops_space = tokenizer.drops_first_space and not context
        self._decode(context)  # leaves what the prompt began of a character in _pending

    def push(self, token: int) -> str:
        """The text this token completes; often all of its own, sometimes none, sometimes more."""
        if not 0 <= token < len(self._table):
            return ""
        text = self._decode(self._table[token])
        return text if self._stops is None else self._release(text)

    def finish(self) -> str:
        """What is still held back: no more tokens come. Half a character shows as U+FFFD."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        if self._stops is None:
            return text
        text = self._release(text)
        held, self._held = self._held, ""
        return text + held

    def _decode(self, data: bytes) -> str:
        if self._drops_space and data:
            self._drops_space = False
            data = data.removeprefix(b" ")
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def _release(self, text: str) -> str:
        """Adds text, and returns what surely is no part of a stop string."""
        if self.stopped is not None:
            return ""
        window = self._held + text
        self._state, found, end = self._stops.scan(self._state, text)
        if found is not None:
            self.stopped, self._held = found, ""
            end += len(window) - len(text)
            return window[: end if self._include_stop else end - len(found)]
        safe = len(window) - self._stops.depth[self._state]
        self._held = window[safe:]
        return window[:safe]

    def _last_bytes(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last visible bytes: enough to know if it ends inside a character."""
        data = b""
        for token in reversed(prompt_ids):
            if 0 <= token < len(self._table):
                data = self._table[token] + data
            if len(data) >= MAX_CHARACTER_BYTES:
                break
        return data[-MAX_CHARACTER_BYTES:]


class StopStrings:
    """An automaton that finds any of several strings in text that comes in pieces.

    A state is the longest end of the text so far that begins some string; `depth[state]` is its
    length, so exactly that much text must be held back. Aho and Corasick, "Efficient string
    matching", CACM 1975.
    """

    def __init__(self, strings: Sequence[str]):
        self._goto: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match: list[str | None] = [None]
        self.depth = [0]
        for string in strings:
            self._insert(string)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, str | None, int]:
        """Reads text. Returns the new state, the first string found or None, and its end."""
        goto, fail, match = self._goto, self._fail, self._match
        if state == 0 and goto[0].keys().isdisjoint(text):
            return 0, None, 0
        for position, char in enumerate(text):
            while state and char not in goto[state]:
                state = fail[state]
            state = goto[state].get(char, 0)
            if match[state] is not None:
                return state, match[state], position + 1
        return state, None, 0

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            following = self._goto[state].get(char)
            if following is None:
                following = self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self._fail.append(0)
                self._match.append(None)
                self.depth.append(self.depth[state] + 1)
            state = following
        self._match[state] = string

    def _link(self) -> None:
        """Sets where to go on a mismatch, shallow states first: a link always leads to one."""
        queue = list(self._goto[0].values())
        for state in queue:
            for char, following in self._goto[state].items():
                queue.append(following)
                fallback = self._fail[state]
                while fallback and char not in self._goto[fallback]:
                    fallback = self._fail[fallback]
                self._fail[following] = self._goto[fallback].get(char, 0)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fail[following]]
