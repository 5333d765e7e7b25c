"""An engine of a few lines that keeps AsyncEngine's contract, for tests of the HTTP layer alone.

Tokens are bytes: id 0..255 is that byte, then begin, end and two chat marks. Output token i of
choice c is a letter that depends on the prompt, i and c, so every test can say beforehand what
must come. Events decide when something happens: `hold()` stops all output until `release()`.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import json
import pathlib
import tempfile
import time
from types import SimpleNamespace

import numpy as np

from jaxserve.engine.core import EngineStats
from jaxserve.tokenizer import Tokenizer, load
from jaxserve.types import (
    EngineFailed,
    EngineStopped,
    FinishReason,
    OutputDelta,
    RequestRefused,
    TokenLogprob,
)

BOS, EOS, START, END, VOCAB = 256, 257, 258, 259, 260
MODEL = "fake-model"
STEP_LOGPROB = -0.5  # of every chosen token; the k-th alternative has -0.5 - k


TEMPLATE = """{% for message in messages %}{% if message.content == "refused by the template" %}
{{- raise_exception("the template refuses this conversation") }}{% endif %}<|im_start|>
{{- message.role }}\n{{ message.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
NAMES = {"<s>": BOS, "</s>": EOS, "<|im_start|>": START, "<|im_end|>": END}


def byte_alphabet() -> list[str]:
    """How byte-level vocabularies spell the bytes 0..255 (GPT-2's table)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


def write_byte_tokenizer(folder: pathlib.Path, template: str) -> None:
    """A tokenizer over bytes, as the files of a Hugging Face folder."""
    added = [
        {"id": token, "content": name, "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for name, token in NAMES.items()
    ]  # fmt: skip
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())} | NAMES
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
             "use_regex": False}  # fmt: skip
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "pre_tokenizer": level,
        "decoder": level, "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "post_processor": {
            "type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, text],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
        },
    }  # fmt: skip
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    settings |= {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """A real tokenizer over bytes, with a ChatML template, loaded from a Hugging Face folder."""
    with tempfile.TemporaryDirectory() as name:
        write_byte_tokenizer(pathlib.Path(name), TEMPLATE)
        return load(pathlib.Path(name))


def letter(prompt_sum, index, position) -> int:
    """The output token that the fake model gives: a lower-case letter."""
    return ord("a") + (prompt_sum + 7 * index + 3 * position) % 26


def text_of(prompt_ids, count, index=0) -> str:
    """What `count` tokens of one choice read as."""
    return "".join(chr(letter(sum(prompt_ids), index, i)) for i in range(count))


class FakeEngine:
    """scripts: prompt text -> bytes that choice outputs instead of letters, then ends by itself."""

    def __init__(self, max_model_len=64, max_queued=1000):
        self.tokenizer = copy.copy(byte_tokenizer())
        self.config = SimpleNamespace(max_queued=max_queued)
        self.model_name, self.max_model_len, self.vocab_size = MODEL, max_model_len, VOCAB
        self.description, self.hidden_size = "fake", 3
        self.manifest = {"model": MODEL, "config": {"num_slots": 4, "decision_log": "/private"}}
        self.state = "ready"
        self.open: dict[str, SimpleNamespace] = {}  # running requests: prompt_ids and arguments
        self.calls: list[SimpleNamespace] = []
        self.aborted: list[str] = []
        self.scripts: dict[str, bytes] = {}
        self.refusal: RequestRefused | None = None
        self.fail_at: int | None = None  # output position at which the device step fails
        self.expire_at: int | None = None  # output position at which deadlines pass
        self.burst = 1  # tokens a delta
        self.counts = EngineStats(slots=16, pages_free=100, pages_total=100)
        self.tenants = []
        self._loop = None
        self._gate = asyncio.Event()
        self._gate.set()
        self.changed = asyncio.Event()  # set whenever `open` changes

    # What tests steer

    def hold(self):
        self._gate.clear()

    def release(self):
        if self._loop is None or self._loop is _running_loop():
            self._gate.set()
        else:
            self._loop.call_soon_threadsafe(self._gate.set)

    async def until(self, condition):
        """Waits until condition() holds; it may depend on which requests are open."""
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)

    # AsyncEngine's contract

    async def generate(
        self, prompt_ids, params, *, request_id=None, tenant="", priority=0, timeout_s=None,
        cache_salt="",
    ):  # fmt: skip
        self._loop = asyncio.get_running_loop()
        if self.refusal is not None:
            raise self.refusal
        if self.state not in ("ready", "starting"):
            raise RequestRefused(f"the engine is {self.state}", code="shutting_down")
        assert all(0 <= token < VOCAB for token in prompt_ids)
        call = SimpleNamespace(
            id=request_id, prompt_ids=list(prompt_ids), params=params, tenant=tenant,
            priority=priority, timeout_s=timeout_s, cache_salt=cache_salt,
        )  # fmt: skip
        assert request_id not in self.open
        self.open[request_id] = call
        self.calls.append(call)
        self.counts.requests += 1
        self.changed.set()
        finished = False
        try:
            async for deltas in self._produce(call):
                yield deltas
            finished = True
        except EngineFailed:
            finished = True
            raise
        finally:
            del self.open[request_id]
            if not finished:
                self.aborted.append(request_id)
            self.changed.set()

    async def _produce(self, call):
        room = self.max_model_len - len(call.prompt_ids)
        limit = room if call.params.max_tokens is None else min(call.params.max_tokens, room)
        prompt = self.tokenizer.decode(call.prompt_ids)
        script = next((data for key, data in self.scripts.items() if key in prompt), None)
        choices = [_Choice(self, call, index, limit, script) for index in range(call.params.n)]
        while any(choice.finish is None for choice in choices):
            await self._gate.wait()
            await asyncio.sleep(0)
            if self.state == "stopped":
                raise EngineStopped("the engine has shut down")
            self.counts.steps += 1
            yield [choice.advance() for choice in choices if choice.finish is None]

    def abort(self, request_id):
        self.aborted.append(request_id)

    def stats(self):
        return dataclasses.replace(self.counts, running=self.counts.running or len(self.open))

    def standings(self):
        return self.tenants

    def retry_after(self):
        return 2.0 * self.counts.waiting

    def health(self):
        return SimpleNamespace(state=self.state, seconds_since_step=0.0, message="")

    def drain(self, timeout_s):
        """Called on a thread of its own, as the real one is."""
        self.state = "draining"
        end = time.monotonic() + timeout_s
        while self.open and time.monotonic() < end:
            time.sleep(0.005)
        return not self.open

    def shutdown(self):
        """Open requests end with an error."""
        self.state = "stopped"
        self.release()


class _Choice:
    def __init__(self, engine, call, index, limit, script):
        self.engine, self.call, self.index, self.limit = engine, call, index, limit
        self.prompt_sum = sum(call.prompt_ids)
        self.script = script
        self.tokens, self.text, self.sent = [], b"", 0
        self.finish = None

    def advance(self) -> OutputDelta:
        params, new = self.call.params, []
        while self.finish is None and len(new) < self.engine.burst:
            if len(self.tokens) >= self.limit:
                self.finish = FinishReason.LENGTH
                break
            new.append(self._next())
        text = self._text(params.stop) if params.stop else self._whole_characters()
        logprobs = None if params.logprobs is None else [_scored(t, params.logprobs) for t in new]
        first = len(new) == len(self.tokens)
        return OutputDelta(
            index=self.index,
            text=text,
            token_ids=new,
            logprobs=logprobs,
            finish_reason=self.finish,
            stop_reason=getattr(self, "stop_reason", None),
            prompt_logprobs=self._prompt_scores() if first and self.index == 0 else None,
            num_cached_tokens=0,
            pooled=self._pooled() if self.finish is FinishReason.LENGTH else None,
        )

    def _next(self) -> int:
        position, engine = len(self.tokens), self.engine
        if engine.fail_at == position:
            raise EngineFailed("a device step failed: XlaRuntimeError at 0x7f00deadbeef")
        if self.script is not None and position >= len(self.script):
            token, self.finish = EOS, FinishReason.STOP
        elif self.script is not None:
            token = self.script[position]
        else:
            token = letter(self.prompt_sum, self.index, position)
            while self.call.params.logit_bias.get(token) == -100:
                token += 1
        self.tokens.append(token)
        if token != EOS:
            self.text += bytes([token])
        if token in self.call.params.stop_token_ids:
            self.finish, self.stop_reason = FinishReason.STOP, token
        elif engine.expire_at is not None and len(self.tokens) >= engine.expire_at:
            self.finish = FinishReason.TIMEOUT
        elif self.finish is None and len(self.tokens) >= self.limit:
            self.finish = FinishReason.LENGTH
        return token

    def _whole_characters(self) -> str:
        whole = self.text.decode("utf-8", "ignore" if self.finish is None else "replace")
        text, self.sent = whole[self.sent :], len(whole)
        return text

    def _text(self, stops) -> str:
        """Everything is held back until the end: allowed, if unkind."""
        whole = self.text.decode("utf-8", "ignore")
        for stop in stops:
            if stop in whole and self.sent == 0:
                self.finish, self.stop_reason = FinishReason.STOP, stop
                self.sent = 1
                return whole[: whole.index(stop)]
        return whole if self.finish is not None and self.sent == 0 else ""

    def _pooled(self):
        """(3 x tokens, 4 x tokens, 0), or its opposite for last: of length 5 x tokens."""
        sign = {None: 0, "mean": 1, "last": -1}[self.call.params.pooling]
        count = sign * len(self.call.prompt_ids)
        return np.float32([3 * count, 4 * count, 0]) if count else None

    def _prompt_scores(self):
        count = self.call.params.prompt_logprobs
        if count is None:
            return None
        return [None, *(_scored(token, count) for token in self.call.prompt_ids[1:])]


def _scored(token, count) -> TokenLogprob:
    top = tuple(((token + k) % VOCAB, STEP_LOGPROB - k) for k in range(count))
    return TokenLogprob(token, STEP_LOGPROB, top)


def _running_loop():
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
