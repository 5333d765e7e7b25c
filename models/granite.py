"""Granite: llama whose embeddings, scores, residuals and logits each have a factor of their own."""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import ConfigKeys, ModelConfig, base_config

HF_NAMES = layers.HF_NAMES
GGUF_NAMES = layers.GGUF_NAMES
GGUF_ARCHITECTURES = ("granite",)
GGUF_PERMUTED = True  # its converter treats it as a llama
NORM_OFFSET = 0.0

DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    attention_bias = keys.take_bool("attention_bias", False)
    return base_config(
        keys,
        model_type="granite",
        defaults=DEFAULTS,
        attention_scale=keys.take_number("attention_multiplier", 1.0),
        embed_scale=keys.take_number("embedding_multiplier", 1.0),
        residual_scale=keys.take_number("residual_multiplier", 1.0),
        logit_scale=1.0 / keys.take_number("logits_scaling", 1.0),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=keys.take_bool("mlp_bias", False),
    )


param_specs = layers.pre_norm_param_specs


def block(layer: layers.Layer, hidden_TD, kv_pages, attend):
    """x + scale * attention(norm(x)), then x + scale * mlp(norm(x))."""
    scale = layer.config.residual_scale
    out_TD, kv_pages = layers.attention(layer, layer.norm(hidden_TD, "attn_norm"), kv_pages, attend)
    hidden_TD = hidden_TD + out_TD * scale
    out_TD = layers.gated_mlp(layer, layer.norm(hidden_TD, "mlp_norm"))
    return hidden_TD + out_TD * scale, kv_pages


def forward(params, config, token_ids_T, positions_T, kv_pages, attend):
    """layers.decoder_forward with granite's blocks."""
    return layers.decoder_forward(params, config, token_ids_T, positions_T, kv_pages, attend, block)


logits = layers.decoder_logits
