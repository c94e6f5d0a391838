"""vocab.json and merges.txt → tokenizer.json, for models of the GPT-2 and Qwen 2 kind whose files have none.

Both join bytes, spelled as printable characters, by the rank of their merges. How a text is cut into words before,
and which tokens are special, the files do not say: the class of the tokenizer does.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ingot.configs.read import MAX_JSON, Section
from ingot.errors import CheckpointError, ConfigError

VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
HINT = "save the tokenizer as tokenizer.json with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"

# The expression by which Qwen cuts texts into words: part of its file format.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    """words: the expression that cuts a text; None: GPT-2's own. special: named tokens where no file names them."""

    words: str | None
    normalizer: str | None
    special: Mapping[str, str]


_GPT2 = _Kind(words=None, normalizer=None, special=dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END))
_QWEN2 = _Kind(words=QWEN_WORDS, normalizer="NFC", special=dict.fromkeys(("eos_token", "unk_token", "pad_token"), _END))
_CLASSES = {"GPT2Tokenizer": _GPT2, "Qwen2Tokenizer": _QWEN2}
_MODEL_TYPES = {
    "gpt2": _GPT2,
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen3": _QWEN2,
    "qwen3_moe": _QWEN2,
    "starcoder2": _GPT2,
}


def tokenizer_json(folder: Path, settings: Section) -> dict[str, object]:
    """The tokenizer.json that gives the same ids. settings: tokenizer_config.json.

    Raises CheckpointError or ConfigError where the files do not fit together, or are of another kind.
    """
    kind = _kind(folder, settings)
    section = Section.from_file(folder / VOCAB_FILE)
    vocab = {name: section.integer(name) for name in section.unread()}
    if len(set(vocab.values())) < len(vocab) or not vocab:
        raise CheckpointError(
            f"{VOCAB_FILE} holds no token, or gives one id to two tokens", where=str(folder / VOCAB_FILE), hint=HINT
        )
    return byte_level_json(
        vocab,
        _merges(folder / MERGES_FILE, vocab),
        _added(folder, settings, kind, vocab),
        words=kind.words,
        normalizer=kind.normalizer,
        prefix=settings.boolean("add_prefix_space", False),
    )


def byte_level_json(
    vocab: Mapping[str, int],
    merges: list[list[str]],
    added: list[dict[str, object]],
    *,
    words: str | None,
    normalizer: str | None,
    prefix: bool,
    digits: bool = False,
    ignore_merges: bool = False,
) -> dict[str, object]:
    """The tokenizer.json of pairs of bytes.

    words          the expression that cuts a text; None: GPT-2's own
    prefix         whether a space is put in front of a text
    digits         whether each digit is a word of its own
    ignore_merges  whether a word that is a token is taken as it is
    """
    byte_level: dict[str, object] = {
        "type": "ByteLevel",
        "add_prefix_space": prefix,
        "trim_offsets": True,
        "use_regex": words is None,
    }
    cuts: list[dict[str, object]] = [{"type": "Digits", "individual_digits": True}] if digits else []
    if words is not None:
        cuts.append({"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, byte_level]} if cuts else byte_level,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": dict(vocab),
            "merges": merges,
        },
    }


def _kind(folder: Path, settings: Section) -> _Kind:
    """By the class that tokenizer_config.json names, else by the model_type of config.json."""
    config = folder / "config.json"
    name = settings.text("tokenizer_class", "").removesuffix("Fast")
    model_type = Section.from_file(config).text("model_type", "") if not name and config.is_file() else ""
    kind = _CLASSES.get(name) or _MODEL_TYPES.get(model_type)
    if kind is None:
        raise CheckpointError(
            f"{VOCAB_FILE} belongs to a kind of tokenizer that ingot does not convert",
            where=str(folder / VOCAB_FILE),
            expected=f"tokenizer.json, or a tokenizer_class of {', '.join(_CLASSES)}",
            got=name or f"no tokenizer_class, model_type {model_type!r}",
            hint=HINT,
        )
    return kind


