"""The blocks that decoder families share, and run_layers, which hides scan against unrolled.

A family's file says which blocks it has and how its checkpoint names them; the mathematics is here,
once. Activations are [T, ...] over the packed tokens of a step, in config.dtype; norms, rotations
and softmax run in float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.config import Backend, LayerSpec, ModelConfig
from jaxserve.models.rope import Rope, cos_sin
from jaxserve.models.spec import ParamSpec
from jaxserve.pallas_kernels.linear import api as linear_op
from jaxserve.pallas_kernels.rms_norm.api import rms_norm
from jaxserve.pallas_kernels.rotary import api as rotary_op

__all__ = ["Backend", "Layer", "decoder_forward", "decoder_logits", "decoder_specs", "run_layers"]

# Checkpoint names of the shared blocks' parameters; {} is the layer. Families add or replace.
HF_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "o_bias": "model.layers.{}.self_attn.o_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "gate_bias": "model.layers.{}.mlp.gate_proj.bias",
    "up_bias": "model.layers.{}.mlp.up_proj.bias",
    "down_bias": "model.layers.{}.mlp.down_proj.bias",
}
GGUF_NAMES = {
    "embed": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "o_bias": "blk.{}.attn_output.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "gate_bias": "blk.{}.ffn_gate.bias",
    "up_bias": "blk.{}.ffn_up.bias",
    "down_bias": "blk.{}.ffn_down.bias",
}


# ---- declaring ---------------------------------------------------------------------------------


def decoder_specs(config: ModelConfig, layer_specs: Callable[[ModelConfig], dict]) -> dict:
    """The parameter tree of a decoder whose layers are all `layer_specs(config)`."""
    table = ParamSpec((config.vocab_size, config.hidden_size), ("vocab", None), matrix=True)
    embed = dataclasses.replace(table, by_row=True)
    specs = {"embed": embed, "final_norm": norm_spec(config.hidden_size)}
    if not config.tied:
        specs["lm_head"] = table
    specs["layers"] = tuple(layer_specs(config) for _ in range(config.num_layers))
    return specs


def norm_spec(size: int) -> ParamSpec:
    return ParamSpec((size,), (None,), init=None)


def linear_spec(name: str, outputs: int, inputs: int, *, axes, bias: bool) -> dict[str, ParamSpec]:
    """A matrix [outputs, inputs] under `name`, and under `name`_bias its bias if it has one."""
    specs = {name: ParamSpec((outputs, inputs), axes, matrix=True)}
    if bias:
        specs[f"{name}_bias"] = ParamSpec((outputs,), axes[:1])
    return specs


def attention_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    D, E = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * E, config.num_kv_heads * E
    specs = {
        **linear_spec("q", queries, D, axes=("heads", None), bias=config.qkv_bias),
        **linear_spec("k", keys, D, axes=("kv_heads", None), bias=config.qkv_bias),
        **linear_spec("v", keys, D, axes=("kv_heads", None), bias=config.qkv_bias),
        **linear_spec("o", D, queries, axes=(None, "heads"), bias=config.o_bias),
    }
    if config.qk_norm:
        specs |= {"q_norm": norm_spec(E), "k_norm": norm_spec(E)}
    return specs


def mlp_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    return {
        **linear_spec("gate", F, D, axes=("ffn", None), bias=bias),
        **linear_spec("up", F, D, axes=("ffn", None), bias=bias),
        **linear_spec("down", D, F, axes=(None, "ffn"), bias=bias),
    }


def pre_norm_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """A layer that normalises the input of attention and of the MLP."""
    norms = {"attn_norm": norm_spec(config.hidden_size), "mlp_norm": norm_spec(config.hidden_size)}
    return {**norms, **attention_specs(config), **mlp_specs(config)}


def pre_norm_param_specs(config: ModelConfig) -> dict:
    """The parameter tree of families whose layers are all pre_norm_block."""
    return decoder_specs(config, pre_norm_specs)


# ---- computing ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's parameters, wherever they are, and what sets the layer apart.

    params: the layer's own tree, or the stacked one of all layers. index: a Python int, or a traced
    int32 under scan. tables: cos and sin of this step's positions, by rotation.
    """

    params: dict[str, Any]
    index: Any
    spec: LayerSpec
    config: ModelConfig
    tables: dict[Rope, tuple[jax.Array, jax.Array]]

    def __contains__(self, name: str) -> bool:
        return name in self.params

    def vector(self, name: str) -> jax.Array:
        """A parameter that is not a matrix, float32."""
        value = self.params[name]
        if not self.config.backend.stacked:
            return value
        return jax.lax.dynamic_index_in_dim(value, self.index, keepdims=False)

    def linear(self, x_TD: jax.Array, name: str, plus=None) -> jax.Array:
        """plus + x_TD @ weight^T + bias, the bias where there is one. plus: [T, F] or None."""
        y_TF = linear_op.linear(x_TD, self.params[name], plus=plus, **self._where)
        return self._add_bias(y_TF, name)

    def linears(self, x_TD: jax.Array, *names: str) -> list[jax.Array]:
        """`linear` of one input with several weights."""
        weights = [self.params[name] for name in names]
        outputs = linear_op.linears(x_TD, weights, **self._where)
        return [self._add_bias(y_TF, name) for name, y_TF in zip(names, outputs)]

    def gated(self, x_TD: jax.Array) -> jax.Array:
        """activation(gate) * up of x_TD."""
        activation = self.config.activation
        if "gate_bias" not in self and "up_bias" not in self:
            weights = self.params["gate"], self.params["up"]
            return linear_op.gated(x_TD, *weights, activation, **self._where)
        gate_TF, up_TF = self.linears(x_TD, "gate", "up")
        return linear_op.activate(gate_TF, activation) * up_TF

    @property
    def _where(self):
        backend = self.config.backend
        return {"layer": self.index if backend.stacked else None, "backend": backend.linear}

    def _add_bias(self, y_TF: jax.Array, name: str) -> jax.Array:
        if f"{name}_bias" in self:
            y_TF = y_TF + self.vector(f"{name}_bias").astype(y_TF.dtype)[None, :]
        return y_TF

    def norm(self, x: jax.Array, name: str) -> jax.Array:
        return rms_norm(x, self.params[name], self.config.norm_eps, **self._where)

    @property
    def cos_sin(self) -> tuple[jax.Array, jax.Array]:
        return self.tables[self.spec.rope]


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention(layer: Layer, x_TD, kv_pages, attend, plus=None) -> tuple[jax.Array, Any]:
    """Grouped-query attention over the paged cache -> (plus + output [T, D], kv_pages)."""
    config = layer.config
    q_TF, k_TF, v_TF = layer.linears(x_TD, "q", "k", "v")
    q_THE = _heads(layer, q_TF, "q", config.num_heads)
    k_TJE = _heads(layer, k_TF, "k", config.num_kv_heads)
    v_TJE = _heads(layer, v_TF, "v", config.num_kv_heads)
    if layer.spec.rope is not None:
        backend = config.backend.linear
        q_THE, k_TJE = rotary_op.rotate(q_THE, k_TJE, layer.cos_sin, backend=backend)
    out_THE, kv_pages = attend(
        q_THE,
        k_TJE,
        v_TJE,
        kv_pages,
        layer=layer.index,
        scale=config.attention_scale,
        window=layer.spec.window,
        soft_cap=config.attention_soft_cap,
    )
    return layer.linear(out_THE.reshape(x_TD.shape[0], -1), "o", plus), kv_pages


