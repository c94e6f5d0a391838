"""A model through `quantize`: what onnxruntime and engines make of it, interruption, memory, refusals."""

import errno
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from ingot.builder.build import build
from ingot.builder.calibrated.quantize import QUANTISING, WEIGHTS_FILE, QuantizeReport, quantize
from ingot.builder.calibrated.text import text_hash, windows_of
from ingot.builder.expressions import WeightReader
from ingot.checkpoint import CALIBRATION, Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.configs.quantize import QuantizeOptions, read_recipe
from ingot.configs.recipe import LayerRule
from ingot.convert.convert import convert
from ingot.engine import read_manifest
from ingot.errors import CapacityError, CheckpointError, UsageError
from tests.builder.engines import engine_logits
from tests.graph_logits import logits_of_graph
from tests.handmade import TINY_GPT2, TINY_LLAMA, write_model
from tests.tiny import tiny_model

TEXT = ["the quick brown fox jumps over the lazy dog and packs my box with five dozen liquor jugs " * 5]
LLAMA: dict[str, object] = {**TINY_LLAMA, "hidden_size": 64, "intermediate_size": 88}
MIXTRAL: dict[str, object] = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}


def write_tokenizer(folder: Path) -> None:
    """A token for each of some letters."""
    vocabulary = {letter: i for i, letter in enumerate(" abcdefghijklmnopqrstuvwxyz", 3)} | {"?": 0}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def checkpoint_of(folder: Path, config: dict[str, object] = LLAMA) -> Path:
    model = tiny_model(folder / "m", config).folder if config is MIXTRAL else write_model(folder / "m", config)
    write_tokenizer(model)
    convert(ConvertOptions(model_dir=model, output_dir=folder / "c"))
    return folder / "c"


def test_windows_begin_with_the_first_token_once(tmp_path: Path) -> None:
    """A chat template may have written it; texts behind the last token that counts are not looked at."""
    checkpoint = checkpoint_of(tmp_path)
    (checkpoint / "generation_config.json").write_text('{"bos_token_id": 4}')  # a
    found = windows_of(Checkpoint.open(checkpoint), ["a" + "b" * 9, "c" * 9, "d"], 99, 10_000, 18)
    assert found == [[4, *[5] * 9], [4, *[6] * 9]]


def quantised(
    folder: Path,
    checkpoint: Path,
    precision: str = "w4g32",
    *,
    codes: str = "auto",
    layers: tuple[LayerRule, ...] = (),
    max_mem: int | None = None,
) -> QuantizeReport:
    given = QuantizeOptions(output_dir=folder / "q", precision=precision, codes=codes, layers=layers, max_mem=max_mem)
    return quantize(given, checkpoint, TEXT)


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("config", "precision", "codes", "format_"),
    [
        pytest.param(LLAMA, "w4g32", "auto", "w4tg32", marks=pytest.mark.slow),
        (LLAMA, "w4g128", "symmetric", "w4tg128"),
        (LLAMA, "w4g32", "asymmetric", "w4tsg32"),
        pytest.param(LLAMA, "w8", "auto", "w8", marks=pytest.mark.slow),
        (LLAMA, "w8a8", "auto", "w8"),
        (TINY_GPT2, "w4g32", "auto", "w4tg128"),  # stored [in, out], with layer norms
        (MIXTRAL, "w4g32", "auto", "w4tg32"),
    ],
)
def test_onnxruntime_and_an_engine_compute_what_was_made(
    tmp_path: Path, config: dict[str, object], precision: str, codes: str, format_: str
) -> None:
    checkpoint = checkpoint_of(tmp_path, config)
    report = quantised(tmp_path, checkpoint, precision, codes=codes)
    assert report.left == ()
    assert all(each.loss <= each.plain for each in report.products)
    onnx.checker.check_model(str(tmp_path / "q" / "model.onnx"), full_check=True)
    ids = np.array([[" abcdefghijklmnopqrstuvwxyz".index(letter) + 3 for letter in TEXT[0][:34]]]).reshape(2, 17)
    exact, found = logits_of_graph(checkpoint, ids), logits_of_graph(tmp_path / "q", ids)
    scale = np.ptp(exact)
    assert 1e-6 < np.sqrt(np.square(found - exact).mean()) / scale < 0.05
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "q", tmp_path / "f")
    assert np.abs(engine_logits(tmp_path / "f", ids) - found).max() < 1e-4 * scale
    built = build(BuildConfig(target="ref", activations="f32"), tmp_path / "q", tmp_path / "e")
    assert built.precision == format_
    # lm_head and the table are w8
    assert np.sqrt(np.square(engine_logits(tmp_path / "e", ids) - found).mean()) < 0.02 * scale
    manifest = read_manifest(tmp_path / "e")
    assert manifest.sources[CALIBRATION] == text_hash(TEXT)
    assert all("ingot" in each and "loss" in each for each in manifest.weight_sources.values())
    added = [manifest.weight_errors[f"{each.name}.weight"] or 0 for each in report.products]
    assert max(added) < 1e-6


