"""Tokenizer and generation files that are no good: refused in words, whatever the library does with them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.configs.generation import read_generation_defaults
from ingot.errors import ConfigError, IngotError, RequestError
from ingot.runtime.chat_template import ChatTemplates
from ingot.runtime.tokenizer import Tokenizer

MODEL: dict[str, object] = {
    "type": "BPE",
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "vocab": {"x": 0, "y": 1, "xy": 2},
    "merges": [["x", "y"]],
}
SOUND: dict[str, object] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": MODEL,
}
TEMPLATE: dict[str, object] = {
    "type": "TemplateProcessing",
    "pair": [],
    "special_tokens": {},
    "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
}


def tokenizer(folder: Path, **changes: object) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps({**SOUND, **changes}))
    return Tokenizer.from_dir(folder)


def test_the_unchanged_one_works(tmp_path: Path) -> None:
    found = tokenizer(tmp_path)
    assert found.decode(found.encode("xyxy")) == "xy xy"


# The library panics on each of these, at once or at some text: what it raises then is no Exception.
PANICS: dict[str, tuple[dict[str, object], type[IngotError], str]] = {
    "characters": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        ConfigError,
        "cannot be read",
    ),
    "prefix": ({"model": {**MODEL, "continuing_subword_prefix": "####"}}, ConfigError, "cannot be read"),
    "template": ({"post_processor": TEMPLATE}, ConfigError, "cannot be read"),
    "decoder": (
        {"decoder": {"type": "Strip", "content": "x", "start": 5, "stop": 5}},
        RequestError,
        "turned into text",
    ),
}


@pytest.mark.parametrize("odd", PANICS)
def test_a_panic_of_the_library_is_refused_in_words(odd: str, tmp_path: Path) -> None:
    changes, kind, words = PANICS[odd]

    def work() -> str:
        found = tokenizer(tmp_path, **changes)
        return found.decode(found.encode("xxy"))

    with pytest.raises(kind, match=words):
        work()


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tokenizer_config.json": ("tokenizer_config.json", tokenizer),
    "generation_config.json": ("generation_config.json", read_generation_defaults),
    "chat_template.json": ("chat_template.json", ChatTemplates.from_dir),
    "special_tokens_map.json": ("special_tokens_map.json", ChatTemplates.from_dir),
}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "\udcff", "{", '{"a": 1, "a": 2}', ""])
@pytest.mark.parametrize("name", READERS)
def test_files_that_are_no_json_objects_are_refused(name: str, text: str, tmp_path: Path) -> None:
    file, read = READERS[name]
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}")
    if name == "chat_template.json":
        (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / file).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=rf"(.|\n)*{file}"):
        read(tmp_path)
