"""Incremental text: joined deltas are the one-shot text, and stop strings are found anywhere."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level, word_marked

from jaxserve.tokenizer import TextStream
from jaxserve.tokenizer.stream import StopStrings

BYTES = byte_level(control=["<|end|>"], user=["<mark>"], eos_token_id=256)
WORDS = word_marked(["▁Hello", "▁world", "!", "▁", "▁ok", "é"])
FIRST_BYTE, HELLO, WORLD, BANG, _, OK, _ = range(3, 3 + 256 + 6 + 1)[0], *range(259, 265)


def deltas(tokenizer, ids, prompt=(), **options):
    stream = TextStream(tokenizer, prompt, **options)
    return [stream.push(token) for token in ids], stream.finish(), stream.stopped


def test_characters_of_several_tokens_come_out_whole():  # B001
    ids = BYTES.encode("ď😀")
    assert len(ids) == 6
    assert deltas(BYTES, ids) == (["", "ď", "", "", "", "😀"], "", None)


def test_a_cut_character_shows_only_in_the_flush():  # B001
    pushed, tail, _ = deltas(BYTES, BYTES.encode("ď😀")[:4])
    assert pushed == ["", "ď", "", ""]
    assert tail == "\ufffd" == BYTES.decode(BYTES.encode("ď😀")[:4])[1:]


def test_a_leading_space_stays_after_a_prompt():  # B003
    assert deltas(WORDS, [WORLD, BANG], prompt=[HELLO])[0] == [" world", "!"]
    assert WORDS.decode([HELLO]) + " world!" == WORDS.decode([HELLO, WORLD, BANG]) == "Hello world!"


@pytest.mark.parametrize("prompt", [[], [1], [0, 1]])
def test_a_leading_space_goes_where_the_text_begins(prompt):  # B003: special tokens are no text
    pushed, tail, _ = deltas(WORDS, [WORLD, BANG], prompt)
    assert pushed == ["world", "!"]
    assert "".join(pushed) + tail == WORDS.decode([WORLD, BANG])


def test_byte_fallback_gives_bytes_not_letters():  # B004
    smile = [FIRST_BYTE + byte for byte in "😀".encode()]
    assert deltas(WORDS, [*smile, OK], [HELLO])[0] == ["", "", "", "😀", " ok"]
    assert deltas(WORDS, [FIRST_BYTE + 0x0A], [HELLO]) == (["\n"], "", None)
    assert deltas(WORDS, [FIRST_BYTE + 0xFF], [HELLO]) == (["\ufffd"], "", None)
    assert deltas(WORDS, [FIRST_BYTE + 0xF0], [HELLO]) == ([""], "\ufffd", None)


def test_special_tokens_are_skipped_or_shown():
    ids = [104, 256, 105, 257]
    assert "".join(deltas(BYTES, ids)[0]) == "hi<mark>"
    assert "".join(deltas(BYTES, ids, skip_special_tokens=False)[0]) == "h<|end|>i<mark>"


def test_ids_outside_the_vocabulary_are_nothing():
    assert deltas(BYTES, [104, 10**6, -1, 105]) == (["h", "", "", "i"], "", None)


def test_a_character_begun_by_the_prompt_is_completed():
    smile = list("😀".encode())
    assert deltas(BYTES, smile[2:], prompt=[97, *smile[:2]])[0] == ["", "😀"]


@settings(deadline=None)  # a busy machine is no fault
@given(
    ids=st.lists(st.integers(0, 260), max_size=60),
    tokenizer=st.sampled_from([BYTES, WORDS]),
    skip=st.booleans(),
)
def test_joined_deltas_are_the_decoded_text(ids, tokenizer, skip):
    stream = TextStream(tokenizer, skip_special_tokens=skip)
    text = "".join(map(stream.push, ids)) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)  # a busy machine is no fault
@given(text=st.text(max_size=40))
def test_every_delta_ends_between_characters(text):
    pushed, tail, _ = deltas(BYTES, BYTES.encode(text))
    assert "".join(pushed) == text
    assert tail == ""
    assert all("\ufffd" not in piece for piece in pushed) or "\ufffd" in text


# ---- stop strings


def pieces_through(pieces, stop, **options):
    """Text pieces through a stream: each byte is a token, so pieces are pushed token by token."""
    stream = TextStream(BYTES, stop=stop, **options)
    out = []
    for piece in pieces:
        out.append("".join(stream.push(token) for token in BYTES.encode(piece)))
    return out, stream.finish(), stream.stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [  # B021
        ([" Alice", "!"], ["\n", "Alice:"], " Alice!", None),
        (["?\n"], ["\n"], "?", "\n"),
        (["a", "b", "a", "b", "c"], ["ababd"], "ababc", None),
        (["abab", "abd", "x"], ["ababd"], "ab", "ababd"),
        (["aaab"], ["aab"], "a", "aab"),
        (["say </s", "top> no"], ["</stop>"], "say ", "</stop>"),
    ],
)
def test_stop_strings_across_tokens(pieces, stop, text, stopped):
    out, tail, found = pieces_through(pieces, stop)
    assert "".join(out) + tail == text
    assert found == stopped


def test_only_what_may_be_a_stop_string_is_held_back():
    out, tail, _ = pieces_through([" Alice", "!", " A", "lb"], ["\n", "Alice:"])
    assert out == [" ", "Alice!", " ", "Alb"]
    assert tail == ""


def test_the_stop_string_can_be_kept():
    out, tail, found = pieces_through(["ab", "cd"], ["bc"], include_stop=True)
    assert ("".join(out) + tail, found) == ("abc", "bc")


def test_nothing_follows_a_stop_string():
    stream = TextStream(BYTES, stop=["b"])
    assert [stream.push(token) for token in b"abcabc"] == ["a", "", "", "", "", ""]
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "found", "kept"),
    [
        ("xabcd", ["abcd", "bc"], "bc", "xa"),  # complete first wins
        ("xabc", ["bc", "abc"], "abc", "x"),  # of those that end together, the longest
        ("xabc", ["abc", "bc"], "abc", "x"),
    ],
)
def test_which_of_several_stop_strings_wins(text, stop, found, kept):
    assert pieces_through([text], stop) == ([kept], "", found)


def first_stop(text, stop):
    """By definition: the first end of any stop string, and of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(deadline=None)  # a busy machine is no fault
@given(
    pieces=st.lists(st.text("ab\n", max_size=6), max_size=12),
    stop=st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4),
)
def test_any_chunking_finds_the_same(pieces, stop):
    text = "".join(pieces)
    automaton, held, kept, state = StopStrings(stop), "", "", 0
    expected, expected_stop = first_stop(text, stop)
    for piece in pieces:
        state, found, end = automaton.scan(state, piece)
        if found is not None:
            assert found == expected_stop
            window = held + piece[:end]
            assert kept + window[: len(window) - len(found)] == expected
            return
        window = held + piece
        safe = len(window) - automaton.depth[state]
        kept, held = kept + window[:safe], window[safe:]
        assert any(s.startswith(held) for s in stop) or not held  # held back for a reason
    assert expected_stop is None
    assert kept + held == expected


def test_long_outputs_cost_the_same_per_token():
    """Nothing grows with the output: after many tokens the stream holds what it held at first."""
    stream = TextStream(BYTES, stop=["never"])
    for _ in range(2000):
        for token in b"some text n":
            stream.push(token)
    held = stream.__dict__["_held"] + stream.__dict__["_pending"].decode()
    assert len(held) <= len("never")
