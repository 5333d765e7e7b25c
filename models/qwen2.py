"""Qwen2, Qwen2.5: llama with biases on q, k and v, and optional windows in the upper layers."""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import (
    FULL,
    SLIDING,
    ConfigKeys,
    ModelConfig,
    base_config,
    take_layer_types,
)

HF_NAMES = layers.HF_NAMES
GGUF_NAMES = layers.GGUF_NAMES
GGUF_ARCHITECTURES = ("qwen2",)
GGUF_PERMUTED = False
NORM_OFFSET = 0.0

DEFAULTS = {"max_position_embeddings": 32768, "hidden_act": "silu", "tie_word_embeddings": False}


def read_config(keys: ConfigKeys) -> ModelConfig:
    layer_types, window = take_upper_windows(keys)
    if not keys.take_bool("attention_bias", True):
        raise ValueError("qwen2 without q, k and v biases (attention_bias=false) is not supported")
    return base_config(
        keys,
        model_type="qwen2",
        defaults=DEFAULTS,
        layer_types=layer_types,
        window=window,
        qkv_bias=True,
    )


def take_upper_windows(keys: ConfigKeys) -> tuple[tuple[str, ...], int | None]:
    """Qwen's windows: off unless use_sliding_window, then in the layers from max_window_layers up.

    -> (layer types, window). sliding_window may be set while the windows are off.
    """
    num_layers = keys.take_num_layers()
    used = keys.take_bool("use_sliding_window", False)
    window = keys.take_optional_int("sliding_window")
    first = keys.take_int("max_window_layers", 0, least=0)
    upper = tuple(SLIDING if used and index >= first else FULL for index in range(num_layers))
    return take_layer_types(keys, num_layers, upper), window if used else None


param_specs = layers.pre_norm_param_specs
forward = layers.pre_norm_forward
logits = layers.decoder_logits
