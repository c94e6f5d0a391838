"""The main path on whole models: every pass keeps the numbers, names mean nothing, and what fails leaves nothing."""

import contextlib
import json
import random
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ingot.builder import pack
from ingot.builder.build import BuildReport, build
from ingot.checkpoint import CHECKPOINT_SCHEMA
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.dtypes import DType
from ingot.engine import open_engine
from ingot.errors import CapacityError, CheckpointError, IngotError, PassError, UsageError
from tests.builder.engines import engine_logits
from tests.handmade import TINY_GPT2, TINY_LLAMA, random_tensors, write_model
from tests.passes.graphs import evaluate_model

IDS = np.random.default_rng(2).integers(0, 61, (2, 13))
LLAMA = {**TINY_LLAMA, "attention_bias": True, "tie_word_embeddings": True}
MODELS = {"llama": LLAMA, "gpt2": TINY_GPT2}


def make_checkpoint(folder: Path, config: dict[str, object], dtype: DType = DType.F32) -> Path:
    convert(ConvertOptions(model_dir=write_model(folder / "m", config, dtype=dtype), output_dir=folder / "c"))
    return folder / "c"


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Checkpoint of each family; not to be changed."""
    return make_checkpoint(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One Checkpoint; not to be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), LLAMA)


def build_ref(checkpoint: Path, output: Path, **options: Any) -> BuildReport:
    return build(BuildConfig(target="ref", **options), checkpoint, output)


@pytest.mark.daily(1)
def test_every_pass_keeps_the_numbers(checkpoint: Path, tmp_path: Path) -> None:
    """Dumps lie beside the weights, so that their references hold."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    report = build_ref(folder, tmp_path / "e", dump_passes=folder)
    dumps = sorted(folder.glob("[0-9][0-9]_*.onnx"))
    plans = sorted(folder.glob("[0-9][0-9]_*.json"))
    assert [dump.stem[3:] for dump in (*dumps, *plans)] == ["checkpoint", *(each.name for each in report.passes)]
    expected = evaluate_model(onnx.load(dumps[0]), IDS)
    for dump in dumps[1:]:
        np.testing.assert_allclose(evaluate_model(onnx.load(dump), IDS), expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(engine_logits(tmp_path / "e", IDS), expected, rtol=1e-3, atol=1e-4)


def test_dumps_leave_the_weights_outside(llama: Path, tmp_path: Path) -> None:
    build_ref(llama, tmp_path / "e", dump_passes=tmp_path / "deep" / "dumps", dry_run=True)
    for dump in (tmp_path / "deep" / "dumps").glob("*.onnx"):
        model = onnx.load(dump, load_external_data=False)
        assert dump.stat().st_size < 60_000
        assert any(each.data_location == onnx.TensorProto.EXTERNAL for each in model.graph.initializer)


def test_the_expected_steps(tmp_path: Path) -> None:
    """Fusions fire on every layer: nothing but these steps is left."""
    report = build_ref(make_checkpoint(tmp_path, LLAMA), tmp_path / "e")
    assert [step.name for step in report.plan.steps] == [
        "embed",
        *("layers.0/attention_norm", "layers.0/qkv", "rope_table", "layers.0/rope_kv_write", "layers.0/attention"),
        *("layers.0/attention_out", "layers.0/mlp_norm", "layers.0/gate_up", "layers.0/down"),
        *("layers.1/attention_norm", "layers.1/qkv", "layers.1/rope_kv_write", "layers.1/attention"),
        *("logit_rows", "layers.1/attention_out", "logit_rows.2"),
        *("layers.1/mlp_norm", "layers.1/gate_up", "layers.1/down"),
        *("final_norm", "lm_head"),
    ]
    steps = {step.name: step for step in report.plan.steps}
    assert steps["final_norm"].inputs[2] == steps["layers.1/mlp_norm"].outputs[1]  # the stream, of the wanted rows
    assert steps["layers.0/down"].inputs[3] == ""
    stream = steps["embed"].outputs[0]
    assert [steps[name].outputs[1] for name in ("layers.0/mlp_norm", "layers.1/attention_norm")] == [stream] * 2
    assert steps["lm_head"].outputs == (report.plan.logits,)


def rename_and_shuffle(model: onnx.ModelProto, seed: int) -> None:
    """New names for nodes, values, initialisers, input and output; nodes and initialisers in random order."""
    chosen = random.Random(seed)
    graph = model.graph
    names = sorted({name for node in graph.node for name in (*node.input, *node.output) if name})
    new = dict(zip(names, chosen.sample([f"v{i}" for i in range(10 * len(names))], len(names)), strict=True))
    for node in graph.node:
        node.name = f"x{chosen.random()}"
        for field in (node.input, node.output):
            renamed = [new.get(name, "") for name in field]
            del field[:]
            field.extend(renamed)
    for each in (*graph.initializer, *graph.input, *graph.output):
        each.name = new[each.name]
    for field in (graph.node, graph.initializer):
        items = list(field)
        chosen.shuffle(items)
        del field[:]
        field.extend(items)


@pytest.mark.daily(1)
@pytest.mark.parametrize("seed", range(3))
def test_names_and_order_mean_nothing(checkpoint: Path, tmp_path: Path, seed: int) -> None:
    """Also with nothing but the schema version and the checksums in config.json."""
    build_ref(checkpoint, tmp_path / "e1")
    other = Path(shutil.copytree(checkpoint, tmp_path / "c"))
    model = onnx.load(other / "model.onnx", load_external_data=False)
    rename_and_shuffle(model, seed)
    (other / "model.onnx").write_bytes(model.SerializeToString())
    weights = json.loads((checkpoint / "config.json").read_text())["weights"]
    (other / "config.json").write_text(json.dumps({"schema_version": CHECKPOINT_SCHEMA, "weights": weights}))
    build_ref(other, tmp_path / "e2")
    assert (tmp_path / "e1/rank0.engine").read_bytes() == (tmp_path / "e2/rank0.engine").read_bytes()


def test_two_builds_are_equal(llama: Path, tmp_path: Path) -> None:
    for name in ("e1", "e2"):
        build_ref(llama, tmp_path / name)
    for name in ("config.json", "rank0.engine", "generation_config.json"):
        assert (tmp_path / "e1" / name).read_bytes() == (tmp_path / "e2" / name).read_bytes()


def test_slices_change_the_place_and_not_the_numbers(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = [build_ref(llama, tmp_path / "e1").plan]
    monkeypatch.setattr(pack, "SLICE_BYTES", 1)
    plans.append(build_ref(llama, tmp_path / "e2").plan)
    assert [max(len(weight.pieces) for weight in plan.weights) for plan in plans] == [1, 6]
    np.testing.assert_array_equal(engine_logits(tmp_path / "e1", IDS), engine_logits(tmp_path / "e2", IDS))


def test_a_tied_table_is_stored_once_per_layout(llama: Path, tmp_path: Path) -> None:
    weights = {weight.name: weight for weight in build_ref(llama, tmp_path / "e").plan.weights}
    assert (weights["embed.table"].layout, weights["lm_head.weight"].layout) == ("row", "panel16.f32")
    assert weights["layers.0/gate_up.weight"].layout == "panel16.f32.gated"
    assert weights["embed.table"].shape == weights["lm_head.weight"].shape == (61, 32)
    assert len(weights) == len(set(weights))
    assert "rope_table.inv_freq" in weights


def test_equal_weights_under_two_names_are_stored_once(llama: Path, tmp_path: Path) -> None:
    """The last norm points at the bits of another norm."""
    folder = Path(shutil.copytree(llama, tmp_path / "c"))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    norms = [each for each in model.graph.initializer if list(each.dims) == [32] and "norm" in each.name]
    places = [{entry.key: entry for entry in each.external_data} for each in norms]
    places[-1]["offset"].value = places[0]["offset"].value
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    plans = [build_ref(source, tmp_path / "e", dry_run=True).plan for source in (llama, folder)]
    assert [len(plan.weights) for plan in plans] == [len(plans[0].weights), len(plans[0].weights) - 1]
    used = Counter(
        name for step in plans[1].steps if step.op == "rms_norm" for name in step.inputs if ".weight" in name
    )
    assert sorted(used.values()) == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("stored", "precision", "kv", "expected"),
    [
        (DType.BF16, "auto", "auto", ("bf16", "bf16")),
        (DType.F16, "auto", "auto", ("bf16", "bf16")),
        (DType.F32, "auto", "auto", ("f32", "f32")),
        (DType.BF16, "f32", "bf16", ("f32", "bf16")),
        (DType.F32, "bf16", "f32", ("bf16", "f32")),
        (DType.F32, "auto", "int8", ("f32", "int8")),
    ],
)
def test_precision(tmp_path: Path, stored: DType, precision: str, kv: str, expected: tuple[str, str]) -> None:
    checkpoint = make_checkpoint(tmp_path, LLAMA, stored)
    report = build_ref(checkpoint, tmp_path / "e", precision=precision, kv_cache_dtype=kv)
    assert (report.precision, report.plan.caches[0].dtype.value) == expected
    kernels = Counter(step.kernel for step in report.plan.steps)
    assert kernels[f"matmul.{expected[0]}.ref"] == 9
    assert kernels[f"paged_attention.{expected[1]}.ref"] == kernels[f"rope_kv_write.{expected[1]}.ref"] == 2
    with open_engine(tmp_path / "e") as engine:
        assert engine.manifest.model["kv_cache_dtype"] == engine.plan.caches[0].dtype.value == expected[1]
    assert kernels["rms_norm.f32.ref"] == 5
    assert any("most weights are stored in" in note for note in report.notes) == (precision == "auto")


def test_manifest(llama: Path, tmp_path: Path) -> None:
    report = build_ref(llama, tmp_path / "e", max_batch_size=5)
    with open_engine(tmp_path / "e") as engine:
        manifest = engine.manifest
    assert manifest.target == "ref"
    assert manifest.limits == report.plan.limits
    assert manifest.limits.max_batch_size == 5
    assert (manifest.eos_ids, manifest.bos_id, manifest.pad_id) == ((2,), 1, None)
    facts = {"model_type": "llama", "layers": 2, "hidden_size": 32, "heads": 4, "kv_heads": 2, "vocab_size": 61}
    assert facts.items() <= manifest.model.items()
    assert {part.name for part in manifest.parts} == {"rank0.engine", "generation_config.json"}
    assert report.engine_bytes == (tmp_path / "e/rank0.engine").stat().st_size


def test_several_end_tokens(llama: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "c"))
    (other / "generation_config.json").write_text('{"eos_token_id": [2, 7], "pad_token_id": 0}')
    build_ref(other, tmp_path / "e")
    with open_engine(tmp_path / "e") as engine:
        assert (engine.manifest.eos_ids, engine.manifest.bos_id, engine.manifest.pad_id) == ((2, 7), None, 0)


