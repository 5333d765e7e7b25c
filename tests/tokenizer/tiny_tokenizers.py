"""Vocabularies small enough to check by eye, described as GGUF metadata and JSON."""

import numpy as np

from jaxserve.tokenizer import gguf
from jaxserve.tokenizer.bytelevel import CHAR_OF_BYTE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level_metadata(*, merges=(), control=(), user=(), unused=(), **settings):
    """Tokens 0 to 255 are the bytes in order; then come merges, control, user-defined, unused."""
    tokens = [CHAR_OF_BYTE[byte] for byte in range(256)]
    tokens += ["".join(merge.split(" ")) for merge in merges]
    kinds = [NORMAL] * len(tokens)
    for extra, kind in ((control, CONTROL), (user, USER_DEFINED), (unused, UNUSED)):
        tokens += extra
        kinds += [kind] * len(extra)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": list(merges),
    }
    template = settings.pop("chat_template", None)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in settings.items()}


def byte_level(**description):
    return gguf.from_metadata(byte_level_metadata(**description))


def chatml(**settings):
    """Byte tokens, then <|im_start|> 256, <|im_end|> 257, <s> 258, and the mark <think> 259."""
    settings = {"chat_template": CHATML, "eos_token_id": 257} | settings
    return byte_level(control=["<|im_start|>", "<|im_end|>", "<s>"], user=["<think>"], **settings)


def word_marked(pieces, *, bytes_too=True, **settings):
    """<unk> 0, <s> 1, </s> 2, the 256 byte tokens from 3 on (if wanted), then the pieces."""
    tokens, kinds = ["<unk>", "<s>", "</s>"], [UNKNOWN, CONTROL, CONTROL]
    if bytes_too:
        tokens += [f"<0x{byte:02X}>" for byte in range(256)]
        kinds += [BYTE] * 256
    tokens, kinds = tokens + list(pieces), kinds + [NORMAL] * len(pieces)
    return gguf.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(kinds, np.int32),
            "tokenizer.ggml.scores": np.array([-float(i) for i in range(len(tokens))], np.float32),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
        }
        | {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    )
