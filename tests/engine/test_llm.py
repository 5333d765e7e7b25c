"""The offline API: requests share an engine, and each gets what is its own."""

import itertools
import types

import pytest

from jaxserve import LLM, SamplingParams
from tests.engine.harness import IdTokenizer, make_core

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [1, 2, 3], [40, 50, 60, 70], list(range(100, 130))


@pytest.fixture
def llm(tiny_model, monkeypatch):
    core = make_core(tiny_model)
    engine = types.SimpleNamespace(
        core=core, tokenizer=IdTokenizer(), config=None, warm_up=lambda: None
    )
    monkeypatch.setattr("jaxserve.engine.start.build", lambda *_, **__: engine)
    yield LLM()
    assert not core.has_work and core.output.num_open == 0


@pytest.fixture
def alone(llm):
    """What each prompt gives by itself."""
    return [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def tokens_of(deltas) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_streams_read_in_turns_keep_apart(llm, alone):
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    turns = list(itertools.zip_longest(first, second))
    for column, want in zip(zip(*turns), alone):
        assert tokens_of(delta for delta in column if delta is not None) == want


def test_generate_in_the_middle_of_a_stream(llm, alone):
    stream = llm.stream(PROMPTS[0], GREEDY)
    read = tokens_of([next(stream)])
    outputs = llm.generate(PROMPTS[1:], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == alone[1:]
    assert read + tokens_of(stream) == alone[0]


def test_a_stream_closed_early_takes_nothing_from_another(llm, alone):
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    read = tokens_of([next(second)])
    next(first)
    first.close()
    assert read + tokens_of(second) == alone[1]
