"""Gemma 2: norms around each block, local and global layers in turn, scores and logits capped.

The blocks are Gemma 3's, without its norm on queries and keys and with one rotation for all layers.
"""

from __future__ import annotations

import math

from jaxserve.models import gemma3_text, layers
from jaxserve.models.config import (
    FULL,
    SLIDING,
    ConfigKeys,
    ModelConfig,
    base_config,
    take_layer_types,
    whole_number,
)

HF_NAMES = gemma3_text.HF_NAMES
GGUF_NAMES = gemma3_text.GGUF_NAMES
GGUF_ARCHITECTURES = ("gemma2",)
GGUF_PERMUTED = False
NORM_OFFSET = 1.0  # what safetensors files leave out of norm weights; GGUF files have it in

DEFAULTS = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    num_layers = keys.take_num_layers()
    pattern = tuple(FULL if index % 2 else SLIDING for index in range(num_layers))
    attention_bias = keys.take_bool("attention_bias", False)
    return base_config(
        keys,
        model_type="gemma2",
        defaults=DEFAULTS,
        layer_types=take_layer_types(keys, num_layers, pattern),
        window=_window(keys),
        attention_scale=keys.take_number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=keys.take_optional_number("attn_logit_softcapping"),
        final_soft_cap=keys.take_optional_number("final_logit_softcapping"),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        embed_scale=math.sqrt(keys.take_int("hidden_size")),
    )


def _window(keys: ConfigKeys) -> int:
    """Some published files call it sliding_window_size, some say both."""
    size = keys.take_same(("sliding_window", "sliding_window_size"), 4096)
    return whole_number(size, "sliding_window")


param_specs = gemma3_text.param_specs
forward = gemma3_text.forward
logits = layers.decoder_logits