@pytest.mark.slow
def test_fp8_codes_are_read_by_onnxruntime_and_kept(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    report = quantised(tmp_path, checkpoint, "f8")
    assert {each.format.split(",")[0] for each in report.products} == {"ingot f8"}
    assert all(1e-4 < each.loss <= each.plain < 0.05 for each in report.products)
    onnx.checker.check_model(str(tmp_path / "q" / "model.onnx"), full_check=True)
    ids = np.array([[" abcdefghijklmnopqrstuvwxyz".index(letter) + 3 for letter in TEXT[0][:34]]]).reshape(2, 17)
    exact, found = logits_of_graph(checkpoint, ids), logits_of_graph(tmp_path / "q", ids)
    assert 1e-6 < np.sqrt(np.square(found - exact).mean()) / np.ptp(exact) < 0.02
    build(BuildConfig(target="ref", precision="f32"), tmp_path / "q", tmp_path / "f")
    assert np.abs(engine_logits(tmp_path / "f", ids) - found).max() < 1e-4 * np.ptp(exact)
    built = build(BuildConfig(target="ref", activations="f32"), tmp_path / "q", tmp_path / "e")
    assert built.precision == "f8"
    assert np.abs(engine_logits(tmp_path / "e", ids) - found).max() < 1e-2 * np.ptp(exact)  # lm_head is w8


@pytest.mark.slow
def test_a_run_that_was_interrupted_goes_on_and_makes_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    options = QuantizeOptions(output_dir=tmp_path / "q", precision="w4g32")
    quantize(options, checkpoint, TEXT)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "q").iterdir()}

    shares = list[float]()

    def stop(what: str, done: int, total: int) -> None:
        if what == QUANTISING:
            shares.append(done / total)
        if len(shares) == 6:
            raise KeyboardInterrupt

    other = QuantizeOptions(output_dir=tmp_path / "other", precision="w4g32")
    with pytest.raises(KeyboardInterrupt):
        quantize(other, checkpoint, TEXT, stop)
    assert not (tmp_path / "other").exists()
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.5 < shares[5] < 1, "five matmuls of eight"
    assert quantize(other, checkpoint, TEXT).resumed == 5
    assert {path.name: path.read_bytes() for path in (tmp_path / "other").iterdir()} == whole
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    shares.clear()
    with pytest.raises(KeyboardInterrupt):
        quantize(other, checkpoint, TEXT, stop)
    changed = QuantizeOptions(output_dir=tmp_path / "other", precision="w4g64")
    assert quantize(changed, checkpoint, TEXT).resumed == 0


@pytest.mark.slow
def test_what_is_computed_for_some_tokens_at_a_time_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(tmp_path)
    whole = quantised(tmp_path, checkpoint, "w8a8")
    monkeypatch.setattr("ingot.builder.calibrated.walk.TOKENS", 48)
    for name in ("_TOKENS", "_FEW_TOKENS"):
        monkeypatch.setattr(f"ingot.builder.calibrated.methods.{name}", 48)
    parts = quantised(tmp_path, checkpoint, "w8a8")
    assert parts.tokens > 3 * 48
    for first, second in zip(whole.products, parts.products, strict=True):
        assert second.loss == pytest.approx(first.loss, rel=1e-2)
        assert second.plain == pytest.approx(first.plain, rel=1e-2)


