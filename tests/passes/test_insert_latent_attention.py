"""insert_latent_attention: fires on the Graph that convert writes; anything else stays, with the reason."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from ingot.builder.graph import Graph
from ingot.builder.passes import insert_latent_attention
from ingot.builder.pipeline import run_passes, structure_passes
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.families import deepseek_v2, deepseek_v3, mistral4

OPS = ("LatentKvWrite", "HeadMatmul", "LatentAttention", "HeadMatmul")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    (folder / "config.json").write_text(json.dumps(dict(deepseek_v2.FAMILY.tiny)))
    convert(ConvertOptions(config=folder / "config.json", random_weights=1, output_dir=folder / "c"))
    return folder / "c"


def test_it_fires(checkpoint: Path) -> None:
    graph = Graph.load(checkpoint / "model.onnx")
    run_passes(graph, structure_passes())
    ops = [node.op for node in graph.nodes if node.op in OPS]
    assert ops == [*OPS] * 3
    write, mixed = graph.plugins("LatentKvWrite")[1], graph.plugins("LatentAttention")[1]
    cache = {"layer": 1, "heads": 4, "kv_heads": 1, "head_dim": 28, "rank": 20}
    assert write.attrs.items() >= {**cache, "interleaved": 1}.items()
    assert mixed.attrs.items() >= cache.items()
    assert mixed.attrs["scale"] == pytest.approx(20**-0.5)
    assert [node.attrs["kept"] for node in graph.plugins("HeadMatmul")[:2]] == [8, 0]
    assert len(graph.plugins("RopeTable")) == 1


def test_queries_that_grow_with_their_position(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(mistral4.FAMILY.tiny)))
    convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "c"))
    graph = Graph.load(tmp_path / "c" / "model.onnx")
    run_passes(graph, structure_passes())
    written = [(node.attrs["growth"], node.attrs["growth_every"]) for node in graph.plugins("LatentKvWrite")]
    assert written == [(pytest.approx(0.3), 16)] * 3
    other = Graph.load(tmp_path / "c" / "model.onnx")
    next(node for node in other.nodes if node.op == "Floor").op = "Ceil"
    run_passes(other, [*structure_passes()[:3]])
    (report,) = run_passes(other, [insert_latent_attention.PASS])
    assert report.refused["queries and keys are not a latent part and a rotated one"] == 3


def _attention(graph: Graph) -> gs.Node:
    return next(node for node in graph.nodes if node.op == "Attention")


def _not_causal(graph: Graph) -> None:
    _attention(graph).attrs["is_causal"] = 0


def _other_values(graph: Graph) -> None:
    node = _attention(graph)
    node.inputs[2] = graph.insert("Identity", [node.inputs[2]], {}, domain="")[0]


def _capped(graph: Graph) -> None:
    _attention(graph).attrs["softcap"] = 30.0


def _rotated_alone(graph: Graph) -> None:
    key = _attention(graph).inputs[1].inputs[0].inputs[1].inputs[0]
    assert key.op == "RotaryEmbedding"
    key.attrs["interleaved"] = 0


def _other_split(graph: Graph) -> None:
    norm = _attention(graph).inputs[2].inputs[0].inputs[0].inputs[0]
    norm.inputs[0].inputs[0].inputs[1] = gs.Constant("sizes", np.array([8, 20], np.int64))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_not_causal, "the attention is not causal alone"),
        (_other_values, "values are not the first part of the keys"),
        (_capped, "the attention has a cap"),
        (_rotated_alone, "queries and keys are not rotated alike"),
        (_other_split, "do not fit queries"),
    ],
)
def test_it_stays(checkpoint: Path, change: Callable[[Graph], None], reason: str) -> None:
    graph = Graph.load(checkpoint / "model.onnx")
    passes = structure_passes()
    place = next(i for i, each in enumerate(passes) if each is insert_latent_attention.PASS)
    run_passes(graph, passes[:place])
    change(graph)
    (report,) = run_passes(graph, passes[place : place + 1])
    assert report.fired == 2
    assert any(reason in each for each in report.refused), report.refused


def test_biases_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**deepseek_v3.FAMILY.tiny, "attention_bias": True}))
    convert(ConvertOptions(config=tmp_path / "config.json", random_weights=1, output_dir=tmp_path / "c"))
    graph = Graph.load(tmp_path / "c" / "model.onnx")
    run_passes(graph, structure_passes())
    biased = [node for node in graph.plugins("Matmul") if len(node.inputs) > 2 and not node.inputs[2].is_empty()]
    assert len(graph.plugins("LatentAttention")) == 3
    assert len(biased) == 3 * 3, "of the queries' latent, the latent, the output"
