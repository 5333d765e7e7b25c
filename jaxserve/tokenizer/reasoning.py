"""A model's reasoning (<think>...</think>) split from its answer while the text streams."""

from __future__ import annotations

from jaxserve.tokenizer.stream import StopStrings

BEGIN, END = "<think>", "</think>"
SPACES = " \t\r\n"


class ReasoningSplitter:
    """Splits one answer into (reasoning, content), the same however it is cut into pieces.

    opened: the prompt ended inside a <think>, so the answer begins with reasoning. White space at
    the ends of the reasoning and at the beginning of what follows it is dropped. Only a <think>
    that comes before any content begins reasoning: later ones are talk about it.
    """

    def __init__(self, opened: bool = False):
        self._begin, self._end = StopStrings([BEGIN]), StopStrings([END])
        self._state = 0
        self._held = ""  # may be the beginning of a mark
        self._phase = "reasoning" if opened else "before"
        self._gap = ""  # white space that counts if more of the same kind follows
        self._fresh = opened  # nothing of this phase has been sent yet

    def push(self, text: str) -> tuple[str, str]:
        """What this text adds to the reasoning and to the content."""
        reasoning = content = ""
        while text:
            if self._phase == "content":
                return reasoning, content + self._after(text)
            marks = self._end if self._phase == "reasoning" else self._begin
            self._state, found, end = marks.scan(self._state, text)
            window = self._held + (text[:end] if found else text)
            cut = len(window) - (len(found) if found else marks.depth[self._state])
            ready, self._held = window[:cut], "" if found else window[cut:]
            text = text[end:] if found else ""
            if self._phase == "reasoning":
                reasoning += self._thought(ready)
            elif ready.strip(SPACES):  # an answer without reasoning: all of it is content
                content += self._gap + ready + (found or "") + self._held + text
                self._gap, self._held, text = "", "", ""
                self._phase, self._fresh = "content", False
            else:
                self._gap += ready
            if found:
                self._enter("content" if self._phase == "reasoning" else "reasoning")
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """What was held back: an unfinished mark, which is text after all."""
        held, gap, self._held, self._gap = self._held, self._gap, "", ""
        if self._phase == "reasoning":
            return (gap + held if held else ""), ""
        return "", gap + held

    def _enter(self, phase: str) -> None:
        if self._phase != "content":
            self._phase, self._state, self._gap, self._fresh = phase, 0, "", True

    def _thought(self, text: str) -> str:
        """Reasoning without white space at its ends."""
        text = self._gap + text
        if self._fresh:
            text = text.lstrip(SPACES)
        body = text.rstrip(SPACES)
        self._gap = text[len(body) :]
        self._fresh &= not body
        return body

    def _after(self, text: str) -> str:
        """Content, without white space right behind the reasoning."""
        if self._fresh:
            text = text.lstrip(SPACES)
            self._fresh = not text
        return text


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt leaves the model inside its reasoning."""
    return prompt.rstrip(SPACES).endswith(BEGIN)


def ends_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt has the model's reasoning behind it, as templates do without."""
    return prompt.rstrip(SPACES).endswith(END)
