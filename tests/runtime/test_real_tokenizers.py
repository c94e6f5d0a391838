"""Every tokenizer of the shared folder: the ids of the library that trained it, and texts that come back whole."""

from pathlib import Path

import pytest
import tokenizers

from ingot.runtime.tokenizer import Tokenizer

TEXTS = [
    "Hello world", "  two  spaces ", "\n\n\ttabs\r\n", "caf\u00e9 na\u00efve", "\u65e5\u672c\u8a9e \u0440\u0443\u0441",
    "\U0001f469\u200d\U0001f4bb \U0001f642", "def f(x):\n    return x ** 2  # \u00b2", "12345 3.14", "\u2581 \u0120",
    "<|endoftext|> <s> <|im_start|>user", "",
]  # fmt: skip


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


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "bos"), [("gpt2", None), ("llama2", 1), ("llama3.1", 128000), ("phi3", 1), ("qwen3", None)]
)
def test_families_that_need_a_bos_get_one(shared: Path, name: str, bos: int | None) -> None:
    tokenizer = Tokenizer.from_dir(shared / "tokenizers" / name)
    ids, plain = tokenizer.encode("Hello"), tokenizer.encode("Hello", add_special_tokens=False)
    assert ids == ([] if bos is None else [bos]) + plain
    assert tokenizer.decode(ids) == "Hello"
