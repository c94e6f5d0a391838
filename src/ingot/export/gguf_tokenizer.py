"""tokenizer.json as settings of a GGUF file: the inverse of `convert/gguf/tokenizer.py`, which reads the result back.

What a GGUF file cannot say of how texts are cut is refused: the tokens of a text must be the same after the way back.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.companions import TOKENIZER_FILE, parse_tokenizer, read_tokenizer_settings
from ingot.configs.read import read_object
from ingot.configs.token_ids import read_token_ids
from ingot.convert.gguf.header import Header
from ingot.convert.gguf.tokenizer import CUTS, read_gguf_tokenizer
from ingot.errors import UnsupportedModelError
from ingot.export.gguf_file import Setting

_PREFIX = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_PROBE = (
    "Once upon a time, there were 12345 foxes; don't ask why.\n\n\tdef f(x): return x**2  # Größe, 東京, naïve 😀\n"
    "  It's 3.14 o'clock,\r\nHELLO World_wide a b  c   d. "
)


def gguf_tokenizer(folder: Path, vocab_size: int) -> dict[str, Setting]:
    """The settings for the tokenizer beside a Checkpoint; nothing but "none" where there is no tokenizer.

    Raises UnsupportedModelError for one of another kind.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        return {f"{_PREFIX}.model": "none"}
    held: Any = read_object(path)
    model = held.get("model", {})
    if model.get("type") != "BPE":
        raise _other(path, "model.type", "BPE", model.get("type"))
    tokens, kinds = _tokens(held, vocab_size, path)
    found: dict[str, Setting] = {f"{_PREFIX}.tokens": tokens, f"{_PREFIX}.token_type": kinds}
    pairs = [tuple(each) if isinstance(each, list) else tuple(each.split(" ")) for each in model["merges"]]
    bos = _first_token(held)
    found[f"{_PREFIX}.add_bos_token"] = bos is not None
    named = _named(folder, tokens, bos)
    found |= {f"{_PREFIX}.{key}_token_id": index for key, index in named.items()}
    settings = read_tokenizer_settings(folder)
    template = settings.raw("chat_template") if settings.has("chat_template") else _template_file(folder)
    if isinstance(template, str):
        found["tokenizer.chat_template"] = template
    if model.get("byte_fallback"):
        found |= _sentencepiece(held, tokens, pairs)
    else:
        found |= _byte_level(held, pairs, path)
    _check(held, found, path)
    return found


def _template_file(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _tokens(held: Mapping[str, Any], vocab_size: int, path: Path) -> tuple[list[str], list[int]]:
    """(texts, types), one for each row of the token table."""
    by_id: dict[int, str] = {index: text for text, index in held["model"]["vocab"].items()}
    added = {each["id"]: each for each in held.get("added_tokens", [])}
    by_id |= {index: each["content"] for index, each in added.items()}
    if max(by_id) >= vocab_size:
        raise _other(path, "vocab", f"{vocab_size} tokens", f"a token {max(by_id)}")
    unknown = held["model"].get("unk_token")
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]

    def kind(index: int) -> int:
        if index not in by_id:
            return _UNUSED
        if by_id[index] == unknown:
            return _UNKNOWN
        if index in added:
            return _CONTROL if added[index]["special"] else _USER_DEFINED
        text = by_id[index]
        is_byte = held["model"].get("byte_fallback") and len(text) == 6 and text.startswith("<0x") and text[5] == ">"
        return _BYTE if is_byte else _NORMAL

    return tokens, [kind(index) for index in range(vocab_size)]


def _named(folder: Path, tokens: list[str], bos: str | None) -> dict[str, int]:
    """bos, eos, unknown, padding, eot → id, as llama.cpp calls them."""
    ids, settings = read_token_ids(folder), read_tokenizer_settings(folder)
    found: dict[str, int] = {}
    for key, ours in (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")):
        value = settings.raw(ours) if settings.has(ours) else None
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in tokens:
            found[key] = tokens.index(text)
    if ids.bos is not None:
        found["bos"] = ids.bos
    elif bos is not None:
        found["bos"] = tokens.index(bos)
    if ids.eos:
        found["eos"] = found["eos"] if found.get("eos") in ids.eos else ids.eos[0]
        others = [each for each in ids.eos if each != found["eos"]]
        found |= {"eot": others[0]} if others else {}
    return found


def _first_token(held: Mapping[str, Any]) -> str | None:
    """The token that the post-processor puts in front of a text."""
    steps = held.get("post_processor") or {}
    for each in steps.get("processors", [steps]):
        if each.get("type") == "TemplateProcessing" and "SpecialToken" in each["single"][0]:
            text: str = each["single"][0]["SpecialToken"]["id"]
            return text
    return None


def _sentencepiece(held: Mapping[str, Any], tokens: list[str], pairs: list[tuple[str, ...]]) -> dict[str, Setting]:
    """A merge's rank is the score of what it makes: the earlier the higher."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks.get(text, len(pairs) + index)) for index, text in enumerate(tokens)]
    normalizer = json.dumps(held.get("normalizer"))
    return {
        f"{_PREFIX}.model": "llama",
        f"{_PREFIX}.scores": scores,
        f"{_PREFIX}.add_space_prefix": '"Prepend"' in normalizer,
    }


def _byte_level(held: Mapping[str, Any], pairs: list[tuple[str, ...]], path: Path) -> dict[str, Setting]:
    pre = held.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", [pre])
    words = next((each["pattern"].get("Regex") for each in steps if each.get("type") == "Split"), None)
    digits = any(each.get("type") == "Digits" for each in steps)
    whole = bool(held["model"].get("ignore_merges"))
    normalizer = (held.get("normalizer") or {}).get("type")
    wanted = (words, digits, normalizer, whole)
    for name, cut in CUTS.items():
        if (cut.words, cut.digits, cut.normalizer, cut.whole) == wanted:
            return {
                f"{_PREFIX}.model": "gpt2",
                f"{_PREFIX}.pre": name,
                f"{_PREFIX}.merges": [" ".join(pair) for pair in pairs],
                f"{_PREFIX}.add_space_prefix": any(each.get("add_prefix_space") for each in steps),
            }
    raise _other(path, "pre_tokenizer", f"a rule that GGUF has a name for: {', '.join(CUTS)}", words)


def _check(held: Mapping[str, Any], found: Mapping[str, Setting], path: Path) -> None:
    """Raise UnsupportedModelError where a text has other tokens after the way back."""
    settings: Any = {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}
    back = read_gguf_tokenizer(Header(path=path, settings=settings, tensors={})).tokenizer
    before = parse_tokenizer(json.dumps(held), str(path))
    after = parse_tokenizer(json.dumps(back), str(path))
    ours, theirs = (each.encode(_PROBE, add_special_tokens=False).ids for each in (before, after))
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
        raise UnsupportedModelError(
            "a GGUF file cannot say how this tokenizer cuts texts",
            where=str(path),
            expected=f"tokens {ours[at : at + 3]} at place {at} of a text with words, numbers and signs",
            got=str(theirs[at : at + 3]),
            hint="export in the format compressed-tensors, which carries tokenizer.json as it is",
        )


def _other(path: Path, key: str, expected: str, got: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        "a GGUF file cannot hold this tokenizer",
        where=f"{path}: {key}",
        expected=expected,
        got=repr(got)[:200],
        hint="export in the format compressed-tensors, which carries tokenizer.json as it is",
    )
