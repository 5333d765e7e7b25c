"""Llama and the many models published in its form (SmolLM2, TinyLlama ...).

Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP. Biases on all
attention or all MLP projections are options of the config.
"""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import ConfigKeys, ModelConfig, base_config

HF_NAMES = layers.HF_NAMES
GGUF_NAMES = layers.GGUF_NAMES
GGUF_ARCHITECTURES = ("llama",)
GGUF_PERMUTED = True  # GGUF keeps this family's q and k rows in interleaved rotary order
NORM_OFFSET = 0.0

DEFAULTS = {"max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False}


def read_config(keys: ConfigKeys) -> ModelConfig:
    attention_bias = keys.take_bool("attention_bias", False)
    return base_config(
        keys,
        model_type="llama",
        defaults=DEFAULTS,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=keys.take_bool("mlp_bias", False),
    )


param_specs = layers.pre_norm_param_specs
forward = layers.pre_norm_forward
logits = layers.decoder_logits
