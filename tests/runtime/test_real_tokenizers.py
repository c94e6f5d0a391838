"""Every tokenizer of the shared folder: the ids of the library that trained it, and texts that come back whole."""

import warnings
from pathlib import Path

import pytest
import tokenizers
from transformers import LlamaTokenizer

from ingot.runtime.tokenizer import Tokenizer

TEXTS = [
    "Hello world",
    "  two  spaces ",
    "\n\n\ttabs\r\n",
    "caf\u00e9 na\u00efve",
    "\u65e5\u672c\u8a9e \u0440\u0443\u0441",
    "\U0001f469\u200d\U0001f4bb \U0001f642",
    "def f(x):\n    return x ** 2  # \u00b2",
    "12345 3.14",
    "\u2581 \u0120",
    "<|endoftext|> <s> <|im_start|>user",
    "",
]


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3.1", "phi3", "qwen3"])
def test_ids_and_round_trip(shared: Path, name: str) -> None:
    folder = shared / "tokenizers" / name
    ours, theirs = Tokenizer.from_dir(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ours.vocab_size == theirs.get_vocab_size()
    book = (shared / "data" / "text" / "wikitext2_valid.txt").read_text()[:20000]
    for text in (*TEXTS, book):
        plain = ours.encode(text, add_special_tokens=False)
        assert plain == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(plain, skip_special_tokens=False) == theirs.decode(plain, skip_special_tokens=False)
        pieces = ours.detokenizer([])
        streamed = "".join(pieces.push([token]) for token in plain) + pieces.finish()
        assert streamed == ours.decode(plain)
        if not any(mark in text for mark in ("<", "\u2581")):
            assert ours.decode(plain) == text


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "bos"), [("gpt2", None), ("llama2", 1), ("llama3.1", 128000), ("phi3", 1), ("qwen3", None)]
)
def test_families_that_need_a_bos_get_one(shared: Path, name: str, bos: int | None) -> None:
    tokenizer = Tokenizer.from_dir(shared / "tokenizers" / name)
    ids, plain = tokenizer.encode("Hello"), tokenizer.encode("Hello", add_special_tokens=False)
    assert ids == ([] if bos is None else [bos]) + plain
    assert tokenizer.decode(ids) == "Hello"


# text → what tokenizer.json makes of it, and what transformers' LlamaTokenizer does (docs/sampling.md)
LLAMA_TOKENS = {
    "llama2": [
        (" lead", ["\u2581", "\u2581lead"], ["\u2581lead"]),
        ("x</s>", ["\u2581x", "</", "s", ">"], ["\u2581x", "</s>"]),
        ("plain words", ["\u2581plain", "\u2581words"], ["\u2581plain", "\u2581words"]),
    ],
    "phi3": [
        (" lead", ["\u2581", "\u2581lead"], ["\u2581lead"]),
        ("a<|end|>there", ["\u2581a", "<|end|>", "\u2581there"], ["\u2581a", "<|end|>", "there"]),
        ("<|user|>\n", ["<|user|>", "\u2581", "<0x0A>"], ["<|user|>", "<0x0A>"]),
    ],
}


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize("name", LLAMA_TOKENS)
def test_where_llama_tokenizer_has_other_tokens(shared: Path, name: str) -> None:
    folder = shared / "tokenizers" / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = LlamaTokenizer.from_pretrained(folder)
    ours, file = Tokenizer.from_dir(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, of_file, of_transformers in LLAMA_TOKENS[name]:
        assert [file.id_to_token(each) for each in ours.encode(text, add_special_tokens=False)] == of_file
        assert theirs.tokenize(text, add_special_tokens=False) == of_transformers


@pytest.mark.daily(2)
@pytest.mark.shared
@pytest.mark.parametrize(("name", "marks"), [("llama2", 2), ("phi3", 2), ("gpt2", 1), ("llama3.1", 1), ("qwen3", 1)])
def test_bytes_that_are_no_character(shared: Path, name: str, marks: int) -> None:
    tokenizer = Tokenizer.from_dir(shared / "tokenizers" / name)
    byte = {tokenizer.token_bytes(each): each for each in reversed(range(500))}
    (bang,) = tokenizer.encode("!", add_special_tokens=False)[-1:]

    def stream(*values: int) -> list[str]:
        pieces = tokenizer.detokenizer([])
        return [*(pieces.push([byte[bytes([each])]]) for each in values), pieces.push([bang]), pieces.finish()]

    assert stream(0xE2, 0x82, 0xAC)[:3] == ["", "", "\u20ac"]
    assert stream(0xE2, 0x82)[:2] == ["", ""]
    assert stream(0xE2, 0x82)[2].rstrip(" !") == "\ufffd" * marks
    many = stream(*[0xFF] * 18)
    assert many[:18] == [""] * 15 + ["\ufffd" * 16, "", ""]
    assert many[18].rstrip(" !") == "\ufffd" * 2
    cut = tokenizer.detokenizer([])
    assert cut.push([byte[b"\xe2"], byte[b"\x82"]]) + cut.finish() == ""