def _merges(path: Path, vocab: Mapping[str, int]) -> list[list[str]]:
    """One pair for each line; the first line may be a comment."""
    try:
        if path.stat().st_size > MAX_JSON:
            raise CheckpointError(
                f"{path.name} is too large", where=str(path), expected=f"at most {MAX_JSON:,} bytes", hint=HINT
            )
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} cannot be read", where=str(path), got=str(error), hint=HINT) from error
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    for pair in pairs:
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise CheckpointError(
                "a merge makes a text that is not in the vocabulary",
                where=str(path),
                expected="two tokens whose join is a token",
                got=" ".join(pair)[:200],
                hint=HINT,
            )
    return pairs


def _added(folder: Path, settings: Section, kind: _Kind, vocab: Mapping[str, int]) -> list[dict[str, object]]:
    """Tokens that are found before anything is cut. What the vocabulary lacks must follow it without holes."""
    tokens: dict[str, dict[str, object]] = {}
    ids: dict[str, int] = {}
    table = settings.section("added_tokens_decoder")
    for name in sorted(table.unread(), key=lambda name: (len(name), name)):
        token = table.section(name)
        content = token.text("content")
        if not (name.isascii() and name.isdigit()):
            raise ConfigError(
                "the id of an added token is not a number",
                where=table.place(name),
                expected="a number as the key",
                got=name,
            )
        tokens[content], ids[content] = _flags(token), int(name)
    old = folder / "added_tokens.json"
    if old.is_file():
        section = Section.from_file(old)
        for content in sorted(section.unread(), key=section.integer):
            tokens.setdefault(content, _flags(Section({}, str(old))))
            ids.setdefault(content, section.integer(content))
    for content in _special(folder, settings, kind):
        tokens.setdefault(content, _flags(Section({}, "")))["special"] = True
        tokens[content]["normalized"] = False
    end = max(vocab.values()) + 1
    placed = []
    for content, flags in tokens.items():
        index = vocab.get(content, ids.get(content, end))
        if content not in vocab and index != end:
            raise CheckpointError(
                "the id of an added token leaves a gap after the vocabulary",
                where=f"{folder}: {content}",
                expected=f"id {end}",
                got=f"id {index}",
                hint=HINT,
            )
        end += content not in vocab
        placed.append({"id": index, "content": content, **flags})
    return sorted(placed, key=lambda token: int(str(token["id"])))


def _flags(token: Section) -> dict[str, object]:
    special = token.boolean("special", False)
    return {
        "single_word": token.boolean("single_word", False),
        "lstrip": token.boolean("lstrip", False),
        "rstrip": token.boolean("rstrip", False),
        "normalized": token.boolean("normalized", not special),
        "special": special,
    }


def _special(folder: Path, settings: Section, kind: _Kind) -> list[str]:
    """Named tokens of tokenizer_config.json, special_tokens_map.json or the class, then further ones."""
    path = folder / "special_tokens_map.json"
    places = [settings, Section.from_file(path) if path.is_file() else Section({}, str(path))]
    named = dict(kind.special)
    more: list[object] = []
    for section in reversed(places):
        for key in _NAMED:
            if section.is_null(key):
                named.pop(key, None)
            elif section.has(key):
                named[key] = _content(section, key, section.raw(key))
        for key in ("additional_special_tokens", "extra_special_tokens"):
            listed = section.raw(key)
            more += listed if isinstance(listed, list) else []
    contents = [*named.values(), *(_content(settings, "additional_special_tokens", each) for each in more)]
    return list(dict.fromkeys(contents))


def _content(section: Section, key: str, value: object) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    if not isinstance(content, str):
        raise ConfigError(
            f"a token of {key} is not a text", where=section.place(key), expected="a text", got=type(value).__name__
        )
    return content
