"""A GGUF file's metadata in the words of a Hugging Face config, so that families read one form.

Every `<architecture>.*` key is translated, known to be harmless, empty, or refused by name. What
the metadata leaves out, the tensors tell: tied embeddings, and Llama 3's rope divisors.
"""

from __future__ import annotations

from typing import Any

from jaxserve.models.loaders.gguf_file import GgufFile

ROPE_DIVISORS = "rope_freqs.weight"

# <architecture>.KEY -> config key, copied as it is.
SAME = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
ROPE = (
    "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.finetuned",
)  # fmt: skip
# Gemma scales scores by 1 / sqrt(head size), but for the model of so many layers, which takes the
# hidden size over the heads. The metadata does not say so.
GEMMA_SCALED_BY_WIDTH = {"gemma2": (46,), "gemma3": (62,)}
HARMLESS = ("vocab_size", "attention.value_length", "attention.causal", *ROPE)


def gguf_config(gguf: GgufFile, model_type: str) -> dict[str, Any]:
    """The config of a GGUF file, for the family that reads model_type."""
    prefix = f"{_architecture(gguf)}."
    given = {
        key.removeprefix(prefix): value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    unknown = [
        key for key, value in given.items() if key not in (*SAME, *HARMLESS) and _truthy(value)
    ]
    if unknown:
        raise ValueError(
            f"{gguf.path}: GGUF settings not implemented: {', '.join(sorted(unknown))}"
        )
    if "token_embd.weight" not in gguf.tensors:
        raise ValueError(f"{gguf.path}: no token_embd.weight: not a language model?")
    config = {name: _plain(given[key]) for key, name in SAME.items() if key in given}
    _fill_in(gguf, config)
    if given.get("attention.value_length", config.get("head_dim")) != config.get("head_dim"):
        raise ValueError(f"{gguf.path}: keys and values of different lengths are not supported")
    config |= {
        "model_type": model_type,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }
    return config | _rope(gguf, given, config)


def _fill_in(gguf: GgufFile, config: dict[str, Any]) -> None:
    """What GGUF leaves out follows from the rest, never from a family's own defaults."""
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps"):
        if name not in config:
            raise ValueError(f"{gguf.path}: the GGUF metadata lacks {name}")
    width = config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("head_dim", width)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if config["num_hidden_layers"] in GEMMA_SCALED_BY_WIDTH.get(_architecture(gguf), ()):
        config["query_pre_attn_scalar"] = width
    elif _architecture(gguf) in GEMMA_SCALED_BY_WIDTH:
        config["query_pre_attn_scalar"] = config["head_dim"]


def _architecture(gguf: GgufFile) -> str:
    return gguf.metadata["general.architecture"]


def _truthy(value: Any) -> bool:
    return bool(value) if not hasattr(value, "any") else bool(value.any())


def _plain(value: Any) -> Any:
    """A scalar; arrays of one repeated value (a setting given layer by layer) become that value."""
    if not hasattr(value, "tolist"):
        return value
    if len(set(value.tolist())) != 1:
        raise ValueError(f"a GGUF setting that differs from layer to layer: {value.tolist()[:8]}")
    return value.tolist()[0]


def _rope(gguf: GgufFile, given: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": given.get("rope.scaling.type", "default")}
    if rope["rope_type"] in ("none", ""):
        rope["rope_type"] = "default"
    if rope["rope_type"] != "default":
        rope["factor"] = given.get("rope.scaling.factor")
    if rope["rope_type"] == "yarn":
        rope |= {
            "original_max_position_embeddings": given.get("rope.scaling.original_context_length"),
            "attention_factor": given.get("rope.scaling.attn_factor"),
            "beta_fast": given.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": given.get("rope.scaling.yarn_beta_slow"),
        }
    if ROPE_DIVISORS in gguf.tensors:
        if rope["rope_type"] != "default":
            raise ValueError(
                f"{gguf.path}: rope divisors and scaling {rope['rope_type']!r} together"
            )
        divisors = gguf.tensors[ROPE_DIVISORS].float32().tolist()
        rope = {"rope_type": "divisors", "divisors": tuple(divisors)}
    settings: dict[str, Any] = {"rope_parameters": rope}
    settings["rope_theta"] = float(given.get("rope.freq_base", 10000.0))
    if "rope.freq_base_swa" in given:
        settings["rope_local_base_freq"] = float(given["rope.freq_base_swa"])
    turning = given.get("rope.dimension_count", config["head_dim"])
    if turning != config["head_dim"]:
        settings["partial_rotary_factor"] = turning / config["head_dim"]
    return settings
