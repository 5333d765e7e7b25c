"""OLMo 2: norms behind each block instead of before it, and over all query and all key heads."""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import ConfigKeys, ModelConfig, base_config

HF_NAMES = layers.HF_NAMES | {
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
}
GGUF_NAMES = layers.GGUF_NAMES | {
    "post_attn_norm": "blk.{}.post_attention_norm.weight",
    "post_mlp_norm": "blk.{}.post_ffw_norm.weight",
}
GGUF_ARCHITECTURES = ("olmo2",)
GGUF_PERMUTED = False
NORM_OFFSET = 0.0

DEFAULTS = {
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    attention_bias = keys.take_bool("attention_bias", False)
    return base_config(
        keys,
        model_type="olmo2",
        defaults=DEFAULTS,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
    )


def layer_specs(config: ModelConfig) -> dict:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        **layers.attention_specs(config),
        **layers.mlp_specs(config),
        "q_norm": layers.norm_spec(queries),
        "k_norm": layers.norm_spec(keys),
        "post_attn_norm": layers.norm_spec(config.hidden_size),
        "post_mlp_norm": layers.norm_spec(config.hidden_size),
    }


def param_specs(config: ModelConfig) -> dict:
    return layers.decoder_specs(config, layer_specs)


def block(layer: layers.Layer, hidden_TD, kv_pages, attend):
    """x + norm(attention(x)), then x + norm(mlp(x))."""
    out_TD, kv_pages = layers.attention(layer, hidden_TD, kv_pages, attend)
    hidden_TD = hidden_TD + layer.norm(out_TD, "post_attn_norm")
    out_TD = layers.gated_mlp(layer, hidden_TD)
    return hidden_TD + layer.norm(out_TD, "post_mlp_norm"), kv_pages


def forward(params, config, token_ids_T, positions_T, kv_pages, attend):
    """-> (hidden_TD, kv_pages); attend is the engine's closure over the attention op."""
    return layers.decoder_forward(params, config, token_ids_T, positions_T, kv_pages, attend, block)


logits = layers.decoder_logits