def test_files_in_folders_come_along(llama: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(llama, tmp_path / "c"))
    (other / "additional_chat_templates").mkdir()
    (other / "additional_chat_templates" / "tool.jinja").write_text("{{ x }}")
    build_ref(other, tmp_path / "e")
    assert (tmp_path / "e/additional_chat_templates/tool.jinja").read_text() == "{{ x }}"
    open_engine(tmp_path / "e").close()


def test_dry_run_writes_nothing(llama: Path, tmp_path: Path) -> None:
    report = build_ref(llama, tmp_path / "e", dry_run=True)
    assert report.dry_run
    assert report.plan.weight_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_progress_reaches_its_end(llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    build(BuildConfig(target="ref"), llama, tmp_path / "e", lambda *each: seen.append(each))
    assert [done for _, done, _ in seen] == sorted({done for _, done, _ in seen})
    assert seen[-1][1] == seen[-1][2]


def test_weights_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][1].reshape(-1)[:3] = np.array([np.nan, np.inf, 1], np.float32)
    model = write_model(tmp_path / "m", TINY_LLAMA, tensors=tensors)
    convert(ConvertOptions(model_dir=model, output_dir=tmp_path / "c"))
    notes = build_ref(tmp_path / "c", tmp_path / "e").notes
    assert "weight layers.1/gate_up.weight holds 2 values that are NaN or infinite" in notes


