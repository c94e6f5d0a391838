"""Tokenizers out of GGUF files give the ids of the tokenizer.json that the files were made from."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ingot.convert.gguf.header import read_gguf_header
from ingot.convert.gguf.tokenizer import GgufTokenizer, read_gguf_tokenizer
from ingot.errors import CheckpointError, IngotError
from tests import gguf_files as write

TEXT = """Once upon a time, in the year 1984, there were 12345 birds; they'd sing: "Aren't WE'LL great?"\n\n\t  x  y
Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. \u00c5ngstr\u00f6m A\u030angstro\u0308m
日本語のテキスト、数字１２３と記号！？ \U0001f642\U0001f468\u200d\U0001f469 def f(x):\r\n    return x**2 # 3.14
   leading, trailing   \n  <|im_end|>next<|end|>"""
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|pad|>")
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN = GPT4.replace("{1,3}", "")
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def trained(words: str | None, *, digits: bool = False, nfc: bool = False, whole: bool = False) -> tokenizers.Tokenizer:
    """A byte-level tokenizer, as models of this kind have it."""
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if words is not None:
        cuts.append(pre_tokenizers.Split(tokenizers.Regex(words), "isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def settings_of(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, object]:
    """What llama.cpp's converter writes of it."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [text for text, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text in SPECIAL else 1 for text in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def read(folder: Path, settings: dict[str, object]) -> GgufTokenizer:
    path = write.write_gguf(folder / "m.gguf", settings, {})
    return read_gguf_tokenizer(read_gguf_header(path))


@pytest.mark.parametrize(
    ("pre", "tokenizer"),
    [
        ("gpt-2", trained(None)),
        ("llama-bpe", trained(GPT4, whole=True)),
        ("dbrx", trained(GPT4)),
        ("qwen2", trained(QWEN, nfc=True)),
        ("stablelm2", trained(QWEN)),
        ("starcoder", trained(None, digits=True)),
        ("qwen35", trained(QWEN35, nfc=True)),
        ("lfm2", trained(GPT4, whole=True)),
        ("glm4", trained(GPT4, whole=True)),
        ("chatglm-bpe", trained(GPT4)),
    ],
)
def test_pairs_of_bytes(tmp_path: Path, pre: str, tokenizer: tokenizers.Tokenizer) -> None:
    found = read(tmp_path, settings_of(tokenizer, pre))
    ours = tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer))
    for text in (TEXT, TEXT[::-1], *TEXT.split()):
        assert ours.encode(text).ids == tokenizer.encode(text).ids
    assert ours.decode(tokenizer.encode(TEXT).ids) == tokenizer.decode(tokenizer.encode(TEXT).ids)
    assert found.settings["chat_template"] == "{{ messages[0].content }}"
    assert found.settings["add_bos_token"] is False
    assert found.settings["bos_token"] == SPECIAL[0]
    assert found.ids == {"eos_token_id": [0, 1], "bos_token_id": 0, "pad_token_id": 2}


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("pre", ["qwen2", "gpt-2"])
def test_whole_texts(shared: Path, tmp_path: Path, pre: str) -> None:
    tokenizer = trained(QWEN, nfc=True) if pre == "qwen2" else trained(None)
    ours = tokenizers.Tokenizer.from_str(json.dumps(read(tmp_path, settings_of(tokenizer, pre)).tokenizer))
    for file in sorted((shared / "data" / "text").glob("*.txt")):
        text = file.read_text(encoding="utf-8")[:100_000]
        assert ours.encode(text).ids == tokenizer.encode(text).ids, file.name


