"""Loading: every tensor used once, every parameter filled once, or one report of the faults."""

import logging

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from model_runs import Row
from tiny_checkpoints import (
    GEMMA3,
    LLAMA,
    QWEN2,
    random_tensors,
    write_folder,
    write_gguf,
    write_shards,
)  # fmt: skip

from jaxserve import models
from jaxserve.models.config import Backend
from jaxserve.models.loaders.checkpoint import halves_from_pairs

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def load(path, **options):
    return models.load(path, backend=options.pop("backend", Backend()), **options)


def logits(model):
    return Row(model, 16, sizes=(1, 8)).feed(IDS)


# ---- what a folder may not bring ----------------------------------------------------------------


def test_no_code_of_a_folder_runs(tmp_path):
    config = LLAMA | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}
    write_folder(tmp_path, config, random_tensors(config))
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_are_not_read(tmp_path):
    write_folder(tmp_path, LLAMA, random_tensors(LLAMA))
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="safetensors"):
        load(tmp_path)


# ---- names and shapes (B060) --------------------------------------------------------------------


def test_one_report_names_everything_that_is_wrong(tmp_path):
    tensors = random_tensors(LLAMA)
    tensors["model.layers.0.mlp.renamed.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    del tensors["model.norm.weight"]
    tensors["model.layers.9.extra"] = np.ones(3, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :-1].copy()
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.ones((32, 32), np.int8)
    with pytest.raises(ValueError, match="do not match") as caught:
        load(write_folder(tmp_path, LLAMA, tensors))
    report = str(caught.value)
    assert report.startswith(f"{tmp_path}: 6 tensors")
    for line in (
        "missing: model.layers.0.mlp.up_proj.weight (48, 32)",
        "missing: model.norm.weight (32,)",
        "unexpected: model.layers.0.mlp.renamed.weight (48, 32)",
        "unexpected: model.layers.9.extra (3,)",
        "misshaped: lm_head.weight is (64, 31), the model has (64, 32)",
        "not floating point: model.layers.1.self_attn.q_proj.weight is I8",
    ):
        assert line in report


def test_a_bias_the_config_does_not_know_is_not_dropped(tmp_path):
    tensors = random_tensors(LLAMA | {"attention_bias": True})
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.0\.self_attn\.k_proj\.bias"):
        load(write_folder(tmp_path, LLAMA, tensors))


def test_saved_rope_buffers_are_no_weights(tmp_path):
    tensors = random_tensors(LLAMA)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load(write_folder(tmp_path, LLAMA, tensors)).weight_bytes > 0


def test_shards_and_bfloat16_give_the_same_model(tmp_path):
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in random_tensors(LLAMA).items()}
    single = load(write_folder(tmp_path / "one", LLAMA, rounded))
    parts = load(write_shards(tmp_path / "two", LLAMA, rounded, cut=9))
    np.testing.assert_array_equal(logits(single), logits(parts))
    wide = {k: v.astype(np.float32) for k, v in rounded.items()}
    np.testing.assert_array_equal(
        logits(single), logits(load(write_folder(tmp_path / "w", LLAMA, wide)))
    )
    assert single.fingerprint == parts.fingerprint


def test_the_fingerprint_follows_the_weights(tmp_path):
    prints = {
        load(write_folder(tmp_path / str(seed), LLAMA, random_tensors(LLAMA, seed))).fingerprint
        for seed in (0, 0, 1)
    }
    assert len(prints) == 2


def test_progress_ends_at_the_total(tmp_path):
    calls = []
    load(write_folder(tmp_path, LLAMA), progress=lambda *call: calls.append(call))
    done = [call[1] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][2]
    assert {call[0] for call in calls} == set(random_tensors(LLAMA))


# ---- tied embeddings (B059) ---------------------------------------------------------------------

TIED, UNTIED = LLAMA | {"tie_word_embeddings": True}, LLAMA


@pytest.fixture
def parts():
    tensors = random_tensors(UNTIED)
    head = tensors.pop("lm_head.weight")
    return tensors, head


def with_head(tensors, head):
    return tensors | {"lm_head.weight": head}


def test_tied_without_a_head_uses_the_embedding(tmp_path, parts):
    tensors, _ = parts
    tied = load(write_folder(tmp_path / "a", TIED, tensors))
    embedding = tensors["model.embed_tokens.weight"]
    spelt_out = load(write_folder(tmp_path / "b", UNTIED, with_head(tensors, embedding)))
    np.testing.assert_array_equal(logits(tied), logits(spelt_out))
    assert "lm_head" not in tied.params


