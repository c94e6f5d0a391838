"""tokenizer.model (sentencepiece) → tokenizer.json, for models whose files have no tokenizer.json.

A tokenizer.model is a protobuf message: pieces with scores, the trainer's settings and the normaliser's. Its byte
pair encoding joins the two neighbours whose join has the highest score; tokenizer.json lists such joins by rank.
"""

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ingot.configs.read import Section
from ingot.errors import CheckpointError, ConfigError

Value = TypeVar("Value", int, bytes)
Fields = Mapping[int, list[int | bytes]]

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_BPE = 2
_MAX_MODEL = 16 << 20  # bytes: three times the largest vocabularies
_MAX_PIECE = 1_000  # characters: ten times the longest runs of spaces
_SPACE = "\u2581"
HINT = "save the tokenizer as tokenizer.json with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenPiece:
    """A token: kind 1 normal, 2 unknown, 3 control, 4 found before anything else, 6 a byte."""

    text: str
    score: float
    kind: int


def tokenizer_json(path: Path, settings: Section) -> dict[str, object]:
    """The tokenizer.json that gives the same ids. settings: tokenizer_config.json.

    Raises CheckpointError where the file is not a sentencepiece model, or one of another kind than byte pairs.
    """
    if path.stat().st_size > _MAX_MODEL:
        raise CheckpointError(
            "the tokenizer is too large for a sentencepiece model",
            where=str(path),
            expected=f"at most {_MAX_MODEL:,} bytes",
            got=f"{path.stat().st_size:,} bytes",
            hint=HINT,
        )
    try:
        message = _message(path.read_bytes())
        pieces = [_piece(bytes(data)) for data in message.get(1, ()) if isinstance(data, bytes)]
        if not pieces:
            raise ValueError("it holds no pieces")
        trainer, normalizer = (_message(_first(message, field, b"")) for field in (2, 3))
    except (ValueError, struct.error, IndexError) as error:
        raise CheckpointError(
            f"{path.name} is not a sentencepiece model, or is damaged",
            where=str(path),
            got=str(error),
            hint=f"copy the file again; if the message stays the same, {HINT}",
        ) from error
    _check(path, trainer, normalizer)
    bos = _first(trainer, 41, 1)
    return pieces_json(
        pieces,
        bos=bos if 0 <= bos < len(pieces) else None,
        prefix=bool(_first(normalizer, 3, 1)),
        byte_fallback=bool(_first(trainer, 35, 0)),
        added=_added(pieces, settings),
    )


def pieces_json(
    pieces: list[TokenPiece],
    *,
    bos: int | None,
    prefix: bool,
    byte_fallback: bool,
    added: list[dict[str, object]] | None = None,
    merges: list[list[str]] | None = None,
) -> dict[str, object]:
    """The tokenizer.json of byte pairs, which are joined in the order of `merges`, or of the scores of what they make.

    bos: the token in front of every text. prefix: whether a space is put there. added: tokens that are found before
    anything is joined; None: those whose kind says so, in the text as it is written.
    """
    vocab = {piece.text: index for index, piece in enumerate(pieces)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(pieces, None) if added is None else added,
        "normalizer": _normalizer(prefix=prefix),
        "pre_tokenizer": None,
        "post_processor": _bos_first(pieces[bos].text, bos) if bos is not None else None,
        "decoder": _decoder(prefix=prefix),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": next((piece.text for piece in pieces if piece.kind == _UNKNOWN), None),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": byte_fallback,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(pieces, vocab) if merges is None else merges,
        },
    }


def _check(path: Path, trainer: Fields, normalizer: Fields) -> None:
    """Raise CheckpointError for what tokenizer.json would have to spell in another way."""
    problems = {
        "a unigram, word or character model": _first(trainer, 3, 1) != _BPE,
        "a table of normalised characters": bool(_first(normalizer, 2, b"")),
        "extra spaces that are removed": bool(_first(normalizer, 4, 1)),
        "spaces that stay spaces": not _first(normalizer, 5, 1),
    }
    if found := [words for words, holds in problems.items() if holds]:
        raise CheckpointError(
            "sentencepiece models of this kind are not converted",
            where=str(path),
            expected="byte pairs of plain text",
            got=", ".join(found),
            hint=HINT,
        )


