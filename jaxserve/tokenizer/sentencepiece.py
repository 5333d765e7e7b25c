"""Sentencepiece .model files, made into `tokenizers` objects.

One library then serves every vocabulary: it shares between threads, finds control tokens and can be
told not to. That the ids are those of the sentencepiece library is a test.
"""

from __future__ import annotations

import pathlib

import tokenizers
from tokenizers import Regex, decoders, models, normalizers

from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.folder import TokenizerFolder, extend
from jaxserve.tokenizer.hf import assemble, token_table
from jaxserve.tokenizer.vocabulary import BYTE, WORD_MARK, Vocabulary

UNIGRAM, BPE = 1, 2  # TrainerSpec.model_type
MAX_MODEL_BYTES = 256 * 1024 * 1024


def from_model_file(file: pathlib.Path, folder: TokenizerFolder) -> Tokenizer:
    """The tokenizer of a .model file, with what its folder says besides. ValueError if damaged."""
    model = _read(file)
    vocabulary = Vocabulary([p.piece for p in model.pieces], [p.type for p in model.pieces])
    encoder = _encoder(file, model, vocabulary)
    encoder.decoder = _decoder(model.normalizer_spec.add_dummy_prefix)
    extend(encoder, folder.added_tokens())
    trainer = model.trainer_spec
    for role, token in (("bos", trainer.bos_id), ("eos", trainer.eos_id), ("pad", trainer.pad_id)):
        if folder.role(role) is None and 0 <= token < len(vocabulary.pieces):
            folder.config[f"{role}_token"] = vocabulary.pieces[token]
    begin = [trainer.bos_id] if 0 <= trainer.bos_id < len(vocabulary.pieces) else []
    return assemble(encoder, token_table(encoder), folder, begin, [])


def _read(file: pathlib.Path):
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    if file.stat().st_size > MAX_MODEL_BYTES:
        raise ValueError(f"{file}: larger than {MAX_MODEL_BYTES} bytes")
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(file.read_bytes())
    except DecodeError:
        model.Clear()
    if not model.pieces:
        raise ValueError(
            f"{file}: not a sentencepiece model (a tiktoken file has this name too); put the "
            "model's tokenizer.json beside it"
        )
    return model


def _encoder(file: pathlib.Path, model, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    rules = _normalization(model.normalizer_spec)
    scores = [piece.score for piece in model.pieces]
    unknown = model.trainer_spec.unk_id
    kind = model.trainer_spec.model_type
    if kind == BPE:
        return vocabulary.word_marked_bpe(vocabulary.scored_merges(scores), unknown, rules)
    if kind != UNIGRAM:
        raise ValueError(f"{file}: sentencepiece model type {kind}; BPE and unigram are supported")
    encoder = tokenizers.Tokenizer(
        models.Unigram(
            list(zip(vocabulary.pieces, scores)), unknown, byte_fallback=BYTE in vocabulary.kinds
        )
    )
    encoder.normalizer = normalizers.Sequence([*rules, normalizers.Replace(" ", WORD_MARK)])
    vocabulary.add_to(encoder)
    return encoder


def _normalization(spec) -> list[normalizers.Normalizer]:
    """The steps before spaces become word marks."""
    rules = []
    if spec.precompiled_charsmap:
        rules.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        rules += [
            normalizers.Replace(Regex(e), to) for e, to in ((r"\A +| +\z", ""), (" {2,}", " "))
        ]
    if spec.add_dummy_prefix:
        rules.append(normalizers.Prepend(WORD_MARK))
    return rules


def _decoder(drops_first_space: bool) -> decoders.Decoder:
    steps = [decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if drops_first_space:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)
