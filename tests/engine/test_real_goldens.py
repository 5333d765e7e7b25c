"""Three real checkpoints against transformers' float32 outputs, through the whole engine.

Tokens must equal the reference's as far as its own choice is certain: up to the first position
where its two best tokens are closer than the tolerance on log-probabilities. The prompts come from
the large references where they are, else from the small part that the project carries.
"""

import json

import numpy as np
import pytest

from jaxserve.llm import LLM
from jaxserve.types import SamplingParams
from tests.conftest import DATA, ROOT
from tests.real_models import real_model

TOLERANCE = 2e-3  # on log-probabilities in float32
MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "gemma3-270m")

pytestmark = [pytest.mark.real, pytest.mark.slow]


def golden_cases(name, weight_dtype):
    """All that are here; for float32 those that the project carries, because it is slow and auto,
    which is held to the same tolerance, shows any other fault."""
    path = DATA / "goldens" / f"{name}.json"
    large = ROOT.parent / "shared" / "goldens" / f"{name}.json"
    if weight_dtype != "float32" and large.is_file():
        path = large
    return json.loads(path.read_text(encoding="utf-8"))["cases"]


def load(name, weight_dtype, token_budget) -> LLM:
    """One step shape and a slot for each case: few programs to compile."""
    return LLM(
        real_model(name), weight_dtype=weight_dtype, token_budget=token_budget, num_slots=12,
        max_model_len=1024, deterministic=True, compile_cache="off",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "weight_dtype"),
    [
        *((name, "auto") for name in MODELS),
        ("smollm2-135m", "float32"),
        ("gemma3-270m", "float32"),
        # Two gigabytes. auto reads the same file, and the tiny Qwens of test_tiny_goldens.py are
        # float32.
        pytest.param("qwen2.5-coder-0.5b", "float32", marks=pytest.mark.whole),
    ],
)
def test_tokens_and_logprobs(name, weight_dtype):
    """auto may choose any form of weights that keeps to the tolerance. In small steps, so that
    prompts go in many chunks."""
    cases = golden_cases(name, weight_dtype)
    llm = load(name, weight_dtype, token_budget=16)
    for case in cases:
        assert llm.tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]
    params = SamplingParams(
        max_tokens=48, temperature=0, ignore_eos=True, logprobs=5, skip_special_tokens=False
    )
    outputs = llm.generate([case["prompt_ids"] for case in cases], params)
    for case, output in zip(cases, outputs):
        choice = output.outputs[0]
        certain = next((i for i, gap in enumerate(case["gaps"]) if gap < TOLERANCE), 48)
        assert choice.token_ids[:certain] == case["output_ids"][:certain], case["name"]
        seen = [entry.logprob for entry in choice.logprobs[:certain]]
        np.testing.assert_allclose(seen, case["logprobs"][:certain], atol=TOLERANCE, rtol=0)
        for entry, top in list(zip(choice.logprobs, case["top"]))[:certain]:
            ours = dict(entry.top)
            for token, logprob in top[:3]:  # two near-equal ones at the end may trade places
                assert ours[token] == pytest.approx(logprob, abs=TOLERANCE)
        if certain == 48:
            assert choice.text == case["output_text"]
    assert llm.engine.core.stats().compilations == 0


@pytest.mark.parametrize("name", MODELS)
def test_int8_drift_is_measured(name, capsys):
    """Scores the reference's own continuations with int8 weights, and prints how far they are. The
    longest prompt is left out: all its tokens would be scored for the sake of 48."""
    cases = [case for case in golden_cases(name, "int8") if len(case["prompt_ids"]) < 600]
    llm = load(name, "int8", token_budget=128)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    outputs = llm.generate([case["prompt_ids"] + case["output_ids"] for case in cases], params)
    drift = np.concatenate(
        [
            np.array([entry.logprob for entry in output.prompt_logprobs[-48:]]) - case["logprobs"]
            for case, output in zip(cases, outputs)
        ]
    )
    with capsys.disabled():
        print(
            f"\n{name} int8: log-probabilities off by {np.abs(drift).mean():.4f} in the mean, "
            f"{np.abs(drift).max():.3f} at most; perplexity x {np.exp(-drift.mean()):.4f}"
        )
    assert abs(drift.mean()) < 0.02  # 2 % of perplexity