def _merges(pieces: list[TokenPiece], vocab: Mapping[str, int]) -> list[list[str]]:
    """Every pair of pieces whose join is a piece: joins by falling score, pairs by the ids of their parts.

    Raises CheckpointError for a piece so long that trying all its cuts would take very long.
    """
    ranked = []
    for index, piece in enumerate(pieces):
        if piece.kind not in (_NORMAL, _USER_DEFINED):
            continue
        if len(piece.text) > _MAX_PIECE:
            raise CheckpointError(
                "a token is too long",
                where=f"token {index}: {piece.text[:20]}...",
                expected=f"at most {_MAX_PIECE:,} characters",
                got=f"{len(piece.text):,}",
                hint="download the model again: its vocabulary is damaged",
            )
        for cut in range(1, len(piece.text)):
            left, right = vocab.get(piece.text[:cut]), vocab.get(piece.text[cut:])
            if left is not None and right is not None:
                ranked.append((-piece.score, vocab[piece.text], left, right, cut))
    return [[pieces[left].text, pieces[right].text] for _, _, left, right, _ in sorted(ranked)]


def _added(pieces: list[TokenPiece], settings: Section | None) -> list[dict[str, object]]:
    """Tokens that are found before anything is joined; those of tokenizer_config.json come on top."""
    tokens = {
        index: {
            "content": piece.text,
            "normalized": settings is not None and piece.kind != _USER_DEFINED,
            "special": piece.kind != _USER_DEFINED,
        }
        for index, piece in enumerate(pieces)
        if piece.kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    extra = Section({}, "") if settings is None else settings.section("added_tokens_decoder")
    for name in extra.unread():
        if not (name.isascii() and name.isdigit()):
            raise ConfigError(
                "an added token has no number as its id",
                where=extra.place(name),
                expected="a number as the key",
                got=name,
            )
        token = extra.section(name)
        tokens[int(name)] = {
            "content": token.text("content"),
            "normalized": token.boolean("normalized", False),
            "special": token.boolean("special", False),
            "lstrip": token.boolean("lstrip", False),
            "rstrip": token.boolean("rstrip", False),
            "single_word": token.boolean("single_word", False),
        }
    usual = {"single_word": False, "lstrip": False, "rstrip": False}
    return [{"id": index, **usual, **token} for index, token in sorted(tokens.items())]


def _normalizer(*, prefix: bool) -> dict[str, object]:
    parts: list[dict[str, object]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    parts.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": parts}


def _decoder(*, prefix: bool) -> dict[str, object]:
    parts: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        parts.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": parts}


def _bos_first(text: str, index: int) -> dict[str, object]:
    """Puts the first token of every text where the model expects it."""
    first, second = (
        [{"SpecialToken": {"id": text, "type_id": kind}}, {"Sequence": {"id": name, "type_id": kind}}]
        for kind, name in enumerate("AB")
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }


def _piece(data: bytes) -> TokenPiece:
    fields = _message(data)
    score = struct.unpack("<f", _first(fields, 2, bytes(4)))[0]
    return TokenPiece(text=_first(fields, 1, b"").decode("utf-8"), score=score, kind=_first(fields, 3, _NORMAL))


def _first(fields: Fields, number: int, default: Value) -> Value:
    """The last value of a field, as protobuf has it; its default where absent. Raises ValueError for another type."""
    value = fields.get(number, [default])[-1]
    if type(value) is not type(default):
        raise ValueError(f"field {number} has a wrong type")
    return value


def _message(data: bytes) -> dict[int, list[int | bytes]]:
    """Field number → values in order: varints as int, everything else as bytes. Raises ValueError."""
    fields: dict[int, list[int | bytes]] = {}
    for number, value in _fields(data):
        fields.setdefault(number, []).append(value)
    return fields


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        size = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"unreadable data at byte {at:,}")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, where the next field begins)"""
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value - (1 << 64) if value >= 1 << 63 else value, at
    raise ValueError(f"unreadable data at byte {at:,}")
