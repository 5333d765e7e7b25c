"""Tiny models of every family against reference logits and greedy tokens.

Prompts have 5 to 600 tokens: windows and scaled rotations do not show in the short ones. Tolerances
are the references' own, 5e-4 on logits and 2e-3 on checksums; every greedy token must agree.
"""

import json

import numpy as np
import pytest
from model_runs import BUCKET, Row, greedy
from tiny_checkpoints import DATA

from jaxserve import models
from jaxserve.models.config import Backend
from jaxserve.models.loaders.checkpoint import read_config
from jaxserve.models.loaders.safetensors_file import read_json
from jaxserve.pallas_kernels.linear import api as linear_op

CARRIED = ("llama_llama3", "qwen2_window", "gemma3_text")
OTHERS = (
    "llama_llama3-sharded", "llama_linear", "llama_yarn", "qwen2", "qwen3", "qwen3-bf16",
    "qwen3-sharded", "mistral", "gemma2", "olmo2", "granite", "smollm3", "phi3_window",
)  # fmt: skip
PROMPTS = ("short", "crossing", "medium", "long")
CHUNK = {"short": 3, "crossing": 64, "medium": 33, "long": 64}


def folder_of(name, request):
    if name in CARRIED:
        return DATA / name
    return request.getfixturevalue("shared") / "goldens" / "tiny" / name


@pytest.fixture(scope="module")
def loaded():
    """Models already loaded in this module, by folder and layout."""
    return {}


def load(loaded, folder, stacked):
    key = folder, stacked
    if key not in loaded:
        loaded[key] = models.load(folder, backend=Backend(stacked=stacked))
    return loaded[key]


def run(model, gold, chunk, sizes=(1, BUCKET)):
    row = Row(model, 640, sizes)  # one cache size for all prompts: one compilation
    logits = row.feed(gold["ids"], chunk)
    return logits, *greedy(row, logits[-1], len(gold["greedy_ids"]))


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", CARRIED + OTHERS)
def test_logits_and_greedy_tokens(name, prompt, request, loaded):
    """Layers unrolled and decoded by a program of its own in the three families where the next test
    scans them; scanned and decoded by the prompt's program in the others: that compiles sooner."""
    folder = folder_of(name, request)
    gold = read_json(folder / "goldens.json")["prompts"][prompt]
    model = load(loaded, folder, stacked=name not in CARRIED)
    sizes = (1, BUCKET) if name in CARRIED else (BUCKET,)
    logits, ids, logprobs = run(model, gold, CHUNK[prompt], sizes)
    rows = logits[gold["positions"]]
    best = np.take_along_axis(rows, np.array(gold["top_ids"]), 1)
    np.testing.assert_allclose(best, gold["top_logits"], atol=5e-4, rtol=0)
    sums = rows @ np.cos(np.arange(rows.shape[1]))
    np.testing.assert_allclose(sums, gold["checksum"], atol=2e-3, rtol=0)
    assert ids == gold["greedy_ids"]
    np.testing.assert_allclose(logprobs, gold["greedy_logprobs"], atol=5e-4, rtol=0)


@pytest.mark.parametrize("name", CARRIED)
def test_scanned_layers_agree_with_unrolled(name, request, loaded):
    folder = folder_of(name, request)
    gold = read_json(folder / "goldens.json")["prompts"]["medium"]
    logits, ids, _ = run(load(loaded, folder, True), gold, 64, (BUCKET,))
    unrolled, *_ = run(load(loaded, folder, False), gold, 64)
    np.testing.assert_allclose(logits, unrolled, atol=2e-4, rtol=0)
    assert ids == gold["greedy_ids"]


@pytest.mark.skipif(linear_op.choose_backend("cpu") != "cpu", reason="no native library here")
@pytest.mark.parametrize("name", ("llama_llama3", "gemma3_text"))
def test_native_operations_give_the_same_tokens(name, request):
    folder = folder_of(name, request)
    model = models.load(folder, backend=Backend(attention="cpu", linear="cpu", stacked=True))
    gold = read_json(folder / "goldens.json")["prompts"]["medium"]
    logits, ids, _ = run(model, gold, 64)
    best = np.take_along_axis(logits[gold["positions"]], np.array(gold["top_ids"]), 1)
    np.testing.assert_allclose(best, gold["top_logits"], atol=5e-4, rtol=0)
    assert ids == gold["greedy_ids"]


@pytest.mark.parametrize("name", [name for name in CARRIED + OTHERS if "-" not in name])
def test_both_spellings_of_a_config_mean_the_same_model(name, request):
    folder = folder_of(name, request)
    today, published = (
        read_config(read_json(folder / file)) for file in ("config.json", "config_published.json")
    )
    assert today == published


def test_end_tokens_come_from_every_file(loaded):
    folder = DATA / "llama_llama3"
    assert load(loaded, folder, False).eos_ids == {2, 5, 6}


def test_dynamic_rope_is_refused_by_name(tmp_path):
    config = json.loads((DATA / "llama_llama3" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="dynamic"):
        models.load(tmp_path, backend=Backend())


@pytest.mark.parametrize("file", ("config.json", "config_published.json"))
def test_the_dynamic_reference_model_is_refused(shared, file):
    with pytest.raises(ValueError, match="dynamic"):
        read_config(read_json(shared / "goldens" / "tiny" / "llama_dynamic" / file))
