"""Mistral: llama with one sliding window for every layer, where the config gives one.

GGUF files of Mistral models call their architecture llama and are read as such.
"""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import FULL, SLIDING, ConfigKeys, ModelConfig, base_config

HF_NAMES = layers.HF_NAMES
GGUF_NAMES = layers.GGUF_NAMES
GGUF_ARCHITECTURES = ()
GGUF_PERMUTED = False
NORM_OFFSET = 0.0

DEFAULTS = {
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    window = keys.take_optional_int("sliding_window")
    num_layers = keys.take_num_layers()
    return base_config(
        keys,
        model_type="mistral",
        defaults=DEFAULTS,
        layer_types=(FULL if window is None else SLIDING,) * num_layers,
        window=window,
    )


param_specs = layers.pre_norm_param_specs
forward = layers.pre_norm_forward
logits = layers.decoder_logits
