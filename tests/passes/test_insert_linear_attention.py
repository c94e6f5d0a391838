"""insert_linear_attention: fires on the Graph that convert writes; another body of the Scan stays, with the reason."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ingot.builder.graph import Graph, producer
from ingot.builder.passes import insert_linear_attention
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.cli.app import group
from ingot.convert.families.qwen3_5_text import FAMILY


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta")
    (folder / "config.json").write_text(json.dumps(FAMILY.tiny))
    options = ["--config", str(folder / "config.json"), "--random_weights", "1", "--output_dir", str(folder / "c")]
    result = CliRunner().invoke(group, ["convert", *options])
    assert result.exit_code == 0, result.output
    return folder / "c"


def test_it_fires(checkpoint: Path) -> None:
    graph = Graph.load(checkpoint / "model.onnx")
    run_passes(graph, structure_passes())
    ops = [node.op for node in graph.nodes if node.domain == "ingot"]
    assert [ops.count(op) for op in ("CausalConv", "LinearAttention", "GatedNorm", "SigmoidGate")] == [2, 2, 2, 1]
    assert all(node.attrs["activation"] == "silu" for node in graph.plugins("CausalConv"))


def test_another_recurrence_stays(checkpoint: Path) -> None:
    graph = Graph.load(checkpoint / "model.onnx")
    scan = next(node for node in graph.nodes if node.op == "Scan")
    difference = next(node for node in scan.attrs["body"].nodes if node.op == "Sub")
    difference.op = "Add"
    assert producer(scan.outputs[1]) is scan
    (report,) = run_passes(graph, [insert_linear_attention.PASS])
    assert report.refused["the scan does not compute the gated delta rule"] == 1
