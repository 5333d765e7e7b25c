"""SmolLM3: llama in which every fourth layer does not rotate (NoPE), with Qwen's window options."""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import ConfigKeys, ModelConfig, base_config
from jaxserve.models.qwen2 import take_upper_windows

HF_NAMES = layers.HF_NAMES
GGUF_NAMES = layers.GGUF_NAMES
GGUF_ARCHITECTURES = ("smollm3",)
GGUF_PERMUTED = True  # its converter treats it as a llama
NORM_OFFSET = 0.0

DEFAULTS = {
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 2_000_000.0,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    num_layers = keys.take_num_layers()
    if keys.take_bool("use_sliding_window", False):
        raise ValueError("smollm3 with use_sliding_window is not supported")
    layer_types, _ = take_upper_windows(keys)
    attention_bias = keys.take_bool("attention_bias", False)
    return base_config(
        keys,
        model_type="smollm3",
        defaults=DEFAULTS,
        layer_types=layer_types,
        use_rope=_turning(keys, num_layers),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=keys.take_bool("mlp_bias", False),
    )


def _turning(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """Which layers rotate: no_rope_layers has 1 for those that do, whatever its name says."""
    every = keys.take_int("no_rope_layer_interval", 4)
    usual = [(index + 1) % every != 0 for index in range(num_layers)]
    return tuple(bool(mark) for mark in keys.take_list("no_rope_layers", usual, num_layers))


param_specs = layers.pre_norm_param_specs
forward = layers.pre_norm_forward
logits = layers.decoder_logits
