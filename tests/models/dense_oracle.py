"""Plain numpy float64 decoders with a dense mask: the other side of comparisons.

Written from the papers' formulas on whole sequences; shares nothing with the package but the names
that checkpoints give their tensors.
"""

import numpy as np


def inverse_frequencies(theta, dim):
    return theta ** (-np.arange(0, dim, 2) / dim)


def rms(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def turn(x_THE, inv_freq):
    """Rotates element i with element i + len(inv_freq); elements past both pass through."""
    half = len(inv_freq)
    phase = np.arange(len(x_THE))[:, None, None] * inv_freq
    a, b, rest = x_THE[..., :half], x_THE[..., half : 2 * half], x_THE[..., 2 * half :]
    cos, sin = np.cos(phase), np.sin(phase)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attend(q_THE, k_TJE, v_TJE, scale, window):
    T, H, _ = q_THE.shape
    group = H // k_TJE.shape[1]
    distance = np.arange(T)[:, None] - np.arange(T)[None, :]
    visible = (distance >= 0) & (distance < (window or T))
    out = np.empty_like(q_THE)
    for head in range(H):
        scores = scale * q_THE[:, head] @ k_TJE[:, head // group].T
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, head] = weights / weights.sum(-1, keepdims=True) @ v_TJE[:, head // group]
    return out


def logits(tensors, ids, *, heads, kv_heads, head_dim, eps, layers, scale=None, gemma=False):
    """[T, V] for token ids; layers: (inv_freq, window) of each. gemma: that family's extra norms,
    norm weights less one, scaled embedding and tied head."""
    w = {name: np.float64(array) for name, array in tensors.items()}
    one = 1.0 if gemma else 0.0
    norm = lambda x, name: rms(x, w[name] + one, eps)
    x = w["model.embed_tokens.weight"][ids]
    if gemma:
        x = x * np.sqrt(x.shape[-1])
    for index, (inv_freq, window) in enumerate(layers):
        at = f"model.layers.{index}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (
            (h @ w[f"{at}self_attn.{name}_proj.weight"].T).reshape(len(ids), -1, head_dim)
            for name in "qkv"
        )
        assert q.shape[1] == heads and k.shape[1] == kv_heads
        if gemma:
            q, k = norm(q, at + "self_attn.q_norm.weight"), norm(k, at + "self_attn.k_norm.weight")
        out = attend(turn(q, inv_freq), turn(k, inv_freq), v, scale or head_dim**-0.5, window)
        out = out.reshape(len(ids), -1) @ w[at + "self_attn.o_proj.weight"].T
        x = x + (norm(out, at + "post_attention_layernorm.weight") if gemma else out)
        before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        h = norm(x, f"{at}{before}.weight")
        gate, up, down = (w[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        out = ((gelu_tanh if gemma else silu)(h @ gate.T) * (h @ up.T)) @ down.T
        x = x + (norm(out, at + "post_feedforward_layernorm.weight") if gemma else out)
    head = w["model.embed_tokens.weight" if gemma else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T
