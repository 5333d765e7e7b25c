"""Hugging Face folders: tokenizer.json with the small files beside it."""

import concurrent.futures
import json
import pathlib

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHATML
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve import tokenizer as package
from jaxserve.tokenizer import TextStream, hf
from jaxserve.tokenizer.bytelevel import BYTE_OF_CHAR, CHAR_OF_BYTE, piece_bytes
from jaxserve.tokenizer.folder import TokenizerFolder

BYTE_VOCAB = {CHAR_OF_BYTE[byte]: byte for byte in range(256)}
MARKED = ["<unk>", "▁Hello", "▁world", "!", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]


def byte_level():
    tokenizer = tokenizers.Tokenizer(models.BPE({**BYTE_VOCAB, "ab": 256}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])  # 257, 258, 259
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])  # 260
    return tokenizer


def word_marked():
    model = models.BPE(
        {piece: n for n, piece in enumerate(MARKED)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def assembled(fast):
    nowhere = TokenizerFolder(pathlib.Path("no such folder"))
    return hf.assemble(fast, hf.token_table(fast), nowhere, [], [])


BYTE_FAST, WORD_FAST = byte_level(), word_marked()
BYTE_TOKENIZER, WORD_TOKENIZER = assembled(BYTE_FAST), assembled(WORD_FAST)


def save(folder: pathlib.Path, tokenizer, config=None, **files):
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {"tokenizer_config": config or {}, **files}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return package.load(folder)


def test_a_folder_gives_ids_roles_and_template(tmp_path):
    config = {
        "bos_token": None,
        "eos_token": {"content": "<|im_end|>", "lstrip": False},
        "pad_token": "<s>",
        "chat_template": CHATML,
    }
    tokenizer = save(tmp_path, byte_level(), config, generation_config={"eos_token_id": [258, 259]})
    assert tokenizer.encode("ab c<|im_end|>") == [256, 32, ord("c"), 258]
    assert (tokenizer.bos_id, tokenizer.pad_id) == (None, 259)
    assert tokenizer.eos_ids == {258, 259}
    assert tokenizer.vocab_size == 261
    chat = tokenizer.encode_chat([{"role": "user", "content": "<|im_end|>"}])
    assert [t for t in chat if t > 256] == [257, 258, 257]
    assert tokenizer.decode([256, 260, 258]) == "ab<tool>"
    assert tokenizer.decode([256, 258], skip_special_tokens=False) == "ab<|im_end|>"
    assert tokenizer.token_text(256) == "ab"
    assert tokenizer.is_special(258)
    assert not tokenizer.is_special(260)


def test_added_tokens_that_tokenizer_json_lacks(tmp_path):
    added = {"261": {"content": "<new>", "special": True}, "262": {"content": "<plain>"}}
    tokenizer = save(tmp_path, byte_level(), {"added_tokens_decoder": added})
    assert tokenizer.encode("a<new><plain>") == [97, 261, 262]
    assert tokenizer.decode([97, 261, 262]) == "a<plain>"
    with pytest.raises(ValueError, match="<new>"):
        save(tmp_path, byte_level(), {"added_tokens_decoder": {"300": added["261"]}})


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [259, 97]),
        ({"add_bos_token": True}, [259, 97]),
        ({"add_bos_token": False}, [97]),
        ({"add_bos_token": False, "add_eos_token": True}, [97, 258]),
    ],
)
def test_begin_tokens_from_the_post_processor_and_the_config(tmp_path, config, ids):
    fast = byte_level()
    fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 259)])
    tokenizer = save(tmp_path, fast, {"bos_token": "<s>", "eos_token": "<|im_end|>", **config})
    assert tokenizer.encode("a") == ids
    assert tokenizer.encode("<s>a") == [259, *(token for token in ids if token != 259)]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]


def test_add_bos_token_counts_without_a_post_processor(tmp_path):  # B007
    config = {
        "bos_token": "<s>",
        "add_bos_token": True,
        "chat_template": "<s>{{ messages|length }}",
    }
    tokenizer = save(tmp_path, byte_level(), config)
    assert tokenizer.encode("a") == tokenizer.encode("<s>a") == [259, 97]
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [259, ord("1")]


def test_saved_truncation_and_padding_do_not_cut_prompts(tmp_path):
    fast = byte_level()
    fast.enable_truncation(4)
    fast.enable_padding(length=8)
    assert save(tmp_path, fast).encode("ccccccc") == [99] * 7


def test_the_template_file_wins_and_named_templates_have_a_default(tmp_path):
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert save(tmp_path, byte_level(), {"chat_template": named}).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert package.load(tmp_path).chat_template == "F"