@pytest.mark.slow
def test_a_product_is_the_most_that_is_read_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, read = list[int](), WeightReader.read_rows

    def noted(self: WeightReader, tensor: object, begin: int, end: int) -> object:
        rows = read(self, tensor, begin, end)
        sizes.append(rows.size)
        return rows

    monkeypatch.setattr(WeightReader, "read_rows", noted)
    monkeypatch.setattr("ingot.builder.calibrated.methods.rows_at_a_time", lambda columns: 16)
    quantised(tmp_path, checkpoint_of(tmp_path), codes="symmetric", max_mem=256 << 20)
    assert max(sizes) <= 2 * 88 * 64, "gate and up of one layer"
    assert len([size for size in sizes if size == 16 * 64]) > 10


@pytest.mark.slow
def test_what_cannot_be_quantised_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoint_of(tmp_path)
    with pytest.raises(UsageError, match="too few tokens"):
        quantize(QuantizeOptions(output_dir=tmp_path / "q", precision="w8"), checkpoint, [" "])
    with pytest.raises(UsageError, match="does not support fp8"):
        QuantizeOptions(output_dir=tmp_path / "q", precision="fp8")
    with pytest.raises(UsageError, match="unknown ways of rounding"):
        QuantizeOptions(output_dir=tmp_path / "q", precision="w8", ways=("gtpq",))
    with pytest.raises(UsageError, match="fits no matmul"):
        quantised(tmp_path, checkpoint, layers=(LayerRule(pattern="layers.*/nothing", precision="w8"),))
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="holds something else"):
        quantised(tmp_path, checkpoint)
    (tmp_path / "q" / "mine.txt").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", _no_room)
        with pytest.raises(CapacityError, match="cannot be saved"):
            quantised(tmp_path, checkpoint)
    with pytest.raises(CapacityError, match="more memory"):
        quantised(tmp_path, checkpoint, max_mem=1 << 20)
    quantised(tmp_path, checkpoint)
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize(QuantizeOptions(output_dir=tmp_path / "again", precision="w8"), tmp_path / "q", TEXT)
    tokenizer = checkpoint / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"t": 23', '"t": 99'))
    with pytest.raises(UsageError, match="tokens that the model does not have"):
        quantised(tmp_path, checkpoint)
    tokenizer.unlink()
    with pytest.raises(UsageError, match="needs the model's tokenizer"):
        quantised(tmp_path, checkpoint)


def _no_room(file: object, **arrays: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_recipes_by_layer(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('precision = "w4g32"\n[[layers]]\npattern = "layers.*/down"\nprecision = "w8"\n')
    precision, layers = read_recipe(str(recipe))
    report = quantised(tmp_path, checkpoint_of(tmp_path), precision, layers=layers)
    assert {each.format.split()[1].rstrip(",") for each in report.products if each.name.endswith("down")} == {"i8"}
    assert (
        Checkpoint.open(tmp_path / "q").config.losses.keys() == Checkpoint.open(tmp_path / "q").config.quantised.keys()
    )
    assert [path.name for path in (tmp_path / "q").glob("*.safetensors")] == [WEIGHTS_FILE]
    recipe.write_text('precision = "w4g32"\nactivations = "int8"\n')
    with pytest.raises(UsageError, match="belongs to ingot build"):
        read_recipe(str(recipe))
    with pytest.raises(UsageError, match=r"no recipe(.|\n)*w4g32(.|\n)*did you mean 'w4g128'"):
        read_recipe("w4g129")


def test_outputs_of_convert_and_of_quantize_do_not_replace_each_other(tmp_path: Path) -> None:
    """Least of all the Checkpoint that is quantised."""
    checkpoint = checkpoint_of(tmp_path)
    quantised(tmp_path, checkpoint)
    quantised(tmp_path, checkpoint)
    with pytest.raises(UsageError, match="holds something else"):
        quantize(QuantizeOptions(output_dir=checkpoint, precision="w8"), checkpoint, TEXT)
    with pytest.raises(UsageError, match="holds something else"):
        convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=tmp_path / "q"))
    convert(ConvertOptions(model_dir=tmp_path / "m", output_dir=checkpoint))
