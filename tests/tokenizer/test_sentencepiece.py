"""Sentencepiece .model files: the ids and texts are those of the sentencepiece library."""

import json
import pathlib

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import tokenizer as package

LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "vocab_size": 380,
}
KINDS = {
    "llama": LLAMA,
    "no_prefix": LLAMA | {"add_dummy_prefix": False},
    "nmt_bpe": {"model_type": "bpe", "vocab_size": 110},
    "unigram": {"model_type": "unigram", "vocab_size": 60},
    "nfkc_bytes": {
        "model_type": "unigram",
        "byte_fallback": True,
        "normalization_rule_name": "nfkc",
        "vocab_size": 330,
    },
}
TEXT = "hello world the cat naïve 日本 über 12 foo_bar émile a b . ! 😀 ﬁ Ａ ①"
WORDS = TEXT.split()
# Every sentence shifts the words, so that pairs of them vary.
SENTENCES = [" ".join(WORDS[n % 17 :] + WORDS[: n % 13] * 2) for n in range(400)]
ALPHABET = st.sampled_from([*"abcdehlo  \n\té日本😀ﬁＡ①12.!xyzZ", "hello", "naïve", "  "])


@pytest.fixture(scope="module", params=KINDS)
def both(request, tmp_path_factory):
    """The library's processor and our tokenizer over one small model."""
    folder = tmp_path_factory.mktemp(request.param)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(folder / "tokenizer"),
        hard_vocab_limit=False,
        minloglevel=2,
        **KINDS[request.param],
    )
    (folder / "tokenizer.vocab").unlink()
    model = str(folder / "tokenizer.model")
    return sentencepiece.SentencePieceProcessor(model_file=model), package.load(folder)


@settings(deadline=None)  # a busy machine is no fault
@given(parts=st.lists(ALPHABET, max_size=12))
def test_ids_and_texts_are_the_librarys(both, parts):
    library, ours = both
    text = "".join(parts)
    ids = library.encode(text)
    assert ours.encode(text, add_special_tokens=False) == ids
    if not any(map(library.is_unknown, ids)):  # the library shows those as " ⁇ "
        assert ours.decode(ids) == library.decode(ids)


def test_control_tokens_are_found_and_begin_once(both):
    library, ours = both
    hello = library.encode("hello")
    assert ours.encode("hello") == ours.encode("<s>hello")[:1] + hello == [library.bos_id(), *hello]
    assert ours.eos_ids == {library.eos_id()}
    assert ours.vocab_size == library.get_piece_size()


@pytest.fixture
def folder(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_prefix=str(tmp_path / "tokenizer"),
        minloglevel=2,
        **LLAMA | {"vocab_size": 330, "hard_vocab_limit": False},
    )
    return tmp_path


def test_the_folder_adds_tokens_and_a_template(folder):
    plain = package.load(folder)
    size = plain.vocab_size
    config = {
        "add_bos_token": False,
        "eos_token": "<|im_end|>",
        "added_tokens_decoder": {str(size): {"content": "<|im_end|>", "special": True}},
        "chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = package.load(folder)
    assert ours.vocab_size == size + 1
    assert ours.eos_ids == {size}
    chat = ours.encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    assert chat.count(size) == 1
    assert ours.decode(chat) == "a<|im_end|>b"
    assert ours.encode("a b<|im_end|>") == [*plain.encode("a b")[1:], size]


@pytest.mark.parametrize(
    "content", [b"", b"IQ== 0\nIg== 1\n", b"\x0a\xff\xff\xff\xff\x0f", b"\0" * 64]
)
def test_files_that_are_no_model_are_refused(tmp_path: pathlib.Path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ValueError, match=r"not a sentencepiece model.*tokenizer\.json"):
        package.load(tmp_path)
