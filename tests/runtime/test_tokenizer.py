"""Text comes out piece by piece: never half a character, never a lost space, and all of it in the end."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ingot.errors import ConfigError, RequestError
from ingot.quickstart import SHIPPED
from ingot.runtime.tokenizer import Tokenizer
from tests.runtime.byte_tokenizer import byte_tokenizer

TEXT = "Once upon a time, naïve café owls said 你好 🎉👩‍👩‍👧 to  two   spaces.\n\tEnd "


def sentencepiece(tmp: Path) -> Tokenizer:
    """Llama 2's kind: words begin with ▁, characters outside the vocabulary come as single bytes."""
    words = ["▁", "▁the", "▁cat", "at", "c", "a", "t", "▁o", "é"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    vocab |= {word: len(vocab) + place for place, word in enumerate(words)}
    hf = tokenizers.Tokenizer(models.BPE(vocab, [("a", "t")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    hf.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf.add_special_tokens(["<s>", "</s>"])
    return save(hf, tmp)


def byte_level(tmp: Path) -> Tokenizer:
    """GPT-2's kind, with single bytes as its only tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    hf = tokenizers.Tokenizer(models.BPE({symbol: place for place, symbol in enumerate(alphabet)}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    return save(hf, tmp)


def save(hf: tokenizers.Tokenizer, tmp: Path, config: str = "{}") -> Tokenizer:
    hf.save(str(tmp / "tokenizer.json"))
    (tmp / "tokenizer_config.json").write_text(config)
    return Tokenizer.from_dir(tmp)


@pytest.fixture(scope="module", params=[sentencepiece, byte_level])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made: Tokenizer = request.param(tmp_path_factory.mktemp("tokenizer"))
    return made


def pieces_of(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.push([token]) for token in tokens), detokenizer.finish()]


def check(tokenizer: Tokenizer, ids: list[int], split: int) -> None:
    """Tokens after `split` are streamed; the prompt's text and the pieces make up the whole."""
    prompt, tokens = ids[:split], ids[split:]
    pieces = pieces_of(tokenizer, prompt, tokens)
    known = tokenizer.decode(prompt).rstrip("\ufffd")
    assert known + "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.daily(1)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), min_size=1, max_size=20),
    split=st.integers(0, 30),
)
@settings(max_examples=150)
def test_any_text_comes_back(tokenizer: Tokenizer, text: str, split: int) -> None:
    ids = tokenizer.encode(text)
    check(tokenizer, ids, min(split, len(ids)))


def test_leading_space_belongs_to_the_completion(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    prompt, tokens = tokenizer.encode("the"), tokenizer.encode(" cat", add_special_tokens=False)[1:]
    assert tokenizer.decode(tokens) == "cat"
    assert "".join(pieces_of(tokenizer, prompt, tokens)) == " cat"
    assert "".join(pieces_of(tokenizer, [1], tokenizer.encode("the cat")[1:])) == "the cat"


def test_half_a_character_waits_and_is_dropped_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🎉")
    prompt, tokens = ids[:-4], ids[-4:]
    detokenizer = tokenizer.detokenizer(prompt)
    assert [detokenizer.push([token]) for token in tokens] == ["", "", "", "🎉"]
    detokenizer = tokenizer.detokenizer(prompt)
    assert detokenizer.push(tokens[:3]) == ""
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_character_do_not_block(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    bad = tokenizer.encode("é")[:1]
    detokenizer = tokenizer.detokenizer([])
    text = detokenizer.push(bad * 40) + detokenizer.push(tokenizer.encode("ok"))
    assert text == "\ufffd" * 40 + "ok"


def test_special_tokens_in_the_middle(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = [*tokenizer.encode("the"), 2, 2, *tokenizer.encode(" the cat")]
    assert "".join(pieces_of(tokenizer, ids[:2], ids[2:])) == tokenizer.decode(ids)[len(tokenizer.decode(ids[:2])) :]


@pytest.mark.parametrize(
    ("template", "config", "begins"),
    [
        (True, "{}", True),
        (False, "{}", False),
        (False, '{"bos_token": "<s>", "add_bos_token": true}', True),
        (False, '{"bos_token": {"content": "<s>"}, "add_bos_token": true}', True),
        (True, '{"bos_token": "<s>", "add_bos_token": true}', True),
        (True, '{"bos_token": "<s>", "add_bos_token": false}', False),
    ],
)
def test_bos(tmp_path: Path, template: bool, config: str, begins: bool) -> None:
    hf = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    hf.add_special_tokens(["<s>"])
    if template:
        hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    ids = save(hf, tmp_path, config).encode("a")
    assert ids == ([0, 1] if begins else [1])


def test_truncation_of_the_file_is_ignored(tmp_path: Path) -> None:
    byte_level(tmp_path)
    hf = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    hf.enable_truncation(3)
    hf.enable_padding(length=50)
    assert len(save(hf, tmp_path).encode("abcdef")) == 6


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.daily(1)
@pytest.mark.shared
@pytest.mark.parametrize("name", ["gpt2", "llama2", "llama3.1", "phi3", "qwen3"])
def test_real_tokenizers(shared: Path, name: str) -> None:
    tokenizer = Tokenizer.from_dir(shared / "tokenizers" / name)
    ids = tokenizer.encode(TEXT)
    for split in range(0, len(ids), 5):
        check(tokenizer, ids, split)


def test_others_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = Tokenizer.from_dir(SHIPPED)
    thread = threading.Thread(target=tokenizer.encode, args=("the prince " * 30_000,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10


def test_text_that_a_vocabulary_cannot_spell(tmp_path: Path) -> None:
    """No letter but x, and nothing for the unknown: the tokenizer opens, and other prompts are refused."""
    hf = tokenizers.Tokenizer(models.WordLevel({"x": 0, "y": 1}, unk_token="?"))
    tokenizer = save(hf, tmp_path)
    assert tokenizer.encode("x") == [0]
    assert "y" in tokenizer.token_text(1)
    with pytest.raises(RequestError, match="cannot be tokenized"):
        tokenizer.encode("a")


@pytest.mark.parametrize("take", [Tokenizer.encode, Tokenizer.forms])
def test_half_a_character_is_refused(take: Callable[[Tokenizer, str], object], tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"not Unicode[^\0]*U\+D800 at place 2"):
        take(tokenizer, "ab\ud800")


def test_settings_that_cannot_be_read_are_refused_in_words(tmp_path: Path) -> None:
    byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").symlink_to("/proc/self/mem")  # a file whose first byte nobody can read
    with pytest.raises(ConfigError, match=r"cannot be read(.|\n)*tokenizer_config"):
        Tokenizer.from_dir(tmp_path)


def test_what_a_prompt_leaves_open(tmp_path: Path) -> None:
    """Half a character is given out again with its other half; bytes that can be no character are not."""
    tokenizer = byte_tokenizer(tmp_path, 60)
    c3, a9, mark = 55, 56, 0
    for prompt, tokens, text in (
        ([mark, c3], [a9], "\u00e9"),
        ([mark, c3], [mark], "\ufffd!"),
        ([c3, a9], [mark], "!"),
        ([a9], [mark], "!"),
        ([a9, a9, c3, c3], [a9], "\u00e9"),
        ([a9, a9], [c3, a9], "\u00e9"),
    ):
        detokenizer = tokenizer.detokenizer(prompt)
        assert detokenizer.push(tokens) + detokenizer.finish() == text, (prompt, tokens)


@pytest.mark.parametrize("template", [True, False])
def test_a_bos_that_stands_in_the_text_stays(template: bool, tmp_path: Path) -> None:
    hf = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    hf.add_special_tokens(["<s>"])
    if template:
        hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = save(hf, tmp_path, '{"bos_token": "<s>", "add_bos_token": false}')
    assert tokenizer.encode("<s>a") == [0, 1]
    assert tokenizer.encode("a") == [1]


def test_a_word_after_a_space_has_one_space(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    word, spaced = (tuple(tokenizer.encode(text)) for text in ("ab", " ab"))
    assert tokenizer.forms("ab") == [word, spaced]
    assert tokenizer.forms(" ab") == [spaced]


def test_what_can_be_no_character_comes_after_sixteen_tokens(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    (half, _) = tokenizer.encode("\u00e9")
    detokenizer = tokenizer.detokenizer([])
    pieces = [detokenizer.push([half]) for _ in range(32)]
    assert [place for place, piece in enumerate(pieces, 1) if piece] == [16, 32]
