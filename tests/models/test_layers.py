"""Blocks against a dense float64 oracle, and how run_layers cuts a model into scans."""

import jax.numpy as jnp
import numpy as np
import pytest
from dense_oracle import inverse_frequencies, logits
from model_runs import Row
from tiny_checkpoints import GEMMA3, LLAMA, random_tensors, write_folder

from jaxserve import models
from jaxserve.models.config import Backend, LayerSpec
from jaxserve.models.layers import repeated_patterns


def ids(count, vocab=64):
    return np.random.default_rng(7).integers(0, vocab, count).tolist()


def compare(folder, config, count, layers, *, chunk, decode=0, stacked=False, **oracle):
    """Feeds count - decode tokens in chunks and the rest one by one; all logits must agree."""
    tensors, tokens = random_tensors(config), ids(count)
    model = models.load(write_folder(folder, config, tensors), backend=Backend(stacked=stacked))
    row = Row(model, 528, sizes=(1, chunk))
    got = [row.feed(tokens[: count - decode])] + [row.feed([t]) for t in tokens[count - decode :]]
    want = logits(
        tensors,
        tokens,
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        eps=config["rms_norm_eps"],
        layers=layers,
        **oracle,
    )
    np.testing.assert_allclose(np.concatenate(got), want, atol=2e-4, rtol=0)
    return model


def test_heads_wider_than_the_hidden_size(tmp_path):
    """B055: hidden 48, 4 heads of 32, 2 KV heads."""
    config = LLAMA | {"hidden_size": 48, "head_dim": 32}
    layers = [(inverse_frequencies(10000.0, 32), None)] * 2
    model = compare(tmp_path, config, 20, layers, chunk=8, decode=3)
    assert model.params["layers"][0]["q"].shape == (128, 48)
    assert model.params["layers"][0]["o"].shape == (48, 128)
    assert model.config.kv_spec(16, np.float32).head_dim == 32


@pytest.mark.parametrize("config", [LLAMA, GEMMA3])
def test_padding_is_zeros_to_the_end(tmp_path, config):
    """Native matmuls pass over it. The last token's embedding, which -1 would pick, is not used."""
    model = models.load(write_folder(tmp_path, config, random_tensors(config)), backend=Backend())
    token_ids = jnp.asarray([5, 63, 7, -1, -1], jnp.int32)

    def attend(q_THE, k_TJE, v_TJE, kv_pages, **_):
        real_T = jnp.arange(5, dtype=jnp.int32) < 3
        return jnp.where(real_T[:, None, None], q_THE, 0), kv_pages

    positions = jnp.arange(5, dtype=jnp.int32)
    hidden_TD, _ = model.family.forward(
        model.params, model.config, token_ids, positions, None, attend
    )
    np.testing.assert_array_equal(np.asarray(hidden_TD != 0).any(axis=1), [1, 1, 1, 0, 0])


@pytest.mark.parametrize("spelling", ["top", "in rope_parameters"])
def test_a_quarter_of_each_head_turns(tmp_path, spelling):
    """B052: at 4 tokens a whole turning head looks almost right, at 512 it does not."""
    part = {"partial_rotary_factor": 0.25}
    changes = part if spelling == "top" else {"rope_parameters": {"rope_theta": 1e4, **part}}
    config = LLAMA | {"head_dim": 64} | changes
    layers = [(inverse_frequencies(10000.0, 16), None)] * 2
    compare(tmp_path, config, 512, layers, chunk=128, decode=4)


@pytest.mark.parametrize("stacked", [False, True])
def test_local_and_global_layers_keep_their_own_settings(tmp_path, stacked):
    """B057: windows of 8 and base 1e4 in local layers, base 1e6 over 8 in global ones; 40 tokens in
    chunks of 6, then 10 one by one. At each the window counts the token itself."""
    config = GEMMA3 | {
        "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2,
        "rope_local_base_freq": 10000.0, "rope_theta": 1e6, "query_pre_attn_scalar": 12,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }  # fmt: skip
    local = inverse_frequencies(10000.0, 8), 8
    everything = inverse_frequencies(1e6, 8) / 8, None
    compare(
        tmp_path,
        config,
        50,
        [local, everything] * 2,
        chunk=6,
        decode=10,
        stacked=stacked,
        scale=12**-0.5,
        gemma=True,
    )


LOCAL, GLOBAL = LayerSpec(8, None), LayerSpec(None, None)


@pytest.mark.parametrize(
    ("layers", "pieces"),
    [
        ([GLOBAL] * 30, [(0, 1, 30)]),
        ([LOCAL] * 5 + [GLOBAL], [(0, 1, 5), (5, 1, 1)]),
        (([LOCAL] * 5 + [GLOBAL]) * 5 + [LOCAL] * 4, [(0, 6, 5), (30, 1, 4)]),
        ([GLOBAL] * 14 + [LOCAL] * 14, [(0, 1, 14), (14, 1, 14)]),
        ([LOCAL, GLOBAL] * 13, [(0, 2, 13)]),
        ([LOCAL], [(0, 1, 1)]),
    ],
)
def test_repeated_patterns(layers, pieces):
    assert repeated_patterns(layers) == pieces


def test_pieces_cover_every_layer_once_and_in_order():
    generator = np.random.default_rng(0)
    for _ in range(50):
        layers = [
            LOCAL if local else GLOBAL
            for local in generator.random(generator.integers(1, 40)) < 0.6
        ]
        order = []
        for start, period, repeats in repeated_patterns(layers):
            for repeat in range(repeats):
                begin = start + repeat * period
                assert layers[begin : begin + period] == layers[start : start + period]
                order += range(begin, begin + period)
        assert order == list(range(len(layers)))
