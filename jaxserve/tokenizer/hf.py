"""The `tokenizers` library as an Encoder, and Hugging Face folders with a tokenizer.json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

import tokenizers

from jaxserve.tokenizer.base import Tokenizer, TokenTable
from jaxserve.tokenizer.bytelevel import piece_bytes
from jaxserve.tokenizer.folder import TokenizerFolder, extend
from jaxserve.tokenizer.seal import SEAL
from jaxserve.tokenizer.vocabulary import byte_of

UNUSUAL = "\U000f1234 \u00e9\U0001f600"  # a vocabulary without bytes has none of these
BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")

# How many characters can become one before tokens are counted. Composing accents (NFC) joins four
# at most. Rules that drop white space, or one <unk> for a whole word, have no bound: texts that
# rely on them for more than this are refused as too long.
COMPOSING, DROPPING = 4, 8
COMPOSING_RULES = {"NFC", "NFKC"}
LENGTH_KEEPING_RULES = {"Sequence", "Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel"}


class FastEncoder:
    """Encoder over a `tokenizers.Tokenizer`, which releases the GIL and is safe to share."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self.chars_shrink = _chars_shrink(tokenizer)

    def encode(self, text: str) -> list[int]:
        return _ids(self._tokenizer, text)

    def sealed(self, control: Collection[str]) -> Callable[[str], list[int]]:
        """Encodes with a twin that shares the model but knows control tokens only with a seal."""
        twin = tokenizers.Tokenizer(self._tokenizer.model)
        if self._tokenizer.normalizer is not None:
            twin.normalizer = self._tokenizer.normalizer
        if self._tokenizer.pre_tokenizer is not None:
            twin.pre_tokenizer = self._tokenizer.pre_tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        entries = {token: _sealed(added[token], control) for token in sorted(added)}
        twin.add_tokens(list(entries.values()))  # in one call: each one rebuilds the search
        unseal = {twin.token_to_id(entry.content): token for token, entry in entries.items()}

        return lambda text: [unseal.get(token, token) for token in _ids(twin, text)]


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """Ids of a text. JSON can spell halves of surrogate pairs, which are no characters and which
    the library takes for no text: pairs become their character and lone halves U+FFFD."""
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    except TypeError:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return tokenizer.encode(text, add_special_tokens=False).ids


def _sealed(entry: tokenizers.AddedToken, control: Collection[str]) -> tokenizers.AddedToken:
    """The entry for the twin: never special there, so that nothing hides it."""
    is_control = entry.content in control
    return tokenizers.AddedToken(
        SEAL + entry.content if is_control else entry.content,
        single_word=entry.single_word,
        lstrip=entry.lstrip,
        rstrip=entry.rstrip,
        normalized=entry.normalized and not is_control,
    )


