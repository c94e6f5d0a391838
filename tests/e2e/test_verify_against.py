"""`ingot verify --against`, as a command: words, JSON, exit codes, the results that are stored."""

import json
import re
import shutil
from pathlib import Path

import pytest

from ingot.engine import open_engine, read_manifest
from ingot.plan import Plan
from ingot.quickstart import SHIPPED
from tests.convert.gguf.test_blocks import write_llama
from tests.e2e.command import ingot
from tests.hall.planted import Bytes, panel, replant

TOKENS = ("--tokens", 24)


@pytest.mark.slow
def test_a_sound_engine(shipped_engine: Path, shipped_checkpoint: Path) -> None:
    result = ingot("verify", shipped_engine, "--against", shipped_checkpoint, *TOKENS).succeeds()
    for word in ("all hashes match", "24 tokens of the sample text", "KL", "top-1", "perplexity", "weights", "kernels"):
        assert word in result.out
    assert "warning" not in result.err


@pytest.mark.slow
def test_json_and_a_text_of_ones_own(shipped_engine: Path, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("It was a cold morning, and the old man went down to the river to look at his boat. " * 3)
    args = ("verify", shipped_engine, "--against", SHIPPED, "--text", text, "--tokens", 30, "--json")
    (document,) = [json.loads(ingot(*args, "--log_level", "error").succeeds().out)]
    assert document["ok"]
    assert document["summary"]["text"] == "own.txt"
    assert document["summary"]["positions"] == 30
    assert 1 < document["summary"]["perplexity"] < 2000
    assert {"sha256", "bytes", "steps", "findings"} <= set(document)
    assert document["steps"][0]["name"] == "embed"


def test_a_gguf_file(tmp_path: Path) -> None:
    """Against itself an engine holds; against a file with other weights it does not."""
    for seed in (2, 8):
        (tmp_path / str(seed)).mkdir()
        write_llama(tmp_path / str(seed), seed)
    file, checkpoint, engine = tmp_path / "8" / "model.gguf", tmp_path / "checkpoint", tmp_path / "engine"
    ingot("convert", "--model_dir", file, "--output_dir", checkpoint).succeeds()
    ingot("build", "--checkpoint_dir", checkpoint, "--output_dir", engine).succeeds()
    done = ingot("verify", engine, "--against", file, *TOKENS).succeeds()
    assert "verify: OK" in done.out
    other = ingot("verify", engine, "--against", tmp_path / "2" / "model.gguf", *TOKENS)
    assert other.code == 1
    assert "model.gguf differ in SHA-256" in other.err


def test_the_last_line_is_the_verdict(tiny_engine: Path, tiny_checkpoint: Path) -> None:
    done = ingot("verify", tiny_engine, "--against", tiny_checkpoint, *TOKENS).succeeds()
    assert done.out.splitlines()[-1].startswith("verify: OK, all hashes match, and every weight")
    assert re.search(r"^layers +\S+ differs most from the source: \S+, tolerance \S+$", done.out, flags=re.MULTILINE)
    assert "were compared" not in done.err


@pytest.mark.slow
def test_fewer_tokens_than_asked_for_are_told(tiny_engine: Path, shipped_engine: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("The prince looked at Natasha.")
    done = ingot("verify", shipped_engine, "--against", SHIPPED, "--text", text, "--tokens", 300).succeeds()
    words = "tokens were compared, not 300: short.txt is too short for more whole sequences"
    assert re.search(rf"warning: \d+ {words}", done.err)


def test_results_are_stored(tiny_engine: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(tiny_engine, tmp_path / "engine"))
    assert "verified    " not in ingot("inspect", engine).succeeds().out
    ingot("verify", engine, "--against", tiny_checkpoint, *TOKENS, "--store_results").succeeds()
    assert "verified    kl_max" in ingot("inspect", engine).succeeds().out
    verification = json.loads(ingot("inspect", engine, "--json").succeeds().out)["verification"]
    assert verification["positions"] == 24
    assert dict(read_manifest(engine).verification) == verification
    open_engine(engine).close()
    ingot("verify", engine).succeeds()
    assert sorted(path.name for path in engine.iterdir()) == sorted(path.name for path in tiny_engine.iterdir())


def test_an_engine_that_is_wrong_fails_and_stores_no_results(
    tiny_engine: Path, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    def zeros(plan: Plan, section: Bytes) -> None:
        panel(plan, section, "layers.1/down.weight", 16)[:] = 0

    engine = replant(tiny_engine, tmp_path / "engine", zeros)
    args = ("verify", engine, "--against", tiny_checkpoint, *TOKENS, "--store_results")
    result = ingot(*args)
    assert result.code == 1
    assert "error: the engine does not compute what its source says" in result.err
    assert "weight layers.1/down.weight, row" in result.err
    assert "Traceback" not in result.err
    assert not read_manifest(engine).verification
    document = json.loads(ingot(*args, "--json").out)
    assert not document["ok"]
    assert document["findings"][0]["step"] == "layers.1/down"
    assert "all hashes match" in ingot("verify", engine).succeeds().out, "every checksum is that of the wrong bytes"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", 10), "need --against"),
        (("--store_results",), "need --against"),
        (("--against", "nothing-here"), "no such directory"),
        (("--against", SHIPPED, "--tokens", 1), "1"),
        (("--against", SHIPPED, "--text", "nothing-here.txt"), "does not exist"),
    ],
)
def test_wrong_usage(options: tuple[object, ...], words: str, shipped_engine: Path) -> None:
    ingot("verify", shipped_engine, *options).fails(words, code=2)


@pytest.mark.slow
def test_texts_that_cannot_be_used(shipped_engine: Path, tiny_engine: Path, tmp_path: Path) -> None:
    latin, empty, text = tmp_path / "latin.txt", tmp_path / "empty.txt", tmp_path / "some.txt"
    latin.write_bytes("Müller".encode("latin-1"))
    empty.write_text("")
    text.write_text("words and words")
    against = ("--against", SHIPPED)
    ingot("verify", shipped_engine, *against, "--text", latin).fails("not UTF-8", code=2)
    ingot("verify", shipped_engine, *against, "--text", empty).fails("too short", code=2)
    tiny = tiny_engine.with_name("checkpoint")
    ingot("verify", tiny_engine, "--against", tiny, "--text", text).fails("has no tokenizer")


def test_another_engine_is_refused_with_the_first_difference(tiny_engine: Path, shipped_checkpoint: Path) -> None:
    ingot("verify", tiny_engine, "--against", shipped_checkpoint).fails(
        "was not built from this source", "vocab_size", "expected: 2560", "got: 61"
    )
