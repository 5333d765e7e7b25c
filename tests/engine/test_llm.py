"""The offline API: requests share an engine, and each gets what is its own."""

import concurrent.futures
import itertools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.types import RequestRefused
from tests.engine.harness import VOCAB, IdTokenizer, make_core

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


@pytest.mark.parametrize(
    "form",
    [
        np.array, tuple, lambda ids: np.array(ids, np.uint16), lambda ids: list(np.array(ids)),
        jnp.array, lambda ids: {"prompt_token_ids": np.array(ids)},
    ],
)  # fmt: skip
def test_ids_in_every_form(llm, alone, form):
    outputs = llm.generate(form(PROMPTS[0]), GREEDY)
    outputs += llm.generate([form(prompt) for prompt in PROMPTS], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [alone[0], *alone]
    assert all(type(token) is int for token in outputs[0].prompt_token_ids)


@pytest.mark.parametrize(
    "prompt, says",
    [
        (np.array([[1, 2], [3, 4]]), r"array of int64 with shape \(2, 2\)"),
        (np.array([1.0, 2.0]), "array of float64"), (np.array([True]), "array of bool"),
        (np.array(7), r"shape \(\)"), ([True, 2], "of type bool"), ([1, 2.0], "of type float"),
        ([1, "a"], "of type str"), ([None], "None is no prompt"), ([1, VOCAB], "between 0 and 383"),
        ([1, -1], "between 0 and 383"), ([1, 2**70], "between 0 and 383"), ([[]], "no tokens"),
        (np.array([], np.int32), "no tokens"), ({"text": "a"}, "None is no prompt"),
        ([b"a"], "is no prompt"),
    ],
)  # fmt: skip
def test_what_is_no_prompt_is_refused_and_says_why(llm, prompt, says):
    with pytest.raises(RequestRefused, match=says) as refused:
        llm.generate(prompt, GREEDY)
    assert refused.value.param == "prompt"


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


def test_threads_share_it(llm, alone):
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        batches = [pool.submit(llm.generate, PROMPTS, GREEDY) for _ in range(3)]
        streams = [pool.submit(lambda p: list(llm.stream(p, GREEDY)), p) for p in PROMPTS]
    for batch in batches:
        assert [output.outputs[0].token_ids for output in batch.result()] == alone
    assert [tokens_of(stream.result()) for stream in streams] == alone


def test_any_number_of_prompts_may_wait(monkeypatch):
    configs = []
    monkeypatch.setattr(
        "jaxserve.engine.start.build", lambda config, *_, **__: configs.append(config)
    )
    for settings in {}, {"max_queued": 5}:
        with pytest.raises(AttributeError):  # there is no engine
            LLM(**settings)
    config, chosen = configs
    assert min(config.max_queued, config.max_queued_tokens) > 10**12 and chosen.max_queued == 5


def test_what_is_no_sampling_params_is_refused(llm):
    for params in {"max_tokens": 3}, [None]:
        with pytest.raises(TypeError, match="is no SamplingParams"):
            llm.generate([[1, 2]], params)
    with pytest.raises(TypeError, match="None is no SamplingParams"):
        next(llm.stream([1, 2], None))


def test_a_chat_with_no_conversations_is_empty(llm):
    assert llm.chat([]) == llm.generate([]) == []


def test_a_stream_closed_early_takes_nothing_from_another(llm, alone):
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    read = tokens_of([next(second)])
    next(first)
    first.close()
    assert read + tokens_of(second) == alone[1]
