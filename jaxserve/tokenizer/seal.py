"""A line between what a chat template writes and what people write.

A template writes control tokens (<|im_start|>, <end_of_turn>) around people's words. Somebody may
spell such a token inside a message to forge a turn. So before rendering, spellings in people's
words get a BREAK inside; what is still whole afterwards is the template's own and gets a SEAL in
front; then the breaks go away. Tokenizers make control tokens of sealed spellings only. Chats
without such spellings, nearly all, take none of these steps.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Noncharacters: no text should hold them, and in people's words they are replaced.
BREAK, SEAL = "\U0010fffe", "\U0010ffff"
# A break as it looks where a template printed an object: as itself, in JSON's escapes, in Python's.
_BREAKS = re.compile(rf"{BREAK}|\\udbff\\udffe|\\U0010fffe")
_NO_MARKS = str.maketrans({BREAK: "\ufffd", SEAL: "\ufffd"})


class ControlTexts:
    """Finds the spellings of some control tokens in text."""

    def __init__(self, texts: Collection[str]):
        self.texts = frozenset(text for text in texts if text)
        spelled = literals(self.texts)
        self._whole = re.compile(spelled) if spelled else None
        # Overlapping spellings too: the look-ahead uses up no more than the first character.
        self._starts = re.compile(f"(?={spelled})(.)", re.DOTALL) if spelled else None
        self._beginnings = {text[:n] for text in self.texts for n in range(1, len(text))}
        self._longest = max(map(len, self.texts), default=0)

    def break_up(self, text: str) -> str:
        """The text with a BREAK inside every spelling, also in one that could be completed by what
        the template puts behind the text. Unchanged, the same object, when there is none."""
        if self._starts is None:
            return text
        text = text.translate(_NO_MARKS) if BREAK in text or SEAL in text else text
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                at = len(text) - size + 1
                text = text[:at] + BREAK + text[at:]
        return self._starts.sub(rf"\1{BREAK}", text)

    def seal(self, text: str) -> str:
        """Seals the spellings that are whole, and takes the breaks out of the others."""
        if self._whole is not None:
            text = self._whole.sub(lambda found: SEAL + found[0], text)
        return _BREAKS.sub("", text)


def literals(texts: Collection[str]) -> str:
    """A regular expression that matches the longest of the texts, in time of its length.

    A plain alternation would try thousands of reserved tokens one by one; this shares beginnings.
    """
    tree: dict = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _branch(tree)


def _branch(node: dict) -> str:
    stem = ""
    while len(node) == 1 and "" not in node:  # no choice: no group, and no recursion
        char, node = next(iter(node.items()))
        stem += re.escape(char)
    ways = [re.escape(char) + _branch(below) for char, below in node.items() if char]
    if not ways:
        return stem
    return f"{stem}(?:{'|'.join(ways)})" + ("?" if "" in node else "")