@pytest.mark.slow
@pytest.mark.shared
def test_sentencepiece(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models" / "quantised" / "gguf-q8_0"
    found = read_gguf_tokenizer(read_gguf_header(folder / "model.gguf"))
    ours = tokenizers.Tokenizer.from_str(json.dumps(found.tokenizer))
    theirs = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for file in sorted((shared / "data" / "text").glob("*.txt")):
        text = file.read_text(encoding="utf-8")[:100_000]
        assert ours.encode(text).ids == theirs.encode(text).ids, file.name
    assert ours.encode(TEXT).ids == theirs.encode(TEXT).ids
    assert found.ids == {"eos_token_id": [2], "bos_token_id": 1}


def test_merges_of_gemma4(tmp_path: Path) -> None:
    """Spaces are letters, unknown ones bytes, and merges say what is joined first, which scores do not."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXT.splitlines(), "a\n\nb"] * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [text for text, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    assert len(model["merges"]) > 20
    settings: dict[str, object] = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
    }
    ours = tokenizers.Tokenizer.from_str(json.dumps(read(tmp_path, settings).tokenizer))
    for text in (TEXT.replace("<|im_end|>", ""), "birds; they\u2581sing", "\U0001f9ff"):
        assert ours.encode(text).ids == [1, *tokenizer.encode(text).ids]
    with pytest.raises(CheckpointError, match="a merge does not consist of two tokens"):
        read(tmp_path, settings | {"tokenizer.ggml.merges": ["ab"]})


def test_without_a_space_in_front(tmp_path: Path) -> None:
    settings = write.byte_tokens(["\u2581", "a", "\u2581a"]) | {"tokenizer.ggml.add_space_prefix": False}
    ours = tokenizers.Tokenizer.from_str(json.dumps(read(tmp_path, settings).tokenizer))
    assert ours.encode("a a").tokens == ["<s>", "a", "\u2581a"]
    settings["tokenizer.ggml.add_bos_token"] = False
    ours = tokenizers.Tokenizer.from_str(json.dumps(read(tmp_path, settings).tokenizer))
    assert ours.encode("a a").tokens == ["a", "\u2581a"]


def test_the_tokenizer_beside_the_file(tmp_path: Path) -> None:
    """Where the file's own is not converted, and only there."""
    settings = settings_of(trained(None), "an-unknown-one")
    with pytest.raises(CheckpointError, match=r"cut into words(.|\n)*qwen2(.|\n)*an-unknown-one(.|\n)*beside the file"):
        read(tmp_path, settings)
    (tmp_path / "tokenizer.json").write_text(trained(None).to_str())
    found = read(tmp_path, settings)
    assert found.beside
    assert found.tokenizer == json.loads(trained(None).to_str())
    assert not read(tmp_path, settings_of(trained(None), "gpt-2")).beside


def test_no_tokenizer(tmp_path: Path) -> None:
    assert read(tmp_path, {}).tokenizer is None
    assert read(tmp_path, {"tokenizer.ggml.model": "no_vocab"}).tokenizer is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, "not converted(.|\n)*bert"),
        ({"tokenizer.ggml.scores": [0.0]}, "scores has not one number"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has not one number"),
        ({"tokenizer.ggml.token_type": [99] * 259}, "token_type has not one number"),
        ({"tokenizer.ggml.tokens": 3}, "tokens(.|\n)*a list of strings"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "not a token of the vocabulary"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "remove_extra_whitespaces"),
        ({"tokenizer.ggml.scores": [float("nan")] * 259}, "finite numbers"),
        (
            {"tokenizer.ggml.tokens": ["x" * 1001, *map(str, range(258))], "tokenizer.ggml.token_type": [1] * 259},
            "token is too long(.|\n)*token 0: xxxx(.|\n)*1,001",
        ),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, change: dict[str, object], words: str) -> None:
    with pytest.raises(IngotError, match=words):
        read(tmp_path, write.byte_tokens() | change)


def test_merges_that_do_not_fit(tmp_path: Path) -> None:
    settings = settings_of(trained(None), "gpt-2")
    for merges in (["nothing known"], ["a"], ["a b c"]):
        with pytest.raises(CheckpointError, match="merge makes a text that is not"):
            read(tmp_path, settings | {"tokenizer.ggml.merges": merges})
