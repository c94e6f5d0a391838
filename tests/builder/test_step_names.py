"""Names of steps say the layer of the model that they are part of."""

from pathlib import Path

import pytest

from ingot.builder.graph import Graph
from ingot.builder.names import name_nodes
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.convert.families import bitnet, bloom, falcon_h1, nanochat
from ingot.convert.family import Family
from tests.e2e.same_bits import random_checkpoint


def test_attention_and_mamba_of_one_norm_are_one_layer(tmp_path: Path) -> None:
    """Falcon H1: each reads the norm through a factor of its own. Its gate has one too, and is fused all the same."""
    graph = Graph.load(random_checkpoint(tmp_path, falcon_h1.FAMILY.tiny) / "model.onnx")
    run_passes(graph, structure_passes())
    name_nodes(graph)
    names = [node.name for node in graph.nodes]
    for layer in range(2):
        for name in ("linear_norm", "linear_attention", "attention", "qkv", "gate_up"):
            assert names.count(f"layers.{layer}/{name}") == 1
    assert not [name for name in names if name.startswith("layers.2/")]


def test_norms_inside_attention_and_mlp_are_no_others(tmp_path: Path) -> None:
    graph = Graph.load(random_checkpoint(tmp_path, bitnet.FAMILY.tiny) / "model.onnx")
    run_passes(graph, structure_passes())
    name_nodes(graph)
    names = {node.name for node in graph.nodes}
    for layer in range(2):
        steps = ("attention_norm", "qkv", "attention", "attention_inner_norm", "attention_out")
        assert {f"layers.{layer}/{name}" for name in (*steps, "mlp_norm", "gate_up", "mlp_inner_norm", "down")} <= names
    assert not [name for name in names if "." in name.partition("/")[2]], "each role has one step"


@pytest.mark.parametrize("family", [bloom.FAMILY, nanochat.FAMILY], ids=["bloom", "nanochat"])
def test_the_norm_of_embeddings_is_of_no_layer(tmp_path: Path, family: Family) -> None:
    graph = Graph.load(random_checkpoint(tmp_path, family.tiny) / "model.onnx")
    run_passes(graph, structure_passes())
    name_nodes(graph)
    names = [node.name for node in graph.nodes]
    for name in ("embedding_norm", "layers.0/attention_norm", "layers.0/mlp_norm"):
        assert names.count(name) == 1
    assert not [name for name in names if "." in name.partition("/")[2]], "each role has one step"
