"""How byte-level BPE vocabularies split text into words before merging, by the name GGUF gives it.

Each entry holds the expressions that the models' own tokenizer.json files carry; several are
applied one after the other, each splitting what the one before left. A name we do not know is
refused: with a wrong split the model still answers, only worse, and nobody would know why.
"""

from __future__ import annotations

import dataclasses

import tokenizers
from tokenizers import Regex, pre_tokenizers

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
QWEN2 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
SEED = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
HAN_KANA = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
HAN_HANGUL = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
SENTENCE_MARKS = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """expressions: applied in order. ignore_merges: a word that is a token needs no merges.

    adds_bos: whether models of this name want a begin token when the file does not say.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> tokenizers.pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(e), "isolated") for e in self.expressions]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])


_KINDS = [
    (
        "gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais exaone4 trillion granite-docling",
        PreTokenizer((GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((DIGIT, GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((LLAMA3,))),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((QWEN2,)),
    ),
    ("qwen35", PreTokenizer((QWEN35,))),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((GPT4O,))),
    ("tekken", PreTokenizer((TEKKEN,), ignore_merges=True, adds_bos=True)),
    ("seed-coder", PreTokenizer((SEED,))),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer((r"\p{N}{1,3}", HAN_KANA, DEEPSEEK3))),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_HANGUL, DIGIT))),
    ("bloom poro-chat gpt3-finnish", PreTokenizer((SENTENCE_MARKS,))),
    ("viking", PreTokenizer((SENTENCE_MARKS, DIGIT))),
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
]
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS for name in names.split()}


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The entry of a `tokenizer.ggml.pre` value; ValueError naming it when there is none."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, which is not supported (known: "
            f"{', '.join(sorted(PRE_TOKENIZERS))}). Give the model's tokenizer folder with "
            "--tokenizer"
        ) from None
