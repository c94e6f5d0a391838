"""The tokenizer inside a GGUF file → tokenizer.json, tokenizer_config.json and the ids that begin and end texts.

    tokenizer.ggml.model   llama: sentencepiece's byte pairs, by scores; gemma4: the same by merges; gpt2: byte-level
                           byte pairs, by merges
    tokenizer.ggml.pre     of the second kind: the name of the expression that cuts a text into words

A file says nothing else of how texts are cut, so an unknown name is refused, unless the model's own tokenizer.json lies
beside the file.
"""

import dataclasses
from collections.abc import Sequence

from ingot.companions import TOKENIZER_FILE
from ingot.configs.read import Section, read_object
from ingot.convert.byte_level import QWEN_WORDS, byte_level_json
from ingot.convert.gguf.header import Header
from ingot.convert.sentencepiece import TokenPiece, pieces_json
from ingot.errors import CheckpointError

_PREFIX = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_KINDS = range(1, 7)
_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}

# What ends an answer, in the templates of chat models: llama.cpp stops there too.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")

# Expressions of words: part of the models' file formats.
_GPT4_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """words: the expression; None: GPT-2's own. digits: each digit is a word. whole: a word that is a token is one."""

    words: str | None = None
    digits: bool = False
    normalizer: str | None = None
    whole: bool = False


