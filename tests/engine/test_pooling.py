"""Hidden states pooled by the step programs: what they are, whatever the chunks and the company."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.types import FinishReason, RequestRefused, SamplingParams
from tests.engine.harness import make_core, request, run

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88, 41, 97, 17, 5]


def pooled(name, prompt, kind):
    return request(name, prompt, max_tokens=0, pooling=kind)


def test_the_last_state_gives_the_next_token(tiny_model):
    core = make_core(tiny_model)
    asked = [pooled("p", PROMPT, "last"), request("g", PROMPT, max_tokens=1, logprobs=1)]
    answers = run(core, asked)
    found, state = answers["p", 0], core.runner
    assert found.tokens == [] and found.finish is FinishReason.LENGTH
    logits_SV = state.spec.family.logits(
        state.params, state.spec.model_config, jnp.asarray(found.pooled)[None]
    )
    logprobs_V = np.asarray(logits_SV[0]) - np.logaddexp.reduce(np.asarray(logits_SV[0]))
    (token,) = answers["g", 0].tokens
    assert np.argmax(logprobs_V) == token
    assert logprobs_V[token] == pytest.approx(answers["g", 0].logprobs[0].logprob, abs=1e-4)


def test_the_mean_is_that_of_the_states_at_every_position(tiny_model):
    asked = [pooled(n, PROMPT[: n + 1], "last") for n in range(len(PROMPT))]
    states = [answer.pooled for answer in run(make_core(tiny_model), asked).values()]
    (mean,) = run(make_core(tiny_model), [pooled("m", PROMPT, "mean")]).values()
    np.testing.assert_allclose(mean.pooled, np.mean(states, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pipelined", [False, True])
def test_chunks_company_and_preemption_change_no_bit(tiny_model, pipelined):
    kinds = ("mean", "last", "mean")
    alone = [run(make_core(tiny_model), [pooled(0, PROMPT, kind)])["0", 0] for kind in kinds]
    others = [
        request(f"o{i}", [i + 7] * 30, max_tokens=60, temperature=1.0, seed=i) for i in range(6)
    ]
    asked = [*others, *[pooled(n, PROMPT, kind) for n, kind in enumerate(kinds)]]
    core = make_core(tiny_model, budget=8, pool_pages=20, pipelined=pipelined)
    answers = run(core, asked, arrivals=[0] * 6 + [9, 4, 30])
    assert core.scheduler.stats().preemptions > 0
    for n, expected in enumerate(alone):
        assert answers[str(n), 0].pooled.tobytes() == expected.pooled.tobytes()
        assert answers[str(n), 0].cached == 0 or kinds[n] == "last"


def test_cached_prefixes_serve_last_and_are_not_asked_for_means(tiny_model):
    core = make_core(tiny_model)
    first = run(core, [pooled("a", PROMPT, "mean"), pooled("b", PROMPT, "last")])
    again = run(core, [pooled("c", PROMPT, "mean"), pooled("d", PROMPT, "last")])
    assert again["c", 0].cached == 0 and again["d", 0].cached == 16
    assert again["c", 0].pooled.tobytes() == first["a", 0].pooled.tobytes()
    np.testing.assert_allclose(again["d", 0].pooled, first["b", 0].pooled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("params", [{"pooling": "max", "max_tokens": 0}, {"pooling": "mean"}])
def test_what_cannot_be_pooled_is_refused(params):
    with pytest.raises(RequestRefused, match="pooling"):
        SamplingParams(**params)
