"""Gemma 3, the text decoder: norms around each block, QK norm, local layers between global ones.

Five of six layers see a window and turn with their own base; the sixth sees everything. Embeddings
are scaled by sqrt(hidden size). Checkpoints store norm weights less one; here they are factors.
"""

from __future__ import annotations

import math

from jaxserve.models import layers
from jaxserve.models.config import (
    FULL,
    SLIDING,
    ConfigKeys,
    ModelConfig,
    base_config,
    take_layer_types,
    take_rope_parameters,
    whole_number,
)

GEMMA_NORMS_HF = {
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
GEMMA_NORMS_GGUF = {
    "post_attn_norm": "blk.{}.post_attention_norm.weight",
    "post_mlp_norm": "blk.{}.post_ffw_norm.weight",
}
HF_NAMES = layers.HF_NAMES | GEMMA_NORMS_HF
GGUF_NAMES = layers.GGUF_NAMES | GEMMA_NORMS_GGUF
GGUF_ARCHITECTURES = ("gemma3",)
GGUF_PERMUTED = False
NORM_OFFSET = 1.0  # what safetensors files leave out of norm weights; GGUF files have it in

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    num_layers = keys.take_num_layers(DEFAULTS["num_hidden_layers"])
    pattern_keys = ("sliding_window_pattern", "_sliding_window_pattern")
    every = whole_number(keys.take_same(pattern_keys, 6), pattern_keys[0])
    pattern = tuple(FULL if (index + 1) % every == 0 else SLIDING for index in range(num_layers))
    hidden_size = keys.take_int("hidden_size", DEFAULTS["hidden_size"])
    attention_bias = keys.take_bool("attention_bias", False)
    return base_config(
        keys,
        model_type="gemma3_text",
        defaults=DEFAULTS,
        layer_types=take_layer_types(keys, num_layers, pattern),
        window=keys.take_int("sliding_window", 4096),
        rope_by_type=_ropes(keys),
        attention_scale=keys.take_number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=keys.take_optional_number("attn_logit_softcapping"),
        final_soft_cap=keys.take_optional_number("final_logit_softcapping"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
        embed_scale=math.sqrt(hidden_size),
    )


def _ropes(keys: ConfigKeys) -> dict:
    """Local layers have a base of their own, unscaled; a flat rope belongs to the global ones."""
    groups = take_rope_parameters(keys, DEFAULTS["rope_theta"])
    local = keys.take_optional_number("rope_local_base_freq")
    if None in groups:
        groups[FULL] = groups.pop(None)
    if SLIDING not in groups:
        groups[SLIDING] = {"rope_theta": 10000.0 if local is None else local}
    elif local is not None and groups[SLIDING]["rope_theta"] != local:
        raise ValueError(f"conflicting rope settings: rope_local_base_freq={local}, {groups}")
    return groups


def layer_specs(config: ModelConfig) -> dict:
    outer = ("post_attn_norm", "post_mlp_norm")
    return layers.pre_norm_specs(config) | {
        name: layers.norm_spec(config.hidden_size) for name in outer
    }


def param_specs(config: ModelConfig) -> dict:
    return layers.decoder_specs(config, layer_specs)


def block(layer: layers.Layer, hidden_TD, kv_pages, attend):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""
    out_TD, kv_pages = layers.attention(layer, layer.norm(hidden_TD, "attn_norm"), kv_pages, attend)
    hidden_TD = hidden_TD + layer.norm(out_TD, "post_attn_norm")
    out_TD = layers.gated_mlp(layer, layer.norm(hidden_TD, "mlp_norm"))
    return hidden_TD + layer.norm(out_TD, "post_mlp_norm"), kv_pages


def forward(params, config, token_ids_T, positions_T, kv_pages, attend):
    """-> (hidden_TD, kv_pages); attend is the engine's closure over the attention op."""
    return layers.decoder_forward(params, config, token_ids_T, positions_T, kv_pages, attend, block)


logits = layers.decoder_logits