def test_tied_with_another_head_follows_the_config_and_warns(tmp_path, parts, caplog):
    tensors, head = parts
    with caplog.at_level(logging.WARNING):
        both = load(write_folder(tmp_path / "a", TIED, with_head(tensors, head)))
    assert "lm_head.weight differs" in caplog.text
    np.testing.assert_array_equal(
        logits(both), logits(load(write_folder(tmp_path / "b", TIED, tensors)))
    )


def test_tied_with_the_same_head_is_quiet(tmp_path, parts, caplog):
    tensors, _ = parts
    load(write_folder(tmp_path, TIED, with_head(tensors, tensors["model.embed_tokens.weight"])))
    assert not caplog.records


def test_untied_uses_its_own_head(tmp_path, parts):
    tensors, head = parts
    own = logits(load(write_folder(tmp_path / "a", UNTIED, with_head(tensors, head))))
    tied = logits(load(write_folder(tmp_path / "b", TIED, tensors)))
    assert np.abs(own - tied).max() > 0.1


def test_untied_without_a_head_is_an_error(tmp_path, parts):
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight(.|\n)*tie_word_embeddings"):
        load(write_folder(tmp_path, UNTIED, parts[0]))


def test_an_absent_flag_means_the_architecture_default(tmp_path, parts):
    absent = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    with pytest.raises(ValueError, match="missing: lm_head"):
        load(write_folder(tmp_path / "a", absent, parts[0]))
    gemma = {key: value for key, value in GEMMA3.items() if key != "tie_word_embeddings"}
    assert load(write_folder(tmp_path / "b", gemma)).config.tied


# ---- end tokens (B062) --------------------------------------------------------------------------

TOKENIZER = {"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>"}}}
FILES = {"generation_config": {"eos_token_id": [0, 5]}, "tokenizer_config": TOKENIZER}


@pytest.mark.parametrize(
    ("config_eos", "files", "want"),
    [
        (0, FILES, {0, 2, 5}),
        (None, FILES, {0, 2, 5}),
        (0, {"tokenizer_config": TOKENIZER}, {0, 2}),
        (7, {"generation_config": {"eos_token_id": [0, 5]}}, {0, 5, 7}),
        ([1, 7], {}, {1, 7}),
        (None, {}, set()),
    ],
)
def test_end_tokens_are_the_union_of_all_files(tmp_path, config_eos, files, want):
    folder = write_folder(tmp_path, LLAMA | {"eos_token_id": config_eos}, **files)
    assert load(folder).eos_ids == want


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {}}},
        {"added_tokens": [], "model": {"vocab": {"<end>": 9}}},
    ],
)
def test_an_end_token_given_as_text_is_looked_up(tmp_path, tokenizer):
    settings = {"eos_token": {"content": "<end>", "lstrip": False}}
    folder = write_folder(tmp_path, LLAMA, tokenizer_config=settings, tokenizer=tokenizer)
    assert load(folder).eos_ids == {2, 9}


@pytest.mark.parametrize("bad", ["2", [2, None], -1, 1.5, True])
def test_end_tokens_that_are_none_are_an_error(tmp_path, bad):
    with pytest.raises(ValueError, match="eos_token_id"):
        load(write_folder(tmp_path, LLAMA | {"eos_token_id": bad}))


def test_gguf_end_tokens_include_turn_ends(tmp_path):
    tokens = ["a", "<|im_end|>", "</s>", "<|im_end|>x", "<|eot_id|>"] + ["b"] * 59
    types = [1, 3, 3, 3, 1] + [1] * 59  # the last name is an ordinary token here
    path = write_gguf(
        tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), tokens=tokens, token_types=types
    )
    assert load(path).eos_ids == {1, 2}


# ---- GGUF (B065) --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_gguf_gives_the_model_it_was_made_from(tmp_path, config):
    tensors = random_tensors(config)
    original = load(write_folder(tmp_path / "hf", config, tensors))
    exported = load(write_gguf(tmp_path / "x.gguf", config, tensors))
    assert exported.config == original.config
    for ours, theirs in zip(jax.tree.leaves(exported.params), jax.tree.leaves(original.params)):
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(logits(exported), logits(original))


