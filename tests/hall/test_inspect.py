"""inspect says what lies in a directory, and loads no weights for it."""

from pathlib import Path

import pytest

from ingot.builder.build import build
from ingot.cli.console import wrapped
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.engine import read_plan
from ingot.errors import EngineError, UsageError
from ingot.inspect import inspect
from ingot.plan import Plan
from ingot.plan_json import plan_from_json
from tests.handmade import TINY_LLAMA, write_model


def _dumped(file: Path) -> Plan:
    return plan_from_json(file.read_text()[:-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """m: model, c: Checkpoint, e: Engine, d: graphs after passes."""
    folder = tmp_path_factory.mktemp("inspect")
    config = {**TINY_LLAMA, "num_hidden_layers": 3}
    convert(ConvertOptions(model_dir=write_model(folder / "m", config), output_dir=folder / "c"))
    build(BuildConfig(target="ref", dump_passes=folder / "d"), folder / "c", folder / "e")
    return folder


def test_an_engine(folder: Path) -> None:
    found = inspect(folder / "e")
    steps = {step["name"]: step for step in found.document["steps"]}
    assert found.document["kind"] == "engine"
    assert found.document["eos_ids"] == [2]
    assert steps["layers.1/gate_up"]["operations"] == 2 * 88 * 32
    assert steps["layers.1/gate_up"]["kernel"] == "matmul.f32.ref"
    assert steps["layers.1/gate_up"]["nbytes"] == 96 * 32 * 4 + 4 * (32 + 44)  # padded panels; input and output
    assert steps["layers.1/attention"]["operations"] == 4 * 65 * 48  # max_seq_len is less than the usual context
    assert "layers.0-2/gate_up" in found.text
    assert found.document["inputs"][0] == {"name": "input_ids", "dtype": "i32", "extent": "tokens"}
    assert {each["dtype"] for each in found.document["buffers"]} == {"f32"}
    lines = {line.split()[0]: line for line in found.text.splitlines() if line}
    assert lines["inputs"].endswith("block_tables (i32 by sequence_blocks), logit_rows (i32 by logits)")
    assert lines["activations"].endswith(f"{len(found.document['buffers'])} buffers of f32")
    assert "rope_table" in found.text


@pytest.mark.slow
@pytest.mark.native
def test_the_variants_of_an_engine(folder: Path, tmp_path: Path) -> None:
    options = BuildConfig(target="cpu/avx2", precision="w8", activations="int8", autotune=False, dump_passes=tmp_path)
    build(options, folder / "c", tmp_path / "e")
    found = inspect(tmp_path / "e")
    few, many = found.document["variants"]
    assert (few["name"], few["most_tokens"], many["name"], many["most_tokens"]) == ("few", 512, "many", 2048)
    assert many["calls"][1]["inside"] == ["layers.0/attention_norm"]
    lines = [line for line in found.text.splitlines() if line.startswith("variant ")]
    assert "of at most 512 tokens" in lines[0]
    assert "7 norms by every thread" in lines[0]
    assert "6 norms in matmuls, 3 rotations in attention" in lines[1]
    assert inspect(folder / "e").document["variants"] == [], "ref runs the steps"
    dumped = [path.name for path in sorted(tmp_path.glob("*.json"))]
    names = [each.partition("_")[2] for each in dumped[:3]]
    assert names == ["choose_draw_kernel.json", "add_in_products.json", "few.private_rows.json"]
    assert _dumped(tmp_path / dumped[0]).draw_kernel == found.document["draw_kernel"] == "sample.f32.avx2"
    assert "draws       tokens by sample.f32.avx2" in found.text
    adding = [bool(step.inputs[3]) for step in _dumped(tmp_path / dumped[1]).steps if step.op == "matmul"]
    assert adding == [False, True, False, True] * 3 + [False], "attention's product and down, of each layer"
    assert _dumped(tmp_path / dumped[-1]).variants == read_plan(tmp_path / "e").variants


def test_bytes_bound_one_token_and_never_a_step_without_bytes(folder: Path) -> None:
    bounds = {step["name"]: step["bound"] for step in inspect(folder / "e").document["steps"]}
    assert bounds["lm_head"] == bounds["layers.0/attention_norm"] == "memory"


@pytest.mark.parametrize("name", ["c", "e", "c/model.onnx"])
def test_the_summary_fits_a_terminal(name: str, folder: Path) -> None:
    found = inspect(folder / name)
    assert max(map(len, wrapped(found.summary, 80).splitlines())) <= 80
    assert len(found.summary) <= len(found.text)


def test_the_summary_names_what_there_is(folder: Path) -> None:
    checkpoint, engine = inspect(folder / "c").summary, inspect(folder / "e").summary
    assert "rope.theta" in checkpoint
    assert "None" not in checkpoint.split("files")[0], "what the model does not have is left out"
    assert "{" not in checkpoint
    assert "  gate_up" in engine
    assert "layers 0-2" in engine
    assert "of one token after 64 others" in engine, "the engine holds no more"


def test_json_holds_the_same(folder: Path) -> None:
    assert '"kind": "engine"' in inspect(folder / "e").to_json()
    assert '"bytes_per_token"' in inspect(folder / "e").to_json()


def test_weights_are_not_read(folder: Path, tmp_path: Path) -> None:
    """Of an engine whose weights are damaged, plan and manifest can still be looked at."""
    rank = folder / "e" / "rank0.engine"
    before = rank.read_bytes()
    try:
        rank.write_bytes(before[:-100] + bytes(100))
        assert inspect(folder / "e").document["kind"] == "engine"
    finally:
        rank.write_bytes(before)


def test_a_checkpoint(folder: Path) -> None:
    found = inspect(folder / "c")
    assert found.document["kind"] == "checkpoint"
    assert found.document["model"]["num_layers"] == 3
    assert found.document["graph"]["ops"]["Attention"] == 3
    assert found.document["graph"]["files"] == ("model.safetensors",)
    assert "generation_config.json" in found.text


@pytest.mark.parametrize("name", ["c/model.onnx", "d/00_checkpoint.onnx", "d/21_choose_kernels.onnx"])
def test_a_graph(folder: Path, name: str) -> None:
    found = inspect(folder / name)
    assert found.document["kind"] == "graph"
    assert found.document["weights"] == inspect(folder / "c").document["graph"]["weights"]
    assert ("ingot::PagedAttention" in found.text) == ("choose_kernels" in name)


def test_what_it_cannot_read(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        inspect(tmp_path / "nothing")
    with pytest.raises(EngineError, match=r"not the manifest of an engine(.|\n)*Hugging Face"):
        inspect(folder / "m")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=r"another (file|directory)"):
        inspect(tmp_path / "notes.txt")