def _chars_shrink(tokenizer: tokenizers.Tokenizer) -> int:
    strips = (t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
    if any(strips) or _can_be_unknown(tokenizer):
        return DROPPING
    if tokenizer.normalizer is None:
        return 1
    rules = list(_rules(json.loads(tokenizer.normalizer.__getstate__())))
    shrink = 1
    for rule in rules:
        if rule["type"] in COMPOSING_RULES:
            shrink = COMPOSING
        elif rule["type"] == "Replace" and len(rule["pattern"].get("String", "")) == 1:
            if not rule["content"]:
                return DROPPING
        elif rule["type"] not in LENGTH_KEEPING_RULES:
            return DROPPING
    return shrink


def _can_be_unknown(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether one <unk> may stand for a whole word."""
    model = tokenizer.model
    if isinstance(model, tokenizers.models.BPE):
        return model.unk_token is not None and not model.byte_fallback
    return not isinstance(model, tokenizers.models.Unigram)


def _rules(state: dict):
    """A normalizer's or decoder's parts, flattened."""
    yield state
    for part in state.get("normalizers", state.get("decoders", ())):
        yield from _rules(part)


def from_folder(folder: TokenizerFolder) -> Tokenizer:
    """The tokenizer of a folder with a tokenizer.json. ValueError names what is not understood."""
    file = folder.path / "tokenizer.json"
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    extend(tokenizer, folder.added_tokens())
    tokenizer.encode(UNUSUAL)  # what fails on characters it does not know fails now
    return assemble(tokenizer, token_table(tokenizer), folder, *_ends(tokenizer))


def assemble(
    tokenizer: tokenizers.Tokenizer,
    table: TokenTable,
    folder: TokenizerFolder,
    begin: list[int],
    end: list[int],
) -> Tokenizer:
    """A Tokenizer from a library object and what its folder says. begin, end: what the library
    puts around a prompt, where tokenizer_config.json does not say otherwise."""
    ids = {role: folder.role(role) for role in ("bos", "eos", "pad")}
    ids = {role: None if t is None else tokenizer.token_to_id(t) for role, t in ids.items()}
    for role, default in (("bos", begin), ("eos", end)):
        wanted = folder.config.get(f"add_{role}_token")
        if wanted is False:
            default[:] = [token for token in default if token != ids[role]]
        elif wanted and ids[role] is not None and ids[role] not in default:
            default.append(ids[role])
    for token in (*begin, *end):
        if token >= len(table.pieces):
            raise ValueError(f"prompts begin or end with token {token}, which there is not")
    return Tokenizer(
        FastEncoder(tokenizer),
        table,
        bos_id=ids["bos"],
        begin=begin,
        end=end,
        eos_id=ids["eos"],
        eos_ids=folder.end_ids(),
        pad_id=ids["pad"],
        chat_template=folder.chat_template(),
    )


def token_table(tokenizer: tokenizers.Tokenizer) -> TokenTable:
    """What each id stands for, from the vocabulary and the decoder that tokenizer.json names."""
    spelling = _Spelling(tokenizer.decoder)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    pieces, data = [""] * size, [b""] * size
    for piece, token in vocabulary.items():
        pieces[token], data[token] = piece, spelling.data(piece)
    added = tokenizer.get_added_tokens_decoder()
    for token, entry in added.items():
        pieces[token], data[token] = entry.content, spelling.added(entry)
    return TokenTable(
        pieces,
        data,
        special=frozenset(token for token, entry in added.items() if entry.special),
        added={entry.content: token for token, entry in added.items()},
        drops_first_space=spelling.drops_first_space,
    )


class _Spelling:
    """How a decoder makes bytes of pieces. Raises ValueError naming a step we do not know."""

    def __init__(self, decoder: tokenizers.decoders.Decoder | None):
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._joint = ""  # goes before every piece: what joins them, less the first one's
        self.drops_first_space = False
        if decoder is None:
            self._joint, self.drops_first_space = " ", True
            return
        for step in _rules(json.loads(decoder.__getstate__())):
            self._read(step)

    def _read(self, step: dict) -> None:
        match step:
            case {"type": "Sequence" | "Fuse"}:
                pass
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(old) == 1:
                self._replacements.append((old, new))
            case {"type": "Metaspace", "replacement": mark}:
                self._replacements.append((mark, " "))
                self.drops_first_space = step.get("prepend_scheme") != "never"
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.drops_first_space = bool(start)
            case _:
                raise ValueError(
                    f"tokenizer.json decodes with {json.dumps(step)[:200]}, which is not "
                    "supported; byte-level and sentencepiece spellings are"
                )

    def data(self, piece: str) -> bytes:
        if self._byte_level:
            return piece_bytes(piece)
        if self._byte_fallback and BYTE_PIECE.fullmatch(piece):
            return byte_of(piece)
        return self._plain(piece)

    def added(self, entry: tokenizers.AddedToken) -> bytes:
        """Added tokens stand for themselves, in the vocabulary's spelling if they are text."""
        if self._byte_level or entry.special:
            return entry.content.encode("utf-8", "replace")
        return self._plain(entry.content)

    def _plain(self, piece: str) -> bytes:
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return (self._joint + piece).encode("utf-8", "replace")


def _ends(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the library's post-processor puts before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a").ids
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return whole[:at], whole[at + len(bare) :]
    raise ValueError("tokenizer.json has a post-processor that changes the text's own tokens")