def _heads(layer: Layer, y_TF: jax.Array, name: str, count: int) -> jax.Array:
    """[T, count, E]: projection `name` cut into heads, normalised over a head or over all of them
    as the shape of its norm says, where it has one."""
    norm = f"{name}_norm"
    heads = lambda y: y.reshape(-1, count, layer.config.head_dim)
    if norm not in layer:
        return heads(y_TF)
    if layer.vector(norm).shape == y_TF.shape[1:]:
        return heads(layer.norm(y_TF, norm))
    return layer.norm(heads(y_TF), norm)


def gated_mlp(layer: Layer, x_TD: jax.Array, plus=None) -> jax.Array:
    """plus + MLP of x_TD, [T, D]."""
    return layer.linear(layer.gated(x_TD), "down", plus)


def pre_norm_block(layer: Layer, hidden_TD: jax.Array, kv_pages, attend):
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    normed_TD = layer.norm(hidden_TD, "attn_norm")
    hidden_TD, kv_pages = attention(layer, normed_TD, kv_pages, attend, plus=hidden_TD)
    return gated_mlp(layer, layer.norm(hidden_TD, "mlp_norm"), plus=hidden_TD), kv_pages


def decoder_forward(params, config, token_ids_T, positions_T, kv_pages, attend, block):
    """Embeds, runs `block(layer, hidden_TD, kv_pages, attend)` for every layer, normalises.

    An id below 0 is padding: zeros until biases make them something, so that native matmuls pass
    over them. -> (hidden_TD in config.dtype, kv_pages with this step's keys and values written).
    """
    hidden_TD = linear_op.gather_rows(params["embed"], token_ids_T)
    hidden_TD = jnp.where(token_ids_T[:, None] < 0, jnp.float32(0), hidden_TD)
    if config.embed_scale != 1.0:
        hidden_TD = hidden_TD * jnp.float32(config.embed_scale)
    ropes = {spec.rope for spec in config.layers if spec.rope is not None}
    tables = {rope: cos_sin(rope, positions_T) for rope in ropes}
    hidden_TD, kv_pages = run_layers(
        lambda *args: block(*args, attend),
        params["layers"],
        config,
        tables,
        hidden_TD.astype(config.dtype),
        kv_pages,
    )
    norm, eps = params["final_norm"], config.norm_eps
    return rms_norm(hidden_TD, norm, eps, backend=config.backend.linear), kv_pages


