"""insert_linear_attention: fires on the Graph that convert writes; another body of the Scan stays, with the reason."""

import json
from collections.abc import Mapping
from pathlib import Path

import onnx_graphsurgeon as gs
import pytest
from click.testing import CliRunner

from ingot.builder.graph import Graph, producer
from ingot.builder.passes import insert_linear_attention
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.cli.app import group
from ingot.convert.families import granitemoehybrid, kimi_linear, lfm2, qwen3_5_text


def converted(folder: Path, config: Mapping[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    options = ["--config", str(folder / "config.json"), "--random_weights", "1", "--output_dir", str(folder / "c")]
    result = CliRunner().invoke(group, ["convert", *options])
    assert result.exit_code == 0, result.output
    return folder / "c"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tmp_path_factory.mktemp("delta"), qwen3_5_text.FAMILY.tiny)


def test_it_fires(checkpoint: Path) -> None:
    graph = Graph.load(checkpoint / "model.onnx")
    run_passes(graph, structure_passes())
    ops = [node.op for node in graph.nodes if node.domain == "ingot"]
    assert [ops.count(op) for op in ("CausalConv", "LinearAttention", "GatedNorm", "SigmoidGate")] == [2, 2, 2, 1]
    assert all(node.attrs["activation"] == "silu" for node in graph.plugins("CausalConv"))


def test_it_fires_on_short_convolutions(tmp_path: Path) -> None:
    graph = Graph.load(converted(tmp_path, lfm2.FAMILY.tiny) / "model.onnx")
    run_passes(graph, structure_passes())
    convolutions = graph.plugins("CausalConv")
    assert [node.attrs["activation"] for node in convolutions] == ["none", "none"]
    assert [node.attrs["width"] for node in convolutions] == [3, 3]
    assert len(graph.plugins("Activation")) == 2 * 2, "the gates before and behind them"


def test_it_fires_on_mamba_2(tmp_path: Path) -> None:
    graph = Graph.load(converted(tmp_path, granitemoehybrid.FAMILY.tiny) / "model.onnx")
    run_passes(graph, structure_passes())
    (first, second), norms = graph.plugins("LinearAttention"), graph.plugins("GatedNorm")
    assert first.attrs["values_first"] == second.attrs["values_first"] == 1
    assert not first.inputs[2].name
    assert len(first.inputs) == 5, "values are added as they are"
    assert [(node.attrs["norm_first"], node.attrs["columns"]) for node in norms] == [(0, 48), (0, 48)]


def test_it_fires_on_decays_of_dims(tmp_path: Path) -> None:
    graph = Graph.load(converted(tmp_path, kimi_linear.FAMILY.tiny) / "model.onnx")
    run_passes(graph, structure_passes())
    assert [node.attrs["by_dim"] for node in graph.plugins("LinearAttention")] == [1, 1]
    assert [node.attrs["activation"] for node in graph.plugins("GatedNorm")] == ["sigmoid"] * 2
    assert len(graph.plugins("LatentAttention")) == 1
    assert not graph.plugins("LatentKvWrite")[0].inputs[2].name, "nothing rotates"


def test_another_recurrence_stays(checkpoint: Path) -> None:
    graph = Graph.load(checkpoint / "model.onnx")
    scan = next(node for node in graph.nodes if node.op == "Scan")
    difference = next(node for node in scan.attrs["body"].nodes if node.op == "Sub")
    difference.op = "Add"
    assert producer(scan.outputs[1]) is scan
    (report,) = run_passes(graph, [insert_linear_attention.PASS])
    assert report.refused["the scan computes neither the gated delta rule nor that of Mamba 2"] == 1


def test_a_body_that_doubles_its_terms_is_refused_at_once(checkpoint: Path) -> None:
    graph = Graph.load(checkpoint / "model.onnx")
    body = next(node for node in graph.nodes if node.op == "Scan").attrs["body"]
    value = body.outputs[1]
    for number in range(60):
        doubled = gs.Variable(f"doubled{number}")
        body.nodes.append(gs.Node(op="Add", inputs=[value, value], outputs=[doubled]))
        value = doubled
    body.outputs[1] = value
    (report,) = run_passes(graph, [insert_linear_attention.PASS])
    assert report.refused["the scan computes neither the gated delta rule nor that of Mamba 2"] == 1
