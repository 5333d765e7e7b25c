"""Qwen3: llama with a norm on every query and key head, and Qwen's optional upper windows."""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import ConfigKeys, ModelConfig, base_config
from jaxserve.models.qwen2 import take_upper_windows

HF_NAMES = layers.HF_NAMES
GGUF_NAMES = layers.GGUF_NAMES
GGUF_ARCHITECTURES = ("qwen3",)
GGUF_PERMUTED = False
NORM_OFFSET = 0.0

DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    layer_types, window = take_upper_windows(keys)
    attention_bias = keys.take_bool("attention_bias", False)
    return base_config(
        keys,
        model_type="qwen3",
        defaults=DEFAULTS,
        layer_types=layer_types,
        window=window,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        qk_norm=True,
    )


param_specs = layers.pre_norm_param_specs
forward = layers.pre_norm_forward
logits = layers.decoder_logits