def pre_norm_forward(params, config, token_ids_T, positions_T, kv_pages, attend):
    """decoder_forward for families whose layers are all pre_norm_block."""
    return decoder_forward(
        params, config, token_ids_T, positions_T, kv_pages, attend, pre_norm_block
    )


def decoder_logits(params, config: ModelConfig, hidden_SD: jax.Array) -> jax.Array:
    """float32 logits [S, V] from normalised hidden states."""
    head = params["embed"] if config.tied else params["lm_head"]
    backend = config.backend.linear
    logits_SV = linear_op.linear(hidden_SD, head, dtype=jnp.float32, backend=backend)
    if config.logit_scale != 1.0:
        logits_SV = logits_SV * config.logit_scale
    return soft_cap(logits_SV, config.final_soft_cap)


# ---- scan or unroll ----------------------------------------------------------------------------


def run_layers(block, layers, config: ModelConfig, tables, hidden_TD, kv_pages):
    """Applies block(layer, hidden_TD, kv_pages) to every layer in order.

    Unstacked layers are unrolled: on XLA's CPU a scan over stacked weights copies each layer's
    first. Stacked ones are scanned over repeats of their pattern, the pattern unrolled inside, so
    that windows and rotations stay static while the layer index is traced. The cache is carried,
    so it is updated in place.
    """
    apply = lambda index, spec, tree, carry: block(Layer(tree, index, spec, config, tables), *carry)
    carry = hidden_TD, kv_pages
    if not config.backend.stacked:
        for index, spec in enumerate(config.layers):
            carry = apply(index, spec, layers[index], carry)
        return carry
    for start, period, repeats in repeated_patterns(config.layers):

        def step(carry, first, start=start, period=period):
            for offset in range(period):
                carry = apply(first + offset, config.layers[start + offset], layers, carry)
            return carry, None

        if repeats == 1:
            carry, _ = step(carry, start)
        else:
            firsts = start + period * jnp.arange(repeats, dtype=jnp.int32)
            carry, _ = jax.lax.scan(step, carry, firsts)
    return carry


def repeated_patterns(layers: Sequence[LayerSpec]) -> list[tuple[int, int, int]]:
    """Cuts layers into (start, period, repeats): from each start, the repetition that covers most.

    34 layers of five local and one global give (0, 6, 5) and (30, 1, 4); no layer is left out.
    """
    pieces, start, count = [], 0, len(layers)
    while start < count:
        best = (1, 1)
        for period in range(1, (count - start) // 2 + 1):
            repeats = 1
            while (
                layers[start + period * repeats : start + period * (repeats + 1)]
                == layers[start : start + period]
            ):
                repeats += 1
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        pieces.append((start, *best))
        start += best[0] * best[1]
    return pieces
