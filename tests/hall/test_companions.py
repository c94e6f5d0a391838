"""Tokenizers, settings and token ids that no runner could use are refused, in words, by everyone who reads them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.builder.build import build
from ingot.companions import check_companions, check_token_ids, read_tokenizer, tokenizer_memory
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.generation import read_generation_defaults
from ingot.convert.convert import convert
from ingot.errors import ConfigError
from ingot.runtime.tokenizer import Tokenizer
from tests.handmade import TINY_LLAMA, write_model

Change = Callable[[Path], object]

GOOD = {"model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}}
# merges whose second token is shorter than its prefix: the library slices beyond the end
PANIC = {
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "##",
    }
}


def write(name: str, text: str) -> Change:
    return lambda folder: (folder / name).write_text(text)


def tokenizer(value: object) -> Change:
    return write("tokenizer.json", value if isinstance(value, str) else json.dumps(value))


def generation(**values: object) -> Change:
    return write("generation_config.json", json.dumps(values))


# (what is done to a directory, words of the refusal)
BROKEN = [
    (tokenizer("{"), "the tokenizer cannot be read(.|\n)*tokenizer.json"),
    (tokenizer([]), "the tokenizer cannot be read"),
    (tokenizer({"version": "1.0"}), "the tokenizer cannot be read(.|\n)*Model missing"),
    (tokenizer("[" * 100_000), "the tokenizer cannot be read"),
    (tokenizer(PANIC), "the tokenizer cannot be read(.|\n)*slice index"),
    (write("tokenizer.json", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1")), "the tokenizer cannot"),
    (write("tokenizer_config.json", "["), "not valid JSON"),
    (write("tokenizer_config.json", "[" * 100_000), "not valid JSON"),
    (write("tokenizer_config.json", "[]"), "no JSON object(.|\n)*tokenizer_config.json"),
    (write("generation_config.json", "[" * 100_000), "not valid JSON"),
    (generation(temperature=-1), "generation_config.json:temperature"),
    (generation(temperature=1e39), "generation_config.json:temperature"),
    (generation(temperature="hot"), "generation_config.json:temperature"),
    (generation(top_p=0), "generation_config.json:top_p"),
    (generation(top_p=1.5), "generation_config.json:top_p"),
    (generation(top_k=-2), "generation_config.json:top_k"),
    (generation(top_k=2.5), "generation_config.json:top_k"),
    (generation(top_k=2**31), "generation_config.json:top_k"),
    (generation(min_p=2), "generation_config.json:min_p"),
    (generation(repetition_penalty=0), "generation_config.json:repetition_penalty"),
    (generation(do_sample="yes"), "generation_config.json:do_sample"),
    (
        generation(eos_token_id=61),
        "vocabulary(.|\n)*generation_config.json:eos_token_id(.|\n)*at most 60(.|\n)*got: 61",
    ),
    (generation(eos_token_id=[2, 99]), "generation_config.json:eos_token_id(.|\n)*got: 99"),
    (generation(bos_token_id=61), "generation_config.json:bos_token_id"),
    (generation(eos_token_id="2"), "generation_config.json:eos_token_id"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose companions are in order."""
    folder = write_model(tmp_path_factory.mktemp("companions") / "m", TINY_LLAMA)
    tokenizer(GOOD)(folder)
    generation(do_sample=True, temperature=0.6, top_k=40, top_p=0.9, eos_token_id=[2, 60], pad_token_id=61)(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    convert(ConvertOptions(model_dir=model, output_dir=model.parent / "c"))
    return model.parent / "c"


def test_what_is_in_order_passes(model: Path, checkpoint: Path, tmp_path: Path) -> None:
    check_companions(model)
    assert check_token_ids(model, 61).eos == (2, 60)
    assert read_tokenizer(model / "tokenizer.json").encode("a").ids == [0]
    assert tokenizer_memory(model) == 16 * (model / "tokenizer.json").stat().st_size
    build(BuildConfig(target="ref", dry_run=True), checkpoint, tmp_path / "e")


@pytest.mark.daily(17)
@pytest.mark.parametrize(("change", "words"), BROKEN)
def test_the_broken_are_refused_by_convert_and_build(
    model: Path, checkpoint: Path, tmp_path: Path, change: Change, words: str
) -> None:
    for source in (model, checkpoint):
        change(Path(shutil.copytree(source, tmp_path / source.name)))
    with pytest.raises(ConfigError, match=words):
        convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "out"))
    with pytest.raises(ConfigError, match=words):
        build(BuildConfig(target="ref", dry_run=True), tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [tokenizer("{"), tokenizer(PANIC), write("tokenizer_config.json", "[" * 100_000)])
def test_the_broken_are_refused_by_runners(model: Path, tmp_path: Path, change: Change) -> None:
    """An engine may have been changed since."""
    folder = Path(shutil.copytree(model, tmp_path / "e"))
    Tokenizer.from_dir(folder)
    change(folder)
    with pytest.raises(ConfigError):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize("from_seed", [False, True])
def test_token_ids_of_config_json(model: Path, tmp_path: Path, from_seed: bool) -> None:
    """They count where there is no generation_config.json."""
    folder = write_model(tmp_path / "m", {**TINY_LLAMA, "eos_token_id": 61})
    source: dict[str, Any] = {"config": folder / "config.json", "random_weights": 1} if from_seed else {}
    options = ConvertOptions(output_dir=tmp_path / "c", **(source or {"model_dir": folder}))
    with pytest.raises(ConfigError, match=r"vocabulary(.|\n)*config.json:eos_token_id"):
        convert(options)
    if not from_seed:
        generation(eos_token_id=60)(folder)
        convert(options)


def test_a_tokenizer_made_from_older_files_is_tried(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "m"))
    (folder / "tokenizer.json").unlink()
    write("vocab.json", json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))(folder)
    write("merges.txt", "#version: 0.2\na b\n")(folder)
    write("tokenizer_config.json", json.dumps({"tokenizer_class": "GPT2Tokenizer"}))(folder)
    convert(ConvertOptions(model_dir=folder, output_dir=tmp_path / "c"))
    assert read_tokenizer(tmp_path / "c" / "tokenizer.json").encode("ab").ids == [2]


def test_settings_within_their_ranges(tmp_path: Path) -> None:
    generation(temperature=0, top_k=0, top_p=1, min_p=0.0, repetition_penalty=1.2, do_sample=None)(tmp_path)
    defaults = read_generation_defaults(tmp_path)
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.do_sample) == (0, 0, 1, False)
    assert defaults.others == {"min_p": 0.0, "repetition_penalty": 1.2}
