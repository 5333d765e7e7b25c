"""lm-eval's local-completions model against the server: scores by echo and logprobs, and texts.

The first test is the exchange it makes, by hand; the second runs lm-eval itself where it is
installed (pip install "jaxserve[lm-eval]"), and compares.
"""

import json

import pytest
from test_real_engine import stack  # noqa: F401

from tests.conftest import DATA, ROOT
from tests.server.conftest import http

TASKS = DATA / "lm_eval"
DOCS = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text().splitlines()]


def scores(url, context, continuation):
    """(sum of log-probabilities, whether it is greedy), by lm-eval's requests and arithmetic."""
    encode = lambda text: http.post(
        url + "/tokenize", json={"prompt": text, "add_special_tokens": False}
    ).json()["tokens"]
    before, whole = len(encode(context)), encode(context + continuation)
    body = {"model": "tiny", "prompt": [whole], "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True}  # fmt: skip
    (choice,) = http.post(url + "/v1/completions", json=body).json()["choices"]
    part = slice(before, -1)
    tokens = choice["logprobs"]["token_logprobs"][part]
    best = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][part]]
    assert len(tokens) == len(whole) - before
    return sum(tokens), tokens == best


def test_what_it_asks_of_a_server(stack):  # noqa: F811
    info = http.get(stack.url + "/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert "<|im_start|>" in info["chat_template"]
    assert http.post(stack.url + "/detokenize", json={"tokens": [72, 105]}).json() == {
        "prompt": "Hi"
    }
    found = scores(stack.url, "The capital of Peru is", " Lima")
    assert found[0] < 0 and found == scores(stack.url, "The capital of Peru is", " Lima")
    body = {"prompt": ["The capital"], "model": "tiny", "max_tokens": 8, "temperature": 0,
            "stop": [".", ","], "seed": 1234}  # fmt: skip
    (choice,) = http.post(stack.url + "/v1/completions", json=body).json()["choices"]
    assert isinstance(choice["text"], str)


@pytest.mark.slow
def test_lm_eval_itself(stack, monkeypatch):  # noqa: F811
    lm_eval = pytest.importorskip("lm_eval", reason='needs pip install "jaxserve[lm-eval]"')
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(ROOT)  # the tasks name their data from here
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": stack.url + "/v1/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": 4,
            "max_length": 256,
        },
        tasks=["capitals", "capitals_said"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    right = []
    for sample in results["samples"]["capitals"]:
        doc = sample["doc"]
        context = f"The capital of {doc['country']} is"
        expected = [scores(stack.url, context, " " + choice) for choice in doc["choices"]]
        found = [resp[0] for resp in sample["resps"]]
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        assert [total for total, _ in found] == pytest.approx([total for total, _ in expected])
        totals = [total for total, _ in expected]
        right.append(totals.index(max(totals)) == doc["label"])
    assert len(right) == len(DOCS)
    assert results["results"]["capitals"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert len(results["samples"]["capitals_said"]) == len(DOCS)