_QWEN2 = Cut(words=QWEN_WORDS, normalizer="NFC")
CUTS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "mellum", "exaone4"), Cut()),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "falcon-h1", "lfm2"),
        Cut(words=_GPT4_WORDS, whole=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Cut(words=_GPT4_WORDS)),
    **dict.fromkeys(("glm4", "glm5"), Cut(words=_GPT4_WORDS, whole=True)),
    "qwen35": Cut(
        words=QWEN_WORDS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"), normalizer="NFC"
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez"), _QWEN2),
    "stablelm2": Cut(words=QWEN_WORDS),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), Cut(digits=True)),
    "gpt-4o": Cut(words=_GPT4O_WORDS),
    "tekken": Cut(words=_TEKKEN_WORDS, whole=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """tokenizer  tokenizer.json; None: there is none
    settings   tokenizer_config.json
    ids        bos_token_id, eos_token_id, pad_token_id, as config.json has them
    tokens     how many there are
    beside     whether the tokenizer.json beside the file was taken
    """

    tokenizer: dict[str, object] | None
    settings: dict[str, object]
    ids: dict[str, object]
    tokens: int = 0
    beside: bool = False


def read_gguf_tokenizer(header: Header) -> GgufTokenizer:
    """Raises CheckpointError for a kind that is not converted, ConfigError for settings that do not fit."""
    inner = {key.removeprefix(f"{_PREFIX}."): value for key, value in header.settings.items() if _PREFIX in key}
    keys = Section(inner, f"{header.path}:{_PREFIX}")
    template = header.settings.get("tokenizer.chat_template")
    kind = keys.text("model", "none")
    if kind in ("none", "no_vocab"):
        return GgufTokenizer(tokenizer=None, settings={}, ids={})
    texts = keys.words("tokens")
    kinds = _kinds(keys, len(texts))
    named = _named(keys, texts)
    settings: dict[str, object] = {f"{name}_token": texts[index] for name, index in named.items()}
    settings["add_bos_token"] = keys.boolean("add_bos_token", kind == "llama")
    if isinstance(template, str):
        settings["chat_template"] = template
    _require_plain(keys)
    beside = False
    if kind in ("llama", "gemma4"):
        found = _sentencepiece(keys, texts, kinds, named)
    elif kind == "gpt2" and keys.text("pre", "") in CUTS:
        found = _byte_level(keys, texts, kinds, named)
    elif beside := (own := header.path.parent / TOKENIZER_FILE).is_file():
        found = read_object(own)
    else:
        raise _unknown(keys, kind)
    ids = _ids(keys, texts, kinds, named)
    return GgufTokenizer(tokenizer=found, settings=settings, ids=ids, tokens=len(texts), beside=beside)


def _kinds(keys: Section, count: int) -> Sequence[int]:
    """One for each token."""
    kinds = [int(each) for each in keys.numbers("token_type")] or [_NORMAL] * count
    if len(kinds) != count or not count or any(kind not in _KINDS for kind in set(kinds)):
        raise CheckpointError(
            "token_type has not one number for each token",
            where=keys.place("token_type"),
            expected=f"{count} numbers from 1 to 6",
            got=f"{len(kinds)} numbers",
        )
    return kinds


def _named(keys: Section, texts: Sequence[str]) -> dict[str, int]:
    """bos, eos, unk, pad → id, of those that the file has."""
    found = {}
    for name, key in _NAMED.items():
        if keys.has(key):
            index = keys.integer(key)
            if index >= len(texts):
                raise CheckpointError(
                    f"{key} is not a token of the vocabulary",
                    where=keys.place(key),
                    expected=f"at most {len(texts) - 1}",
                    got=str(index),
                )
            found[name] = index
    return found


def _ids(keys: Section, texts: Sequence[str], kinds: Sequence[int], named: dict[str, int]) -> dict[str, object]:
    """What begins, ends and pads a text: end of text, of a turn, of a message, and tokens that are known to be one."""
    ends = [named[name] for name in ("eos",) if name in named]
    ends += [keys.integer(key) for key in ("eot_token_id", "eom_token_id") if keys.has(key)]
    ends += [index for index, text in enumerate(texts) if text in _ENDS and kinds[index] in (_CONTROL, _USER_DEFINED)]
    found: dict[str, object] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    found |= {f"{name}_token_id": named[name] for name in ("bos", "pad") if name in named}
    return found


def _require_plain(keys: Section) -> None:
    """Raise CheckpointError for what tokenizer.json would have to spell in another way."""
    for key in ("add_eos_token", "remove_extra_whitespaces", "add_sep_token"):
        if keys.boolean(key, False):
            raise CheckpointError(
                f"tokenizer setting {key} is not supported",
                where=keys.place(key),
                expected="false",
                got="true",
                hint="put the model's own tokenizer.json beside the file",
            )


def _sentencepiece(
    keys: Section, texts: Sequence[str], kinds: Sequence[int], named: dict[str, int]
) -> dict[str, object]:
    merges = keys.words("merges") if keys.text("model") == "gemma4" else None
    scores = keys.numbers("scores")
    if len(scores) != len(texts):
        raise CheckpointError(
            "scores has not one number for each token",
            where=keys.place("scores"),
            expected=str(len(texts)),
            got=str(len(scores)),
        )
    pieces = [
        TokenPiece(text=text, score=score, kind=kind) for text, score, kind in zip(texts, scores, kinds, strict=True)
    ]
    return pieces_json(
        pieces,
        bos=named.get("bos") if keys.boolean("add_bos_token", True) else None,
        prefix=keys.boolean("add_space_prefix", True),
        byte_fallback=_BYTE in kinds,
        merges=None if merges is None else [_halves(each, keys) for each in merges],
    )


def _halves(merge: str, keys: Section) -> list[str]:
    """The two tokens of a merge, behind whose first letter the first space parts them."""
    at = merge.find(" ", 1)
    if at < 0:
        raise CheckpointError(
            "a merge does not consist of two tokens",
            where=keys.place("merges"),
            expected="two, with a space between",
            got=merge,
        )
    return [merge[:at], merge[at + 1 :]]


def _byte_level(keys: Section, texts: Sequence[str], kinds: Sequence[int], named: dict[str, int]) -> dict[str, object]:
    cut = CUTS[keys.text("pre")]
    vocab = {text: index for index, text in enumerate(texts)}
    if len(vocab) < len(texts):
        raise CheckpointError(
            "two tokens of the GGUF file have the same text",
            where=keys.place("tokens"),
            got=f"{len(texts)} tokens, {len(vocab)} texts",
            hint="put the model's own tokenizer.json beside the file",
        )
    pairs = [_pair(each) for each in keys.words("merges")]
    for pair in pairs:
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise CheckpointError(
                "a merge makes a text that is not in the vocabulary",
                where=keys.place("merges"),
                expected="two tokens whose join is a token",
                got=" ".join(pair)[:200],
            )
    added = [
        {
            "id": index,
            "content": texts[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, kind in enumerate(kinds)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    return byte_level_json(
        vocab,
        pairs,
        added,
        words=cut.words,
        digits=cut.digits,
        normalizer=cut.normalizer,
        prefix=keys.boolean("add_space_prefix", False),
        ignore_merges=cut.whole,
    )


def _pair(text: str) -> list[str]:
    """ "a b", whose first part may begin with a space of its own."""
    cut = text.find(" ", 1)
    return [text[:cut], text[cut + 1 :]] if cut > 0 else [text]


def _unknown(keys: Section, kind: str) -> CheckpointError:
    return CheckpointError(
        "the tokenizer of the file is not converted: it does not say how texts are cut into words"
        if kind == "gpt2"
        else "the tokenizer of the file is not converted",
        where=keys.place("pre" if kind == "gpt2" else "model"),
        expected=", ".join(sorted(CUTS)) if kind == "gpt2" else "llama or gpt2",
        got=repr(keys.text("pre", "") if kind == "gpt2" else kind)[:200],
        hint="put the model's own tokenizer.json beside the file",
    )
