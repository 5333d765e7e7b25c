"""Configs in all their spellings: what is read, what is defaulted, and what stops the load."""

import pytest
from tiny_checkpoints import DATA, GEMMA3, LLAMA, QWEN2

from jaxserve.models import families
from jaxserve.models.config import text_config
from jaxserve.models.loaders.checkpoint import read_config
from jaxserve.models.loaders.safetensors_file import read_json
from jaxserve.models.spec import walk


def parse(base, **changes):
    return read_config({key: value for key, value in (base | changes).items() if value is not ...})[
        1
    ]


def windows(config):
    return [layer.window for layer in config.layers]


# ---- one setting, many spellings ----------------------------------------------------------------

THETA = 100000.0
SPELLINGS = {
    "published": dict(rope_theta=THETA),
    "today": dict(rope_theta=..., rope_parameters={"rope_theta": THETA, "rope_type": "default"}),
    "by layer type": dict(
        rope_theta=..., rope_parameters={"full_attention": {"rope_theta": THETA}}
    ),
    "in rope_scaling": dict(rope_theta=..., rope_scaling={"rope_theta": THETA, "type": "default"}),
    "several times": dict(rope_theta=THETA, rope_parameters={"rope_theta": THETA}),
}


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_rope_theta_is_found_wherever_it_stands(spelling):
    """B056."""
    assert parse(LLAMA, **spelling) == parse(LLAMA, rope_theta=THETA)
    assert parse(LLAMA, **spelling) != parse(LLAMA)


def test_rope_theta_is_found_inside_text_config():
    inner = GEMMA3 | {"rope_theta": THETA}
    _, nested = read_config(
        {"model_type": "gemma3", "text_config": inner, "vision_config": {"a": 1}}
    )
    assert nested == parse(GEMMA3, rope_theta=THETA)


@pytest.mark.parametrize(
    "changes",
    [
        dict(rope_theta=1.0, rope_parameters={"rope_theta": 2.0}),
        dict(rope_theta=1.0, rope_scaling={"rope_theta": 2.0, "type": "default"}),
        dict(rope_theta=1.0, rope_parameters={"full_attention": {"rope_theta": 2.0}}),
        dict(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"factor": 4.0}),
        dict(partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 0.25}),
        dict(rope_parameters={"full_attention": {"rope_theta": 1.0}, "rope_type": "default"}),
    ],
)
def test_conflicting_rope_settings_are_an_error(changes):
    with pytest.raises(ValueError, match=r"conflicting|mixes"):
        parse(LLAMA, **changes)


def test_text_config_must_not_contradict_its_outer_part():
    with pytest.raises(ValueError, match="contradicts"):
        text_config({"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}})


# ---- families -----------------------------------------------------------------------------------


def test_head_dim_is_read_not_derived():
    """B055: heads * head_dim need not be the hidden size."""
    assert parse(LLAMA, head_dim=32).head_dim == 32
    assert parse(LLAMA, head_dim=...).head_dim == 8


def test_llama_biases_and_ties():
    config = parse(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=...)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.tied) == (
        True,
        True,
        True,
        False,
    )


def test_qwen2_windows_need_their_switch():
    off = dict(sliding_window=16, max_window_layers=1)
    assert windows(parse(QWEN2, **off)) == [None, None]
    assert windows(parse(QWEN2, **off, use_sliding_window=True)) == [None, 16]


def test_gemma3_every_sixth_layer_sees_everything():
    config = parse(GEMMA3, num_hidden_layers=8, sliding_window=16, sliding_window_pattern=6)
    assert windows(config) == [16, 16, 16, 16, 16, None, 16, 16]
    assert parse(GEMMA3, num_hidden_layers=8, sliding_window=16) == config


def test_gemma3_local_layers_keep_their_own_unscaled_rope():
    """B057: neither the scale nor the base of global layers leaks into local ones."""
    scaled = dict(
        num_hidden_layers=6, rope_theta=1e6, rope_scaling={"type": "linear", "factor": 8.0}
    )
    config = parse(GEMMA3, **scaled)
    local, everything = config.layers[0].rope, config.layers[5].rope
    assert local.inv_freq[1] == pytest.approx(10000.0**-0.25)
    assert everything.inv_freq[1] == pytest.approx(1e6**-0.25 / 8)


def test_gemma3_class_defaults_fill_short_published_configs():
    """As gemma-3-4b-it publishes itself: many settings are left to the class."""
    inner = {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }  # fmt: skip
    family, config = read_config(
        {"model_type": "gemma3", "text_config": inner, "eos_token_id": [1, 106]}
    )
    assert family.__name__.endswith("gemma3_text")
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == 262208 and config.tied
    assert windows(config).count(None) == 5
    assert config.attention_scale == 256**-0.5


def test_yarn_reaches_past_a_maximum_that_was_left_as_it_was():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert parse(QWEN2, rope_scaling=scaling).max_position_embeddings == 4096


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(model_type="mamba"), "mamba"),
        (dict(model_type=...), "model_type"),
        (dict(model_type="layers"), "layers"),
        (dict(model_type="../llama"), "llama"),
        (dict(hidden_act="sigmoid"), "sigmoid"),
        (dict(hidden_activation="gelu"), "contradicts"),
        (dict(attn_logit_softcapping=30.0), "attn_logit_softcapping"),
        (dict(quantization_config={"quant_method": "awq"}), "quantization_config"),
        (dict(num_local_experts=8), "num_local_experts"),
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (dict(a_setting_from_tomorrow=3), "a_setting_from_tomorrow"),
        (dict(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
        (dict(layer_types=["full_attention"]), "layer_types"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "sliding_window"),
        (dict(num_key_value_heads=3), "multiple"),
        (dict(hidden_size=-1), "hidden_size"),
        (dict(hidden_size="64"), "hidden_size"),
        (dict(vocab_size=...), "vocab_size"),
        (dict(attention_bias="yes"), "attention_bias"),
    ],
)
def test_what_we_do_not_do_is_refused_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        parse(LLAMA, **changes)


