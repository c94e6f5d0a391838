"""What a target that compiles the graph gets: every node, with weights by the names that the plan stores them under."""

import dataclasses
from pathlib import Path

import pytest

from ingot.builder.plan_targets import TargetBuild, plan_targets
from ingot.checkpoint import Checkpoint
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.plan import Rows
from ingot.plugins.op_graph import IDS, OpGraph
from ingot.plugins.registry import find_targets
from tests.handmade import write_model

FAMILIES = ("llama", "gpt2", "gemma3_text")  # gates; learned positions; two tables of angles


def _builds(folder: Path, family: str, targets: str, precision: str = "f32") -> list[TargetBuild]:
    write_model(folder / "m", dict(find_family(family).tiny))
    convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c"))
    config = BuildConfig(target=targets, precision=precision, dry_run=True)
    return plan_targets(config, Checkpoint.open(folder / "c"), find_targets(targets), lambda what, done, total: None)


def _graph(folder: Path, family: str) -> tuple[OpGraph, TargetBuild]:
    (built,) = _builds(folder, family, "tensorrt-rtx/sm89")
    assert built.graph is not None
    return built.graph, built


@pytest.mark.parametrize("family", FAMILIES)
def test_every_input_is_there_before_it_is_read(family: str, tmp_path: Path) -> None:
    graph, built = _graph(tmp_path, family)
    stored = {weight.name for weight in built.plan.weights}
    assert set(graph.weights()) == stored
    known = {IDS, ""} | stored
    for node in graph.nodes:
        assert set(node.inputs) <= known, node.name
        known |= set(node.outputs)
    assert graph.logits == graph.nodes[-1].outputs[0]
    last = graph.activations[graph.logits]
    assert (last.rows, last.cols) == (Rows.LOGITS, built.plan.vocab_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_are_those_of_the_plan_by_name(family: str, tmp_path: Path) -> None:
    """But that an attention is one node, and two steps; attributes are those of the steps."""
    graph, built = _graph(tmp_path, family)
    steps = {step.name: step for step in built.plan.steps}
    assert [node.name for node in graph.nodes] == [name for name in steps if not name.endswith("/rope_kv_write")]
    for node in graph.nodes:
        step = steps[node.name]
        assert step.attrs.items() <= node.attrs.items()
        if node.op == "PagedAttention":
            write = steps[node.name.replace("/attention", "/rope_kv_write")]
            assert write.attrs.items() <= node.attrs.items()
            assert [name for name in write.inputs if name in graph.weights()] == [
                name for name in node.inputs if name in graph.weights()
            ]
        else:
            assert [name for name in step.inputs if name in graph.weights()] == [
                name for name in node.inputs if name in graph.weights()
            ]
    assert len({name for node in graph.nodes for name in node.outputs}) == len(graph.activations)


def test_absent_inputs_and_defaults_are_filled_in(tmp_path: Path) -> None:
    graph, _ = _graph(tmp_path, "llama")
    embedding, *_ = graph.of("Embedding")
    assert (embedding.inputs[0], embedding.inputs[2]) == (IDS, "")
    attention, *_ = graph.of("PagedAttention")
    assert attention.inputs[2:] == ("", "")
    product, *_ = graph.of("Matmul")
    assert product.inputs[2:] == ("", "")
    assert product.attrs["group"] == 0


def test_a_weight_that_two_nodes_read_has_one_name(tmp_path: Path) -> None:
    """The table of a model whose head is tied to it."""
    graph, built = _graph(tmp_path, "gemma2")
    embedding, *_ = graph.of("Embedding")
    (head,) = (node for node in graph.of("Matmul") if node.name == "lm_head")
    assert embedding.inputs[1] == head.inputs[1]
    assert [weight.name for weight in built.plan.weights].count(head.inputs[1]) == 1


def test_targets_that_run_the_plan_get_no_graph(tmp_path: Path) -> None:
    """And what is decided for a later target does not change an earlier one's graph."""
    (alone,) = _builds(tmp_path / "alone", "llama", "tensorrt-rtx/sm89", "bf16")
    both = _builds(tmp_path / "both", "llama", "tensorrt-rtx/sm89,ref", "bf16")
    assert [built.graph is None for built in both] == [False, True]
    assert both[0].graph == alone.graph
    assert dataclasses.asdict(both[0].plan) == dataclasses.asdict(alone.plan)
