"""Vocabularies inside GGUF files."""

import numpy as np
import pytest
import tiny_tokenizers as tiny
from gguf import GGUFWriter
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from jaxserve import tokenizer as package
from jaxserve.tokenizer import gguf
from jaxserve.tokenizer.pretokenizers import PRE_TOKENIZERS, find_pre_tokenizer


def words(name, text):
    """How a pre-tokenizer splits a text, without the byte spelling."""
    steps = find_pre_tokenizer(name).build().pre_tokenize_str(text)
    return [text[begin:end] for _, (begin, end) in steps]


# By hand from the published expressions: what tells the kinds apart is digits, endings in capitals,
# capitals inside words, lines after punctuation, and several spaces.
@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "I'm 12345 ok", ["I", "'m", " 12345", " ok"]),
        ("smollm", "I'm 123 ok", ["I", "'m", " ", "1", "2", "3", " ok"]),
        ("llama-bpe", "I'M 12345 ok", ["I", "'M", " ", "123", "45", " ok"]),
        ("qwen2", "I'M 123 ok", ["I", "'M", " ", "1", "2", "3", " ok"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", " ", "1", "2"]),
        ("deepseek-v3", "ab12345日本 c", ["ab", "123", "45", "日本", " c"]),
        ("deepseek-coder", "a b.\n1", ["a", " b", ".", "\n", "1"]),
        ("default", "a1234, b", ["a", "123", "4", ",", " b"]),
        ("qwen2", "a   b\n\n  c", ["a", "  ", " b", "\n\n", " ", " c"]),
        ("gpt-2", "a   b\n\n  c", ["a", "  ", " b", "\n\n ", " c"]),
        ("llama-bpe", "x;\n\ny", ["x", ";\n\n", "y"]),
        ("seed-coder", "x;\n\ny", ["x", ";", "\n\n", "y"]),
    ],
)
def test_words_of_each_kind(name, text, expected):
    assert words(name, text) == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_kind_loses_no_character(name):
    text = "I'Ll ｢go｣ 123456 日本語 naïve a\u0300 \t\r\n\n  x=1;//é 😀👍🏽 한국 "
    assert "".join(words(name, text)) == text


def test_merges_and_control_tokens():
    tokenizer = tiny.byte_level(
        merges=["a b", "ab c"], control=["<|end|>"], user=["<mark>"], unused=["[PAD]"]
    )
    assert tokenizer.encode("abc<|end|>ab<mark>c") == [257, 258, 256, 259, 99]
    assert tokenizer.decode([257, 258, 259, 260, 97]) == "abc<mark>a"
    assert tokenizer.special_ids == {258}
    assert tokenizer.vocab_size == 261


def test_words_that_are_tokens_need_no_merges_where_the_kind_says_so():
    described = {"merges": ["a b"], "user": []}
    metadata = tiny.byte_level_metadata(**described)
    metadata["tokenizer.ggml.tokens"] += ["xyz"]
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], 1)
    for name, ids in (("gpt-2", [120, 121, 122]), ("llama-bpe", [257])):
        assert gguf.from_metadata(metadata | {"tokenizer.ggml.pre": name}).encode("xyz") == ids


@pytest.mark.parametrize(("name", "begins"), [("gpt-2", False), ("llama-bpe", True)])
def test_begin_tokens_as_the_file_or_the_kind_says(name, begins):  # B007
    described = {"control": ["<s>"], "bos_token_id": 256, "pre": name}
    assert tiny.byte_level(**described).encode("a") == [256] * begins + [97]
    assert tiny.byte_level(**described, add_bos_token=not begins).encode("<s>a") == [256, 97]
    assert tiny.byte_level(**described, add_bos_token=False).encode("a") == [97]
    end = {"eos_token_id": 256, "add_eos_token": True, "add_bos_token": False}
    assert tiny.byte_level(**described | end).encode("a") == [97, 256]


def test_turn_ends_are_those_named_and_those_known():
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<odd>"]
    assert tiny.byte_level(control=control, eos_token_id=259).eos_ids == {256, 258, 259}
    assert tiny.byte_level(user=control).eos_ids == frozenset()
    harmony = ["<|end|>", "<|return|>", "<|call|>"]
    assert tiny.byte_level(control=harmony).eos_ids == {257, 258}
    assert tiny.byte_level(control=harmony[:1]).eos_ids == {256}


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(ValueError, match=r"'brand-new'.*--tokenizer"):
        tiny.byte_level(pre="brand-new")
    metadata = tiny.byte_level_metadata()
    with pytest.raises(ValueError, match=r"'bert'.*--tokenizer"):
        gguf.from_metadata(metadata | {"tokenizer.ggml.model": "bert"})
    del metadata["tokenizer.ggml.pre"]
    with pytest.raises(KeyError, match=r"tokenizer\.ggml\.pre"):
        gguf.from_metadata(metadata)