def test_settings_that_hold_nothing_or_touch_nothing_pass():
    idle = dict(attn_logit_softcapping=None, use_bidirectional_attention=False, a_new_switch=False)
    assert parse(LLAMA, **idle, use_cache=True, initializer_range=0.02) == parse(LLAMA)


# ---- the models people run ----------------------------------------------------------------------

LONGROPE = {"Phi-3.5-mini-instruct", "Phi-4-mini-instruct"}


@pytest.fixture
def published(shared):
    return read_json(shared / "model_configs.json")


def test_published_configs_of_known_families_give_their_dimensions(published):
    """Matrix sizes add up to the model's parameters, which pins every dimension at once."""
    for name, entry in published.items():
        raw, derived = entry["config"], entry["derived"]
        if raw.get("model_type") not in families.known() or name in LONGROPE:
            continue
        family, config = read_config(raw)
        matrices = sum(spec.size for _, spec in walk(family.param_specs(config)) if spec.matrix)
        assert matrices == derived["params_est"], name
        assert config.head_dim == derived["head_dim"], name
        if name != "Phi-3-mini-4k-instruct":  # all its layers have a window
            assert windows(config).count(None) == derived["full_attention_layers"], name


def test_published_configs_of_other_families_are_refused_by_name(published):
    refused = {}
    for name, entry in published.items():
        try:
            read_config(entry["config"])
        except ValueError as error:
            refused[name] = str(error)
    assert refused.keys() > LONGROPE
    for name, message in refused.items():
        model_type = published[name]["config"].get("model_type")
        why = "longrope" if name in LONGROPE else repr(model_type) if model_type else "model_type"
        assert why in message
        assert name in LONGROPE or model_type not in families.known()
    assert len(published) - len(refused) >= 29


def test_carried_configs_parse_without_the_large_references():
    for folder in DATA.iterdir():
        assert read_config(read_json(folder / "config.json"))[1].num_layers in (4, 6)


# ---- values of any kind -------------------------------------------------------------------------

ODD = [
    "x", [], {}, -1, 0, 1.5, True, False, [1], ["x"], {"a": 1}, float("inf"), float("nan"), 10**30,
    [[]], {"full_attention": {"rope_theta": "x"}},
]  # fmt: skip
SETTINGS = [
    *LLAMA,
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "text_config",
    "sliding_window",
]
SETTINGS += ["use_sliding_window", "max_window_layers", "partial_rotary_factor", "no_rope_layers"]
SETTINGS += ["rope_local_base_freq", "sliding_window_pattern", "query_pre_attn_scalar"]
SETTINGS += ["attn_logit_softcapping", "logits_scaling", "embedding_multiplier"]
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
    "attention_factor": None, "partial_rotary_factor": 1.0,
}  # fmt: skip


def read_or_refuse(config):
    """A config is read into something hashable or refused by ValueError; nothing else happens."""
    try:
        hash(read_config(config)[1])
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("family", families.known())
def test_odd_values_are_read_or_refused(family):
    plain = LLAMA | {"model_type": family}
    accepted = [
        (setting, value)
        for setting in SETTINGS
        for value in ODD
        if read_or_refuse(plain | {setting: value})
    ]
    assert read_or_refuse(plain)
    assert not [pair for pair in accepted if pair[0] in ("hidden_size", "vocab_size", "model_type")]


@pytest.mark.parametrize("parameter", YARN)
def test_odd_rope_values_are_read_or_refused(parameter):
    for value in ODD:
        read_or_refuse(LLAMA | {"rope_theta": None, "rope_parameters": YARN | {parameter: value}})