def test_ids_above_the_vocabulary_decode_to_nothing(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    assert tokenizer.decode([97, 261, 10**9, -1, 98]) == "ab"
    assert tokenizer.token_bytes(10**9) == b""


@settings(deadline=None)  # a busy machine is no fault
@given(ids=st.lists(st.integers(0, 260), max_size=20))
def test_byte_level_text_is_the_librarys(ids):
    assert BYTE_TOKENIZER.decode(ids) == BYTE_FAST.decode(ids)


@settings(deadline=None)  # a busy machine is no fault
@given(text=st.text(max_size=20))
def test_any_text_comes_back(text):
    assert BYTE_TOKENIZER.decode(BYTE_TOKENIZER.encode(text), skip_special_tokens=False) == text


@settings(deadline=None)  # a busy machine is no fault
@given(pieces=st.lists(st.sampled_from([1, 2, 3, 4, 5 + 0x0A, 5 + 0x41]), max_size=8))
def test_word_marked_text_is_the_librarys(pieces):
    stream = TextStream(WORD_TOKENIZER)
    text = WORD_FAST.decode(pieces)
    assert WORD_TOKENIZER.decode(pieces) == text
    assert "".join(map(stream.push, pieces)) + stream.finish() == text


def test_a_metaspace_decoder_drops_the_first_space(tmp_path):  # B003
    fast = word_marked()
    fast.decoder = decoders.Metaspace()
    tokenizer = save(tmp_path, fast)
    stream = TextStream(tokenizer, [1])
    assert [stream.push(2), stream.push(3)] == [" world", "!"]
    assert tokenizer.decode([2, 3]) == "world!"
    fast.decoder = decoders.Metaspace(prepend_scheme="never")
    assert save(tmp_path, fast).decode([2, 3]) == " world!"


def test_without_a_decoder_pieces_are_words(tmp_path):
    fast = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = save(tmp_path, fast)
    assert tokenizer.decode(tokenizer.encode("a b a")) == fast.decode([0, 1, 0]) == "a b a"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip("x", 1, 0),
        decoders.Replace(Regex("a+"), "b"),
    ],
)
def test_decoders_we_do_not_know_are_refused_by_name(tmp_path, decoder):
    fast = byte_level()
    fast.decoder = decoder
    with pytest.raises(ValueError, match=json.loads(decoder.__getstate__())["type"]):
        save(tmp_path, fast)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100000])
def test_damaged_files_are_named(tmp_path, content):
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer_config"):
        package.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json|tokenizer_config"):
        package.load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"261": {}}},
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": [1]},
        {"chat_template": 3},
        {"bos_token": [1]},
    ],
)
def test_values_of_wrong_types_are_refused(tmp_path, config):
    with pytest.raises(ValueError, match=r"--tokenizer|invalid literal"):
        save(tmp_path, byte_level(), config)


def test_an_empty_folder_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json.*--tokenizer"):
        package.load(tmp_path)
    with pytest.raises(ValueError, match="--tokenizer"):
        package.load(tmp_path / "model.safetensors")


def test_an_override_is_used_instead(tmp_path):
    save(tmp_path, byte_level())
    assert package.load(tmp_path / "nothing.gguf", override=tmp_path).vocab_size == 261
    assert package.load(tmp_path / "nothing.gguf", override=tmp_path / "tokenizer.json").encode("a")


def test_halves_of_surrogate_pairs_are_text_too(tmp_path):
    tokenizer = save(tmp_path, byte_level(), {"chat_template": "{{ messages[0].content }}"})
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude00")) == "😀"
    chat = tokenizer.encode_chat([{"role": "user", "content": "\ud800<|im_end|>"}])
    assert tokenizer.decode(chat) == "\ufffd<|im_end|>"


def test_threads_share_a_tokenizer(tmp_path):
    tokenizer = save(tmp_path, byte_level(), {"chat_template": CHATML})

    def work(n):
        text = f"thread {n} <|im_end|> ď😀 "
        ids = tokenizer.encode(text * 20)
        chat = tokenizer.encode_chat([{"role": "user", "content": text}])
        return tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(chat), text

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for whole, chat, text in pool.map(work, range(40)):
            assert whole == text * 20
            assert text in chat


# ---- bounds before tokenising (B025)


def test_no_text_of_more_characters_fits(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    assert tokenizer.max_chars_for(10) == 10 * len("<|im_start|>")
    assert tokenizer.cannot_fit("a" * 2_000_000, 100)
    assert not tokenizer.cannot_fit("ab" * 10, 10)


def test_a_beginning_tells_that_a_text_is_too_long(tmp_path):
    tokenizer = save(tmp_path, byte_level())
    text = "😀" * 1000  # 4000 tokens, within the bound on characters
    assert len(text) <= tokenizer.max_chars_for(100)
    assert tokenizer.cannot_fit(text, 100)
    assert not tokenizer.cannot_fit("<|im_start|>" * 100, 100)


@pytest.mark.parametrize(
    ("normalizer", "factor"),
    [
        (None, 1),
        (normalizers.Replace(" ", "▁"), 1),
        (normalizers.NFC(), 4),
        (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), 4),
        (normalizers.Strip(), 8),
        (normalizers.Replace(Regex(" +"), " "), 8),
    ],
)
def test_the_bound_allows_for_what_normalisation_joins(tmp_path, normalizer, factor):
    fast = byte_level()
    if normalizer is not None:
        fast.normalizer = normalizer
    tokenizer = save(tmp_path, fast)
    assert tokenizer.max_chars_for(10) == 10 * len("<|im_start|>") * factor


def test_the_byte_alphabet_is_a_bijection():
    assert len(CHAR_OF_BYTE) == len(BYTE_OF_CHAR) == 256
    assert piece_bytes("Ġa") == b" a"
    assert piece_bytes("Ċ") == b"\n"
    assert all(piece_bytes(CHAR_OF_BYTE[byte]) == bytes([byte]) for byte in range(256))
    assert piece_bytes("日") == "日".encode()