@pytest.mark.parametrize(
    "damage",
    [
        {"tokenizer.ggml.token_type": np.array([1, 1], np.int32)},
        {"tokenizer.ggml.merges": ["a"]},
        {"tokenizer.ggml.merges": ["a b"]},  # the result is no token
        {"tokenizer.ggml.bos_token_id": 10**6},
        {"tokenizer.ggml.eos_token_id": -1},
    ],
)
def test_damaged_vocabularies_are_refused(damage):
    with pytest.raises(ValueError, match=r"damaged|outside"):
        gguf.from_metadata(tiny.byte_level_metadata() | damage)


# ---- sentencepiece kinds


def test_scores_give_the_order_of_merges():
    # By the scores "bc" (id 5) joins before "ab" (id 6): from "abc" come a + bc.
    pieces = ["a", "b", "c", "▁", "bc", "ab"]
    tokenizer = tiny.word_marked(pieces, bytes_too=False, add_space_prefix=False)
    assert tokenizer.encode("abc", False) == [3, 7]
    assert tokenizer.encode("ab", False) == [8]


def test_space_prefix_and_byte_fallback():
    tokenizer = tiny.word_marked(["▁", "a", "▁a"])
    assert tokenizer.encode("a") == [1, 261]
    assert tokenizer.encode("é") == [1, 259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode(tokenizer.encode("a é\n")) == "a é\n"
    bare = tiny.word_marked(["▁", "a", "▁a"], add_space_prefix=False, add_bos_token=False)
    assert bare.encode("a") == [260]
    assert bare.decode([261]) == " a"


def test_listed_merges_with_word_marks():
    tokens = ["<unk>", "a", "b", "▁", "▁a", "▁ab"]
    tokenizer = gguf.from_metadata(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([2, 1, 1, 1, 1, 1], np.int32),
            "tokenizer.ggml.merges": ["▁ a", "▁a b"],
            "tokenizer.ggml.unknown_token_id": 0,
        }
    )
    assert tokenizer.encode("ab ab", False) == [1, 2, 5]
    assert tokenizer.decode([1, 2, 5]) == "ab ab"


def test_a_damaged_byte_token_is_refused():
    with pytest.raises(ValueError, match="<0xZZ>"):
        gguf.from_metadata(
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": ["<0xZZ>"],
                "tokenizer.ggml.token_type": np.array([6], np.int32),
                "tokenizer.ggml.scores": np.zeros(1, np.float32),
            }
        )


def test_the_library_shares_a_model_between_tokenizers():
    """The sealed twin relies on it: two tokenizers over one model, not two copies of it."""
    model = models.BPE({"a": 0}, [])
    one, two = FastTokenizer(model), FastTokenizer(model)
    one.add_tokens(["<x>"])
    assert one.token_to_id("<x>") == 1
    assert two.token_to_id("<x>") is None
    assert one.token_to_id("a") == two.token_to_id("a") == 0


# ---- whole files


def write(path, metadata):
    """A GGUF file with this metadata and no tensors."""
    writer = GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


DESCRIBED = {"merges": ["a b"], "control": ["<|end|>"], "eos_token_id": 257, "add_bos_token": False}


def test_a_file_is_loaded(tmp_path):
    path = write(tmp_path / "m.gguf", tiny.byte_level_metadata(**DESCRIBED, chat_template="hi"))
    tokenizer = package.load(path)
    assert tokenizer.encode("abc<|end|>") == [256, 99, 257]
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "x"}])) == "hi"


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "token_type", "merges", "eos_token_id"])
@pytest.mark.parametrize("value", [None, 3, "x", ["x"], np.array([1, 2])])
def test_files_with_wrong_values_are_refused_by_name(tmp_path, key, value):
    metadata = tiny.byte_level_metadata(**DESCRIBED)
    key = f"tokenizer.ggml.{key}"
    del metadata[key]
    if value is not None:
        metadata[key] = value
    try:
        tokenizer = package.load(write(tmp_path / "m.gguf", metadata))
    except ValueError as error:
        assert len(str(error)) < 2000
    else:  # what may be missing, or is right by chance
        assert key.endswith(("token_type", "eos_token_id"))
        assert value in (None, 3)
        assert tokenizer.encode("ab") == [256]


def test_the_fingerprint_is_of_what_it_does():
    """Equal for equal tokenizers; another split of words shows even with the same tokens."""
    plain = tiny.byte_level(merges=["1 4"], control=["<s>"])
    assert plain.fingerprint() == tiny.byte_level(merges=["1 4"], control=["<s>"]).fingerprint()
    others = [
        tiny.byte_level(merges=["1 5"], control=["<s>"]),
        tiny.byte_level(merges=["1 4"], user=["<s>"]),
        tiny.byte_level(merges=["1 4"], control=["<s>"], chat_template="{{ 1 }}"),
        tiny.byte_level(merges=["1 4"], control=["<s>"], eos_token_id=257),
        tiny.byte_level(merges=["1 4"], control=["<s>"], pre="qwen2"),
    ]
    assert len({tokenizer.fingerprint() for tokenizer in [plain, *others]}) == 6
