"""Chats to prompt text by the model's own template."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import jinja2.nodes

from jaxserve.tokenizer.messages import Reading, json_copy, template_message
from jaxserve.tokenizer.sandbox import (
    MAX_TEMPLATE_CHARS,
    BoundedEnvironment,
    Meter,
    TemplateError,
)
from jaxserve.tokenizer.seal import ControlTexts

# Arguments that a request may not set: they belong to the message itself, or mean code.
RESERVED = {"messages", "tools", "add_generation_prompt", "chat_template", "tokenize"}
MARK = re.compile(r"[<\[]\S+[>\]]")  # <tool_call>, [INST]: what a token that is a mark looks like
PROBE = "argument_probe"


class Prompt(NamedTuple):
    """text: what the model reads. sealed: people spelled control tokens in it, so those of the
    template, and only those, have a SEAL in front."""

    text: str
    sealed: bool


class ChatTemplate:
    """One compiled template. `render` may run in several threads at once.

    special: the texts of special tokens. added: the texts of all tokens that are found whole in
    text; marks among them that the template writes count as control tokens too. named_tokens: what
    the template may call by name, such as bos_token. now: today, for templates that print it.
    clock: seconds of processor time that this thread has used; it bounds a render.

    control: the texts that only the template may turn into tokens.
    """

    def __init__(
        self,
        source: str,
        special: Collection[str] = (),
        added: Collection[str] = (),
        named_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
        clock: Callable[[], float] = time.thread_time,
    ):
        self._environment = BoundedEnvironment(now)
        self._clock = clock
        self._named_tokens = dict(named_tokens or {})
        self._special = ControlTexts(special)
        written = {text for text in added if MARK.fullmatch(text) and text in source}
        self._control = ControlTexts(written | set(special))
        self.control = self._control.texts
        self._reading = Reading()
        self._fault: str | None = None
        try:
            if len(source) > MAX_TEMPLATE_CHARS:
                raise TemplateError(f"it is longer than {MAX_TEMPLATE_CHARS} characters")
            self._template = self._environment.from_string(source)
            self._reading = self._find_reading(source)
        except (jinja2.TemplateError, TemplateError, RecursionError, SyntaxError) as error:
            self._fault = str(error) or type(error).__name__

    def render(
        self, messages: Sequence[dict], *, tools=None, add_generation_prompt=True, **arguments
    ) -> Prompt:
        """Lays out a chat.

        messages: OpenAI's shapes. tools: list of tool objects or None. arguments: what else the
        template takes, such as enable_thinking. Raises TemplateError with the remedy.
        """
        if reserved := RESERVED & arguments.keys():
            raise TemplateError(f"{min(reserved)!r} cannot be set through template arguments")
        spellings = _Spellings(self._special, self._control)
        context = {
            **json_copy(arguments, spellings.anyone, "template arguments"),
            **self._named_tokens,
            "messages": [self._message(message, spellings) for message in messages],
            "tools": json_copy(tools, spellings.anyone, "tools") or None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(context)
        return Prompt(self._control.seal(text) if spellings.found else text, spellings.found)

    def _message(self, message: Any, spellings: _Spellings) -> dict:
        role = message.get("role") if isinstance(message, Mapping) else None
        spell = spellings.assistant if role == "assistant" else spellings.anyone
        return template_message(message, spell, self._reading)

    def _run(self, context: dict[str, Any]) -> str:
        if self._fault is not None:
            raise TemplateError(
                f"the chat template cannot be used ({self._fault}); give another one with "
                "--chat_template"
            )
        self._environment.start(Meter(self._clock))
        try:
            pieces = self._template.root_render_func(self._template.new_context(context))
            return self._environment.concat(pieces)
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateError("the chat template recurses without end") from None
        except Exception as error:
            raise TemplateError(
                f"the chat template failed on this chat: {type(error).__name__}: {error}"
            ) from None

    def _find_reading(self, source: str) -> Reading:
        syntax = self._environment.syntax(source)
        tests = syntax.find_all(jinja2.nodes.Test)
        none = any(test.name == "none" and _is_content(test.node) for test in tests)
        return Reading(
            parts=any(_is_content(loop.iter) for loop in syntax.find_all(jinja2.nodes.For)),
            none=none,
            objects=self._takes_argument_objects(None if none else ""),
            developer="developer" in source,
        )

    def _takes_argument_objects(self, content: str | None) -> bool:
        """Tries a call whose arguments are an object. Most templates print it with tojson; some
        expect JSON text, and fail on an object or print it Python's way."""
        function = {"name": "f", "arguments": {PROBE: 1}}
        call = {"id": "call00000", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        try:
            text = self._run({**self._named_tokens, "messages": messages, "tools": None})
        except TemplateError as error:
            return "TypeError" not in str(error)
        return f"'{PROBE}'" not in text


class _Spellings:
    """Breaks up spelled control tokens, and remembers if there were any.

    Assistant messages keep marks that are not special tokens: templates look for them there, as for
    the </think> that ends the reasoning of an earlier turn.
    """

    def __init__(self, special: ControlTexts, control: ControlTexts):
        self._special, self._control = special, control
        self.found = False

    def anyone(self, text: str) -> str:
        return self._broken(self._control, text)

    def assistant(self, text: str) -> str:
        return self._broken(self._special, text)

    def _broken(self, texts: ControlTexts, text: str) -> str:
        broken = texts.break_up(text)
        self.found |= broken != text
        return broken


def _is_content(node: jinja2.nodes.Node) -> bool:
    """Whether a template's expression means the content of a message, judged by its name."""
    match node:
        case jinja2.nodes.Name(name=name) | jinja2.nodes.Getattr(attr=name):
            return name == "content"
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value=name)):
            return name == "content"
    return False