def test_an_earlier_engine_is_replaced_and_nothing_else(llama: Path, tmp_path: Path) -> None:
    build_ref(llama, tmp_path / "e")
    (tmp_path / "e" / "rank0.engine").write_bytes(b"")
    build_ref(llama, tmp_path / "e")
    open_engine(tmp_path / "e").close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match="holds something else"):
        build_ref(llama, tmp_path / "other")
    assert (tmp_path / "other" / "thesis.txt").exists()


def truncate(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def change_op(old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        next(node for node in model.graph.node if node.op_type == old).op_type = new
        (folder / "model.onnx").write_bytes(model.SerializeToString())

    return damage


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (lambda folder: shutil.rmtree(folder), CheckpointError, "no such Checkpoint"),
        (remove("model.onnx"), CheckpointError, "has no model.onnx"),
        (truncate("model.onnx"), CheckpointError, "cannot be read"),
        (remove("model.safetensors"), CheckpointError, r"bytes that are not there(.|\n)*no such file"),
        (truncate("model.safetensors"), CheckpointError, "is not the one that was converted"),
        (write("config.json", '{"schema_version": 99}'), CheckpointError, "another version of ingot"),
        (write("generation_config.json", '{"eos_token_id": "x"}'), IngotError, "eos_token_id"),
        (change_op("Sigmoid", "HardSigmoid"), PassError, r"were not replaced by any pass(.|\n)*HardSigmoid"),
        (change_op("Attention", "Strange"), PassError, r"were not replaced by any pass(.|\n)*Strange"),
    ],
)
def test_a_failed_build_leaves_nothing(
    llama: Path, tmp_path: Path, damage: Callable[[Path], None], kind: type[IngotError], words: str
) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "in" / "c"))
    damage(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(kind, match=words):
        build_ref(folder, tmp_path / "out" / "e")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("seed", range(24))
def test_a_malformed_graph_is_refused_in_words(llama: Path, tmp_path: Path, seed: int) -> None:
    """Flipped bits may spoil a name that means nothing; whatever else they spoil raises our own errors."""
    folder = Path(shutil.copytree(llama, tmp_path / "c"))
    data, chosen = bytearray((folder / "model.onnx").read_bytes()), random.Random(seed)
    for _ in range(3):
        data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
    (folder / "model.onnx").write_bytes(data)
    with contextlib.suppress(IngotError):
        build_ref(folder, tmp_path / "e")


def test_weights_that_do_not_fit_are_refused(llama: Path, tmp_path: Path) -> None:
    """The graph swaps the two tables' sizes: every initialiser is there, but no product is possible."""
    folder = Path(shutil.copytree(llama, tmp_path / "c"))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    table = next(each for each in model.graph.initializer if list(each.dims) == [61, 32])
    table.dims[:] = [32, 61]
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(PassError, match=r"does not fit op rms_norm(.|\n)*weight has shape \(32,\) instead of \(61,\)"):
        build_ref(folder, tmp_path / "e")


def test_a_full_disk_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    """The process may write no file beyond 1 MB: the engine's needs more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(CapacityError, match="disk is full"):
            build_ref(llama, tmp_path / "e")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_dumps_that_cannot_be_written_are_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot be dumped"):
        build_ref(llama, tmp_path / "e", dump_passes=tmp_path / "file" / "dumps")


def test_a_pass_says_why_it_refused(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "c"))
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    attention = next(node for node in model.graph.node if node.op_type == "Attention")
    next(each for each in attention.attribute if each.name == "is_causal").i = 0
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(PassError, match="insert_paged_attention: the attention is not causal"):
        build_ref(folder, tmp_path / "e")


def test_memory_that_is_not_there_is_refused_at_once(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"more memory than --max_mem allows(.|\n)*64 MiB"):
        build_ref(llama, tmp_path / "e", max_mem=64 << 20)
    assert build_ref(llama, tmp_path / "e", max_mem=1 << 30).memory < 1 << 30
    fewer, more = (build_ref(llama, tmp_path / "e", workers=workers, dry_run=True).memory for workers in (1, 99))
    assert fewer < more, "each thread has blocks of its own"
    with pytest.raises(UsageError, match="workers must be a whole number, at least 1"):
        BuildConfig(workers=0)


def test_an_unknown_target_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no target 'cpu/sse'(.|\n)*ref"):
        build(BuildConfig(target="cpu/sse"), llama, tmp_path / "e")


def test_limits_beyond_the_model_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at most 65"):
        build_ref(llama, tmp_path / "e", max_seq_len=66)


def test_the_config_of_a_hugging_face_model_gets_a_hint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        build_ref(write_model(tmp_path / "m", json.loads(json.dumps(TINY_LLAMA))), tmp_path / "e")
    assert "convert" in str(error.value.hint)
