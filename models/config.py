"""What a checkpoint's config says, in one frozen form; what we cannot do of it is refused.

Every key of a config is either taken by the family that reads it, or stands in HARMLESS, or holds
nothing (false, null, 0, empty). Any other key may change the mathematics, so it stops the load.
Both spellings are read: today's (rope_parameters, dtype, layer_types) and that of published files
(rope_theta, rope_scaling, torch_dtype, sliding_window_pattern).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.models.rope import Rope, make_rope, positive_number

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys that do not touch the forward pass of a text decoder: training, bookkeeping, token ids.
HARMLESS = frozenset(
    {
        "_attn_implementation", "_attn_implementation_autoset", "_name_or_path",
        "architectures", "attention_dropout", "attn_implementation", "auto_map",
        "bos_token_id", "cache_implementation", "classifier_dropout", "dtype", "embd_pdrop",
        "eos_token_id", "finetuning_task", "id2label", "initializer_range",
        "is_llama_config", "is_text_config_of_multimodal", "label2id", "language",
        "model_type", "name_or_path", "output_router_logits", "pad_token_id",
        "pretraining_tp", "problem_type", "resid_pdrop", "router_aux_loss_coef",
        "router_jitter_noise", "tokenizer_class", "torch_dtype", "transformers.js_config",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu",
}  # fmt: skip
_REQUIRED = object()
MAX_INT = 2**31 - 1
MAX_LAYERS = 4096


@dataclasses.dataclass(frozen=True)
class Backend:
    """Which implementations compute a model. stacked: layers' weights share arrays with a leading L
    axis and run_layers scans; otherwise one tree a layer and an unrolled loop. int8_inputs: see
    linear's api.prepare."""

    attention: str = "reference"
    linear: str = "reference"
    stacked: bool = False
    int8_inputs: bool = False


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What sets one layer apart. window: tokens a query sees, itself included. rope: None turns
    nothing."""

    window: int | None
    rope: Rope | None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything static about a model; hashable, so jit takes it as a static argument."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str  # of ACTIVATIONS' values
    tied: bool  # the output head is the embedding table
    layers: tuple[LayerSpec, ...]
    attention_scale: float
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0  # hidden width of one expert
    norm_topk: bool = True  # the chosen experts' weights are made to sum to 1
    dtype: str = "float32"  # of activations
    backend: Backend = Backend()

    def kv_spec(self, page_size: int, dtype: Any):
        """The attention op's KVSpec for this model's cache."""
        from jaxserve.pallas_kernels.ragged_paged_attention.api import KVSpec

        return KVSpec(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
        )


def whole_number(value: Any, name: str, *, least: int = 1, most: int = MAX_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} in the config: must be an integer, {least} to {most}")
    return value


class ConfigKeys:
    """A config dict that remembers which keys were taken, to refuse the rest."""

    def __init__(self, config: Mapping[str, Any]):
        self._config = dict(config)
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = _REQUIRED) -> Any:
        """The value; the default where it is absent or null. ValueError when required."""
        self._taken.add(name)
        value = self._config.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ValueError(f"the config has no {name}")
            return default
        return value

    def take_int(self, name: str, default: Any = _REQUIRED, **bounds: int) -> int:
        return whole_number(self.take(name, default), name, **bounds)

    def take_optional_int(self, name: str) -> int | None:
        return None if self.take(name, None) is None else self.take_int(name)

    def take_number(self, name: str, default: Any = _REQUIRED) -> float:
        return positive_number(self.take(name, default), name)

    def take_optional_number(self, name: str) -> float | None:
        return None if self.take(name, None) is None else self.take_number(name)

    def take_dict(self, name: str) -> dict[str, Any]:
        """Empty where the config has none."""
        value = self.take(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{name}={value!r} in the config: must be an object")
        return value

    def take_list(self, name: str, default: Sequence[Any], length: int) -> Sequence[Any]:
        value = self.take(name, default)
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise ValueError(f"{name}={value!r} in the config: must be a list of {length}")
        return value

    def take_num_layers(self, default: Any = _REQUIRED) -> int:
        return self.take_int("num_hidden_layers", default, most=MAX_LAYERS)

    def take_bool(self, name: str, default: bool) -> bool:
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} in the config: must be true or false")
        return value

    def take_same(self, names: Sequence[str], default: Any = _REQUIRED) -> Any:
        """One setting with several spellings; those present must agree."""
        found = {name: self.take(name, None) for name in names}
        values = [value for value in found.values() if value is not None]
        if any(value != values[0] for value in values):
            raise ValueError(f"the config contradicts itself: {found}")
        return values[0] if values else self.take(names[0], default)

    def finish(self) -> None:
        """Refuses what nobody took. Call when the config has been read."""
        left = {
            key: value
            for key, value in self._config.items()
            if value and key not in self._taken and key not in HARMLESS
        }
        if left:
            shown = ", ".join(f"{key}={str(value)[:60]}" for key, value in sorted(left.items()))
            raise ValueError(
                f"the config asks for what {self._config.get('model_type')} here lacks: {shown}"
            )


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text decoder's part of a multimodal config, or the config itself.

    Settings of the outer part that the inner lacks are kept (token ids, tied embeddings); the outer
    part's image settings are dropped, since only text is served. A setting on which both disagree
    is an error.
    """
    inner = config.get("text_config")
    if inner is None:
        return dict(config)
    if not isinstance(inner, dict):
        raise ValueError("text_config in the config: must be an object")
    shared = ("tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "vocab_size")
    merged = dict(inner)
    for key in (*shared, "bos_token_id", "eos_token_id", "pad_token_id"):
        outer_value, inner_value = config.get(key), inner.get(key)
        if outer_value is None:
            continue
        if key in shared and inner_value is not None and inner_value != outer_value:
            raise ValueError(
                f"the config contradicts itself: {key} is {outer_value!r} outside and "
                f"{inner_value!r} inside text_config"
            )
        merged.setdefault(key, outer_value)
    merged.setdefault("model_type", f"{config.get('model_type')}_text")
    return merged


def take_activation(keys: ConfigKeys, default: str | None = None) -> str:
    name = keys.take_same(("hidden_activation", "hidden_act"), default or _REQUIRED)
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def take_layer_types(keys: ConfigKeys, num_layers: int, default: Sequence[str]) -> tuple[str, ...]:
    """layer_types as today's configs carry it, or what the published keys mean (default)."""
    types = keys.take_list("layer_types", default, num_layers)
    unknown = [kind for kind in types if kind not in (FULL, SLIDING)]
    if unknown:
        raise ValueError(f"unknown layer type {unknown[0]!r}; known: {FULL}, {SLIDING}")
    return tuple(types)


def take_rope_parameters(
    keys: ConfigKeys, default_theta: float, *, partial: float = 1.0
) -> dict[str, dict[str, Any]]:
    """Rope parameters by layer type; the key None holds those without a type of their own.

    Read from rope_parameters (flat or by layer type) and from rope_theta, rope_scaling and
    partial_rotary_factor; a value found in several places must be the same in all.
    """
    top = {"rope_theta": keys.take("rope_theta", None)}
    top["partial_rotary_factor"] = keys.take("partial_rotary_factor", None)
    scaling, modern = keys.take_dict("rope_scaling"), keys.take_dict("rope_parameters")
    nested = {key: value for key, value in modern.items() if isinstance(value, dict)}
    if nested and len(nested) != len(modern):
        raise ValueError(f"rope_parameters mixes layer types and plain values: {modern}")
    if nested:
        groups = {key: _merge(value, {}) for key, value in nested.items()}
        if scaling or top["rope_theta"] is not None:
            groups[FULL] = _merge(groups.get(FULL, {}), scaling, top)
    else:
        groups = {None: _merge(modern, scaling, top)}
    defaults = {"rope_theta": default_theta, "partial_rotary_factor": partial}
    return {key: {**defaults, **group} for key, group in groups.items()}


def _merge(*sources: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for source in sources:
        for key, value in source.items():
            name = "rope_type" if key == "type" else key
            if value is None:
                continue
            if name in merged and merged[name] != value:
                raise ValueError(f"conflicting rope settings: {name} is {merged[name]} and {value}")
            merged[name] = value
    return merged


def base_config(
    keys: ConfigKeys,
    *,
    model_type: str,
    defaults: Mapping[str, Any],
    layer_types: Sequence[str] | None = None,
    window: int | None = None,
    rope_by_type: Mapping[str, Mapping[str, Any]] | None = None,
    use_rope: Sequence[bool] | None = None,
    **features: Any,
) -> ModelConfig:
    """Reads what every family has. `defaults` are the class defaults that a config may leave out.

    layer_types: FULL or SLIDING for each layer, by default as the config says or all full. window:
    that of sliding layers. rope_by_type: rope parameters by layer type, by default as
    take_rope_parameters reads them. use_rope: layers that turn. features: more of ModelConfig.
    """
    num_layers = keys.take_num_layers(defaults.get("num_hidden_layers", _REQUIRED))
    hidden_size = keys.take_int("hidden_size", defaults.get("hidden_size", _REQUIRED))
    num_heads = keys.take_int("num_attention_heads", defaults.get("num_attention_heads", _REQUIRED))
    num_kv_heads = keys.take_int(
        "num_key_value_heads", defaults.get("num_key_value_heads", num_heads)
    )
    head_dim = keys.take_int("head_dim", defaults.get("head_dim", hidden_size // num_heads))
    max_positions = keys.take_int(
        "max_position_embeddings", defaults.get("max_position_embeddings", _REQUIRED)
    )
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_kv_heads} KV heads")
    if layer_types is None:
        layer_types = take_layer_types(keys, num_layers, (FULL,) * num_layers)
    if SLIDING in layer_types and window is None:
        raise ValueError("the config has sliding layers and no sliding_window")
    if rope_by_type is None:
        rope_by_type = take_rope_parameters(keys, defaults.get("rope_theta", 10000.0))
    ropes = {
        kind: make_rope(
            rope_by_type.get(kind, rope_by_type.get(None)) or _no_rope(kind),
            head_dim=head_dim,
            max_positions=max_positions,
        )
        for kind in set(layer_types)
    }
    turns = use_rope or (True,) * num_layers
    features.setdefault("attention_scale", head_dim**-0.5)
    features.setdefault("activation", take_activation(keys, defaults.get("hidden_act")))
    features.setdefault(
        "tied", keys.take_bool("tie_word_embeddings", defaults["tie_word_embeddings"])
    )
    return ModelConfig(
        model_type=model_type,
        vocab_size=keys.take_int("vocab_size", defaults.get("vocab_size", _REQUIRED)),
        hidden_size=hidden_size,
        intermediate_size=keys.take_int(
            "intermediate_size", defaults.get("intermediate_size", _REQUIRED)
        ),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_reach(max_positions, rope_by_type),
        norm_eps=keys.take_number("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        layers=tuple(
            LayerSpec(window if kind == SLIDING else None, ropes[kind] if turn else None)
            for kind, turn in zip(layer_types, turns)
        ),
        **features,
    )


def _no_rope(kind: str) -> Mapping[str, Any]:
    raise ValueError(f"rope_parameters has nothing for {kind} layers")


def _reach(max_positions: int, rope_by_type: Mapping[Any, Mapping[str, Any]]) -> int:
    """Positions the model can take: YaRN is often switched on without raising the config's own
    maximum, and then reaches factor times the original length."""
    reach = max_positions
    for group in rope_by_type.values():
        original = group.get("original_max_position_embeddings")
        if group.get("rope_type") == "yarn" and original:
            reach = max(reach, int(original * group["factor"]))
    return reach
