"""vocab.json and merges.txt become a tokenizer.json that gives the ids of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import AutoTokenizer

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.tokenizer_files import make_tokenizer
from ingot.errors import IngotError
from ingot.runtime.tokenizer import Tokenizer
from tests.handmade import write_model

TEXTS = [
    "Hello  world",
    " lead",
    "\n\ttabs",
    "caf\u00e9 \u65e5\u672c \U0001f642",
    "lo<|endoftext|>lo <|im_start|>user",
    "",
    "it's 12345 x'LL",
    "e\u0301 \u212b",
    "  \n\n  x   ",
    "<mark> lo",
]
MERGES = ["l o", "\u0120 lo", "h e", "he l", "hel lo", "1 2", "12 3", "\u00c3 \u00a9", "' s"]
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SETTINGS: dict[str, dict[str, Any] | None] = {
    "GPT-2": {"tokenizer_class": "GPT2Tokenizer"},
    "GPT-2, a space in front": {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
    "Qwen": {"tokenizer_class": "Qwen2Tokenizer"},
    "Qwen, named tokens": {
        "tokenizer_class": "Qwen2TokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_start|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>"],
        "added_tokens_decoder": {
            "266": {"content": "<|im_start|>", "special": True, "normalized": False},
            "267": {"content": "<mark>", "special": False, "rstrip": True, "normalized": False},
        },
    },
    "by model_type": None,
}


def write_tokenizer(folder: Path, settings: dict[str, Any] | None = None, merges: list[str] = MERGES) -> Path:
    folder.mkdir(exist_ok=True)
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def assert_ids_of_transformers(folder: Path, texts: list[str]) -> None:
    ours, theirs = (
        tokenizers.Tokenizer.from_str(json.dumps(make_tokenizer(folder))),
        AutoTokenizer.from_pretrained(folder),
    )
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    added = {index: repr(token) for index, token in theirs.added_tokens_decoder.items()}
    assert {index: repr(token) for index, token in ours.get_added_tokens_decoder().items()} == added


@pytest.mark.parametrize("name", SETTINGS)
def test_ids_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_tokenizer(tmp_path / "m", SETTINGS[name])
    if SETTINGS[name] is None:
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
    assert_ids_of_transformers(folder, TEXTS)


def test_the_map_of_special_tokens_and_old_added_tokens_count(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "m", {"tokenizer_class": "GPT2Tokenizer"})
    (folder / "special_tokens_map.json").write_text('{"pad_token": "<pad>", "eos_token": {"content": "<|endoftext|>"}}')
    (folder / "added_tokens.json").write_text('{"<pad>": 266}')
    made = tokenizers.Tokenizer.from_str(json.dumps(make_tokenizer(folder)))
    assert made.encode("lo<pad>").ids[-1] == 266
    assert made.get_added_tokens_decoder()[266].special


def test_a_conversion_makes_it(tmp_path: Path) -> None:
    source = write_tokenizer(write_model(tmp_path / "m"), {"tokenizer_class": "Qwen2Tokenizer"})
    convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c"))
    tokenizer = Tokenizer.from_dir(tmp_path / "c")
    assert tokenizer.decode(tokenizer.encode("hello lo \u00e9")) == "hello lo \u00e9"


@pytest.mark.parametrize(
    ("settings", "files", "words"),
    [
        ({"tokenizer_class": "RobertaTokenizer"}, {}, r"does not convert(.|\n)*RobertaTokenizer(.|\n)*save_pretrained"),
        ({}, {}, "model_type ''"),
        ({"tokenizer_class": "GPT2Tokenizer"}, {"merges.txt": "l o\nq lo\n"}, r"not in the vocabulary(.|\n)*got: q lo"),
        ({"tokenizer_class": "GPT2Tokenizer"}, {"merges.txt": "l o x\n"}, "not in the vocabulary"),
        ({"tokenizer_class": "GPT2Tokenizer"}, {"vocab.json": '{"a": 1, "b": 1}'}, "one id to two tokens"),
        ({"tokenizer_class": "GPT2Tokenizer"}, {"vocab.json": '{"a": "b"}'}, r"vocab\.json:a"),
        ({"tokenizer_class": "GPT2Tokenizer"}, {"added_tokens.json": '{"<pad>": 300}'}, "expected: id 266"),
        ({"tokenizer_class": "GPT2Tokenizer", "eos_token": 5}, {}, "eos_token is not a text"),
        ({"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"x": {"content": "y"}}}, {}, "is not a number"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], files: dict[str, str], words: str) -> None:
    folder = write_tokenizer(tmp_path / "m", settings)
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(IngotError, match=words):
        make_tokenizer(folder)


def test_a_vocabulary_without_merges_is_refused(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path / "m") / "merges.txt").unlink()
    with pytest.raises(IngotError, match=r"does not convert(.|\n)*vocab\.json"):
        make_tokenizer(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "kind"), [("gpt2", "GPT2Tokenizer"), pytest.param("qwen3", "Qwen2Tokenizer", marks=pytest.mark.slow)]
)
def test_real_vocabularies(shared: Path, tmp_path: Path, name: str, kind: str) -> None:
    source = shared / "tokenizers" / name
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    settings = source / "tokenizer_config.json"
    text = settings.read_text() if settings.exists() else json.dumps({"tokenizer_class": kind})
    (tmp_path / "tokenizer_config.json").write_text(text)
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(merges))
    book = (shared / "data" / "text" / "tinyshakespeare.txt").read_text()[:20000]
    assert_ids_of_transformers(tmp_path, [*TEXTS, book])
