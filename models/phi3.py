"""Phi-3 and Phi-4: llama whose files keep q, k and v in one tensor, and gate and up in another.

Heads may turn in part, and all layers may share a window. Longrope, which the long variants use, is
refused where rotations are read.
"""

from __future__ import annotations

from jaxserve.models import layers
from jaxserve.models.config import FULL, SLIDING, ConfigKeys, ModelConfig, base_config

HF_NAMES = layers.HF_NAMES
GGUF_NAMES = layers.GGUF_NAMES
HF_FUSED = {
    "model.layers.{}.self_attn.qkv_proj.weight": ("q", "k", "v"),
    "model.layers.{}.mlp.gate_up_proj.weight": ("gate", "up"),
}
GGUF_FUSED = {
    "blk.{}.attn_qkv.weight": ("q", "k", "v"),
    "blk.{}.ffn_up.weight": ("gate", "up"),
}
GGUF_ARCHITECTURES = ("phi3",)
GGUF_PERMUTED = False
NORM_OFFSET = 0.0

DEFAULTS = {
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


def read_config(keys: ConfigKeys) -> ModelConfig:
    keys.take("original_max_position_embeddings", None)  # longrope's, and idle without it
    window, num_layers = keys.take_optional_int("sliding_window"), keys.take_num_layers()
    return base_config(
        keys,
        model_type="phi3",
        defaults=DEFAULTS,
        layer_types=(FULL if window is None else SLIDING,) * num_layers,
        window=window,
    )


param_specs = layers.pre_norm_param_specs
forward = layers.pre_norm_forward
logits = layers.decoder_logits
