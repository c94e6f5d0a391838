"""Names of steps say the layer of the model that they are part of."""

from pathlib import Path

from ingot.builder.graph import Graph
from ingot.builder.names import name_nodes
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.convert.families import falcon_h1
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
