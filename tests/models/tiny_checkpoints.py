"""Writes small random checkpoints: a folder as Hugging Face lays it out, or a GGUF file."""

import json
import pathlib

import gguf
import numpy as np
import safetensors.numpy

from jaxserve.models.loaders.checkpoint import read_config
from jaxserve.models.spec import walk

DATA = pathlib.Path(__file__).resolve().parent.parent / "data" / "models"

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
QWEN2 = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"model_type": "qwen2"}
GEMMA3 = LLAMA | {
    "model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip


def random_tensors(config, seed=0, names="HF_NAMES"):
    """float32 tensors under the family's names, so large that every part shows in the logits."""
    family, parsed = read_config(config)
    generator = np.random.default_rng(seed)
    tensors = {}
    for (name, layer), spec in walk(family.param_specs(parsed)):
        values = generator.standard_normal(spec.shape, np.float32)
        values *= 1.5 / np.sqrt(spec.shape[-1]) if spec.matrix else 0.3
        if name.endswith("norm"):
            values += 1 - family.NORM_OFFSET
        tensors[getattr(family, names)[name].format(layer)] = values
    return tensors


def write_folder(folder, config, tensors=None, **files):
    """config.json, model.safetensors and further JSON files (name without .json -> content)."""
    folder.mkdir(exist_ok=True)
    tensors = random_tensors(config) if tensors is None else tensors
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def write_shards(folder, config, tensors, cut):
    """The tensors before and after the name at `cut` in two files, and their index."""
    names = sorted(tensors)
    parts = {
        "model-00001-of-00002.safetensors": names[:cut],
        "model-00002-of-00002.safetensors": names[cut:],
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for shard, held in parts.items():
        safetensors.numpy.save_file({name: tensors[name] for name in held}, folder / shard)
    index = {"weight_map": {name: shard for shard, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


GGUF_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_PARTS[part]}.{kind}"
    return f"{GGUF_PARTS[stem]}.{kind}"


def interleave(rows, heads):
    """The row order llama GGUF files have: halves of each head dealt out in turns."""
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, config, tensors, *, kind="F32", eos=2, tokens=(), token_types=()):
    """llama or qwen2 tensors under Hugging Face names as a GGUF file; `kind` encodes matrices."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_eos_token_id(eos)
    if tokens:
        writer.add_token_list(list(tokens))
        writer.add_token_types(list(token_types))
    quantisation = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if arch == "llama" and ".self_attn.q_proj." in name:
            array = interleave(array, config["num_attention_heads"])
        if arch == "llama" and ".self_attn.k_proj." in name:
            array = interleave(array, config["num_key_value_heads"])
        if array.ndim == 2 and kind not in ("F32", "F16"):
            packed = gguf.quants.quantize(array, quantisation)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=quantisation)
        else:
            half = array.ndim == 2 and kind == "F16"
            writer.add_tensor(gguf_name(name), np.float16(array) if half else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