def test_rows_are_put_back_in_llama_files_only(tmp_path):
    """The llama file stores its rows in another order, or the test above would show nothing."""
    from jaxserve.models.loaders.gguf_file import read_gguf

    for config, moved in ((LLAMA, True), (QWEN2, False)):
        tensors = random_tensors(config)
        file = read_gguf(write_gguf(tmp_path / "x.gguf", config, tensors))
        stored = file.tensors["blk.0.attn_k.weight"].float32()
        original = tensors["model.layers.0.self_attn.k_proj.weight"]
        assert np.array_equal(stored, original) is not moved


def test_row_order_by_hand():
    assert halves_from_pairs(2, 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_encoded_gguf_is_the_model_of_its_rounded_weights(tmp_path, kind):
    config = LLAMA | {"intermediate_size": 64}
    tensors = random_tensors(config)
    number = gguf.GGMLQuantizationType[kind]
    round_trip = lambda a: gguf.quants.dequantize(gguf.quants.quantize(a, number), number)
    rounded = {k: round_trip(a) if a.ndim == 2 else a for k, a in tensors.items()}
    want = logits(load(write_folder(tmp_path / "hf", config, rounded)))
    path = write_gguf(tmp_path / "x.gguf", config, tensors, kind=kind)
    for weight_dtype in ("auto", "int8") if kind == "Q8_0" else ("auto",):
        np.testing.assert_allclose(logits(load(path, weight_dtype=weight_dtype)), want, atol=2e-5)


def test_q8_0_keeps_every_weight_within_a_hundredth(tmp_path):
    config = LLAMA | {"intermediate_size": 64}
    tensors = random_tensors(config)
    path = write_gguf(tmp_path / "x.gguf", config, tensors, kind="Q8_0")
    layer = load(path, weight_dtype="float32").params["layers"][0]
    for name in "qk":
        want = tensors[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert 0 < np.abs(np.asarray(layer[name]) - want).max() < 1e-2


def test_gguf_settings_we_do_not_have_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA))
    content = path.read_bytes().replace(b"llama.rope.freq_base", b"llama.rope.freq_bass")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"rope\.freq_bass"):
        load(path)


def test_gguf_architectures_we_do_not_have_are_refused_by_name(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA))
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(ValueError, match="mamba"):
        load(path)


# ---- forms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
def test_weight_dtypes(tmp_path, stacked):
    folder, backend = write_folder(tmp_path, LLAMA), Backend(stacked=stacked)
    sizes = {}
    for weight_dtype in ("float32", "bfloat16", "int8"):
        model = load(folder, weight_dtype=weight_dtype, backend=backend)
        assert weight_dtype in model.weight_dtype
        sizes[weight_dtype] = model.weight_bytes
        shape = (2, 48, 32) if stacked else (48, 32)
        assert (model.params["layers"] if stacked else model.params["layers"][0])[
            "up"
        ].shape == shape
    assert sizes["int8"] < sizes["bfloat16"] < sizes["float32"]
    with pytest.raises(ValueError, match="weight_dtype"):
        load(folder, weight_dtype="float16")


def test_int8_activations_need_native_code(tmp_path):
    write_folder(tmp_path, LLAMA, random_tensors(LLAMA))
    with pytest.raises(ValueError, match="use bfloat16"):
        load(tmp_path, dtype="int8")


def test_norms_and_biases_stay_float32(tmp_path):
    model = load(write_folder(tmp_path, QWEN2), weight_dtype="bfloat16")
    layer = model.params["layers"][0]
    assert layer["q"].dtype == jnp.bfloat16
    assert layer["q_bias"].dtype == layer["attn_norm"].dtype == jnp.float32


def test_multimodal_names_lose_their_prefix_and_their_tower(tmp_path):
    tensors = random_tensors(GEMMA3)
    plain = load(write_folder(tmp_path / "plain", GEMMA3, tensors))
    outer = {"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {"hidden_size": 8}}
    tower = {"vision_tower.x.weight": np.ones(3, np.float32)}
    old = {f"language_model.{name}": array for name, array in tensors.items()} | tower
    new = {name.replace("model.", "model.language_model.", 1): a for name, a in tensors.items()}
    for folder, names in (("old", old), ("new", new)):
        model = load(write_folder(tmp_path / folder, outer, names))
        np.testing.assert_array_equal(logits(model), logits(plain))
