"""tokenizer.model becomes a tokenizer.json that gives the same ids; what cannot be carried over is refused."""

import json
import struct
from pathlib import Path

import pytest
import tokenizers

from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.tokenizer_files import make_tokenizer
from ingot.errors import CheckpointError
from ingot.runtime.tokenizer import Tokenizer
from tests.handmade import write_model

TEXTS = ["Hello  world", " lead", "\n\ttabs", "caf\u00e9 \u65e5\u672c \U0001f642", "a<s>b </s>", "", "\u2581"]


def field(number: int, value: int | bytes | float) -> bytes:
    """One protobuf field; small numbers only."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    tag = number << 3 | (2 if isinstance(value, bytes) else 0)
    head = bytes([tag]) if tag < 128 else bytes([tag & 127 | 128, tag >> 7])
    if isinstance(value, int):
        return head + bytes([value])
    return head + bytes([len(value) & 127 | 128, len(value) >> 7]) + value


def sentencepiece(*, kind: int = 2, extra_spaces: int = 0, charsmap: bytes = b"") -> bytes:
    """A model of a few pieces: <unk>, <s>, </s>, 256 bytes, characters, and joins by falling score."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [("lo", -1.0, 1), ("\u2581wor", -2.0, 1), ("he", -3.0, 1), ("wo", -4.0, 1), ("hel", -5.0, 1)]
    pieces += [("\u2581wo", -6.0, 1), *((letter, -9.0, 1) for letter in "\u2581helowrd"), ("<mark>", 0.0, 4)]
    model = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, piece_kind)) for text, score, piece_kind in pieces
    )
    trainer = field(3, kind) + field(35, 1) + field(41, 1)
    return model + field(2, trainer) + field(3, field(1, b"identity") + field(2, charsmap) + field(4, extra_spaces))


def tokenizer_of(folder: Path) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(make_tokenizer(folder)))
    return Tokenizer.from_dir(folder)


def test_joins_bytes_and_marks(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece())
    tokenizer = tokenizer_of(tmp_path)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]

    def pieces(text: str) -> list[str]:
        names = {index: name for name, index in vocab.items()}
        return [names[index] for index in tokenizer.encode(text)]

    assert pieces("hello") == ["<s>", "\u2581", "hel", "lo"]  # "he" and "lo" come before "hel"
    assert pieces("world") == ["<s>", "\u2581wor", "l", "d"]
    assert pieces("\u00e9") == ["<s>", "\u2581", "<0xC3>", "<0xA9>"]
    assert pieces("lo<mark>wo") == ["<s>", "\u2581", "lo", "<mark>", "\u2581wo"]
    assert tokenizer.decode(tokenizer.encode("hello w\u00e9")) == "hello w\u00e9"


def test_tokens_of_the_settings_are_added(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece())
    decoder = {"300": {"content": "<|end|>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": decoder, "add_bos_token": False, "bos_token": "<s>"})
    )
    tokenizer = tokenizer_of(tmp_path)
    ids = tokenizer.encode("lo<|end|>")
    assert ids[-1] >= 270
    assert ids[0] != 1
    assert tokenizer.decode(ids) == "lo"
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|end|>")


def test_a_conversion_carries_the_made_tokenizer_along(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m")
    (source / "tokenizer.model").write_bytes(sentencepiece())
    convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c"))
    assert Tokenizer.from_dir(tmp_path / "c").encode("hello")[0] == 1
    assert (tmp_path / "c" / "tokenizer.model").is_file()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("tokenizer.model", sentencepiece(kind=1), "are not converted(.|\n)*unigram"),
        ("tokenizer.model", sentencepiece(extra_spaces=1), "extra spaces"),
        ("tokenizer.model", sentencepiece(charsmap=b"x"), "normalised characters"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "not a sentencepiece model"),
        ("tokenizer.model", sentencepiece()[:-3], "not a sentencepiece model"),
        ("tokenizer.model", b"", "it holds no pieces"),
        ("qwen.tiktoken", b"IQ== 0\n", r"does not convert(.|\n)*qwen\.tiktoken(.|\n)*save_pretrained"),
        ("tekken.json", b"{}", r"tekken\.json"),
        ("vocab.json", b"{}", r"does not convert(.|\n)*vocab\.json(.|\n)*or vocab\.json with merges\.txt"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    source = write_model(tmp_path / "m")
    (source / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=words):
        convert(ConvertOptions(model_dir=source, output_dir=tmp_path / "c"))
    assert not (tmp_path / "c").exists()
    (source / "tokenizer.json").write_text("{}")
    assert make_tokenizer(source) is None


@pytest.mark.slow
@pytest.mark.shared
def test_a_real_model_gives_the_ids_of_its_tokenizer_json(shared: Path, tmp_path: Path) -> None:
    folder = shared / "tokenizers" / "llama2"
    (tmp_path / "tokenizer.model").write_bytes((folder / "tokenizer.model").read_bytes())
    ours, theirs = tokenizer_of(tmp_path), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    book = (shared / "data" / "text" / "tinyshakespeare.txt").read_text()[:20000]
    for text in (*TEXTS, book):
        assert ours.encode(text) == theirs.encode(text).ids
