"""The lowered network computes what `ref` does with the plan, and is made of nothing but the ops it says."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest

from ingot.builder.build import build
from ingot.configs.build import BuildConfig
from ingot.configs.convert import ConvertOptions
from ingot.convert.convert import convert
from ingot.convert.family import find_family
from ingot.dtypes import from_float32
from ingot.engine import open_engine
from ingot.errors import BuildError, NoKernelError
from ingot.plan import Plan
from ingot.plugins.op_graph import OpGraph
from ingot.plugins.ref.session import RefSession
from ingot.plugins.ref.weights import read_weight
from ingot.plugins.target import SessionOptions
from ingot.plugins.tensorrt.handover import hand_over, take_over
from ingot.plugins.tensorrt.layers import expected_network
from ingot.plugins.tensorrt.lowering import OPS, lower
from ingot.plugins.tensorrt.tensors import LOGITS, pools, require_lengths, step_inputs, weights
from ingot.step_io import StepBatch
from tests.families import covering_families
from tests.handmade import write_model
from tests.plugins.cpu.one_step import batch_of, in_groups
from tests.plugins.gpu_families import TENSORRT_REFUSES
from tests.plugins.tensorrt.network import NumpyAttention, decided, evaluator
from tests.spanning import often

TOLERANCE = {"f32": 1e-5, "bf16": 3e-2}  # of the range of the logits
BLOCKS = 6
STEPS = [  # (past, new) of each sequence, their blocks, the wanted rows
    ([(0, 5), (0, 19)], [[3], [1, 4]], [4, 20, 23]),
    ([(5, 1), (19, 7)], [[3], [1, 4]], [0, 7]),
    ([(6, 1), (26, 1), (0, 3)], [[3], [1, 4], [2]], [0, 1, 4]),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Built:
    """graph, plan: for TensorRT; ref: the same model for the target `ref`, with its weights section."""

    checkpoint: Path
    graph: OpGraph
    plan: Plan
    ref: Plan
    section: npt.NDArray[np.uint8]


def built_model(folder: Path, family: str, precision: str) -> Built:
    write_model(folder / "m", dict(find_family(family).tiny))
    convert(ConvertOptions(model_dir=folder / "m", output_dir=folder / "c"))
    config = BuildConfig(target="ref", precision=precision, tokens_per_block=16, max_batch_size=4)
    build(config, folder / "c", folder / "e")
    dry = dataclasses.replace(config, target="tensorrt-rtx/sm89", dry_run=True)
    graph, plan = decided(dry, folder / "c")
    opened = open_engine(folder / "e")
    return Built(checkpoint=folder / "c", graph=graph, plan=plan, ref=opened.plan, section=opened.weights)


def network_weights(built: Built) -> dict[str, npt.NDArray[np.generic]]:
    """Inputs of the network."""
    stored = {weight.name: weight for weight in built.ref.weights}
    found = {}
    for each in weights(built.plan):
        values = read_weight(built.section, stored[each.name])
        assert isinstance(values, np.ndarray)
        bits = from_float32(np.ascontiguousarray(values), each.dtype).reshape(values.shape)
        found[each.name] = bits.view(onnx.helper.tensor_dtype_to_np_dtype(each.dtype.onnx))
    return found


def step_arrays(plan: Plan, batch: StepBatch) -> dict[str, npt.NDArray[np.generic]]:
    """What the reference needs of a step's integers, zeros for what only kernels read."""
    new = np.diff(batch.query_starts)
    owner = np.repeat(np.arange(len(new), dtype=np.int32), new)
    positions = batch.past_lengths[owner] + np.arange(len(batch.ids)) - batch.query_starts[:-1][owner]
    arrays: dict[str, npt.NDArray[np.generic]] = {
        each.name: np.zeros([1 if not isinstance(dim, int) else dim for dim in each.shape], np.int32)
        for each in step_inputs(plan)
    }
    arrays |= {"ids": batch.ids, "positions": positions.astype(np.int32), "sequences": owner, "rows": batch.logit_rows}
    pool = {
        each.name: np.zeros(
            [1 if not isinstance(dim, int) else dim for dim in each.shape],
            onnx.helper.tensor_dtype_to_np_dtype(each.dtype.onnx),
        )
        for each in pools(plan)
    }
    return arrays | pool


def _compare(built: Built, precision: str) -> None:
    attention = NumpyAttention(built.plan, BLOCKS)
    network = evaluator(lower(built.graph, built.plan), attention)
    ref = RefSession(built.ref, built.section, SessionOptions(num_blocks=built.ref.in_each(BLOCKS)))
    given = network_weights(built)
    for number, (lengths, tables, rows) in enumerate(STEPS):
        ids = (np.arange(sum(new for _, new in lengths), dtype=np.int32) * 7 + number) % built.plan.vocab_size
        attention.batch = batch_of(lengths, tables, rows, ids=ids, want_logits=True)
        expected = ref.run(in_groups(attention.batch, built.ref)).logits
        assert expected is not None
        made = network.run([LOGITS], {**given, **step_arrays(built.plan, attention.batch)})
        (found,) = map(np.asarray, made)
        assert found.dtype == np.float32
        assert np.abs(found - expected).max() < TOLERANCE[precision] * np.ptp(expected)


@pytest.mark.daily(3)
@pytest.mark.parametrize("family", covering_families(TENSORRT_REFUSES))
def test_every_family_computes_what_ref_does(family: str, tmp_path: Path) -> None:
    built = built_model(tmp_path, family, "f32")
    _compare(built, "f32")
    model = lower(built.graph, built.plan)
    used = Counter(node.op_type for node in model.graph.node)
    assert set(used) <= set(OPS)
    assert used["Gemm"] == expected_network(built.graph)["MATRIX_MULTIPLY"]
    assert used["IngotAttention"] == built.plan.num_layers
    assert len(model.SerializeToString()) < 100_000, "weights are inputs"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_sixteen_bits(family: str, tmp_path: Path) -> None:
    """Products take and give bf16; all between them is float32."""
    built = built_model(tmp_path, family, "bf16")
    _compare(built, "bf16")


@pytest.mark.daily(1)
@pytest.mark.parametrize("family", often(TENSORRT_REFUSES, covering_families()))
def test_ops_without_kernels_are_refused(family: str, tmp_path: Path) -> None:
    words = r"no kernel (for op (moe_|causal_conv|head_matmul)|that takes attention sinks|for (\w+ that|layers whose))"
    with pytest.raises(NoKernelError, match=words):
        built_model(tmp_path, family, "f32")


def test_angles_are_the_plugins_own(tmp_path: Path) -> None:
    """Native cosines may be fast and coarse: the plugin gets positions and frequencies, and a kernel is exact."""
    built = built_model(tmp_path, "gemma3_text", "f32")
    model = lower(built.graph, built.plan)
    attentions = [node for node in model.graph.node if node.op_type == "IngotAttention"]
    frequencies = {node.input[9] for node in attentions}
    assert len(frequencies) == 2, "windows rotate by another base"
    assert all("inv_freq" in name for name in frequencies)
    assert {node.input[3] for node in attentions} == {"positions"}
    readers = [node.op_type for node in model.graph.node if frequencies & {*node.input}]
    assert set(readers) == {"IngotAttention"}


def test_a_step_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """Before the builder is asked: it would say so in its own words, later."""
    built = built_model(tmp_path, "llama", "f32")
    require_lengths(built.graph, built.plan.limits)
    for name, word in (("max_num_tokens", "a smaller max_num_tokens"), ("max_logit_rows", "at most")):
        large = dataclasses.replace(built.plan.limits, **{name: 1 << 26})
        with pytest.raises(BuildError, match="larger than TensorRT's may be") as caught:
            require_lengths(built.graph, large)
        assert word in str(caught.value)
        assert name in str(caught.value)


def test_a_product_of_gate_and_up_has_twice_the_columns(tmp_path: Path) -> None:
    """Before its halves are multiplied it is the widest tensor of a layer."""
    built = built_model(tmp_path, "llama", "f32")
    (gated, *_) = (node for node in built.graph.of("Matmul") if node.attrs["gated"])
    made = {name: dataclasses.replace(built.graph.activations[name], cols=1 << 16) for name in gated.outputs}
    wide = dataclasses.replace(built.graph, activations={**built.graph.activations, **made})
    for tokens, fits in (((1 << 14) - 1, True), (1 << 14, False)):
        limits = dataclasses.replace(built.plan.limits, max_num_tokens=tokens)
        with contextlib.nullcontext() if fits else pytest.raises(BuildError, match=gated.name):
            require_lengths(wide, limits)


def test_an_unknown_op_is_refused(tmp_path: Path) -> None:
    built = built_model(tmp_path, "llama", "f32")
    strange = dataclasses.replace(built.graph.nodes[0], op="MoeRoute")
    graph = dataclasses.replace(built.graph, nodes=(*built.graph.nodes, strange))
    with pytest.raises(BuildError, match="do not support MoeRoute"):
        lower(graph, built.plan)


def test_the_steps_of_the_plan_are_not_read(tmp_path: Path) -> None:
    """But for what sessions read there too: which layers there are, with how many heads, and types of weights."""
    built = built_model(tmp_path, "gemma2", "bf16")
    kept = [step for step in built.plan.steps if step.op in ("paged_attention", "embedding")]
    bare = dataclasses.replace(built.plan, steps=tuple(kept), buffers=(), logits="nowhere")
    assert lower(built.graph, bare) == lower(built.graph, built.plan)


def test_what_is_handed_over_is_taken_over(tmp_path: Path) -> None:
    built = built_model(tmp_path, "gemma3_text", "bf16")
    hand_over(built.graph, built.plan, tmp_path)
    assert take_over(tmp_path) == (built.graph, built.plan)
    (tmp_path / "graph.json").write_text("[]")
    with pytest.raises(BuildError, match="the graph to compile cannot be read"):
        take_over(tmp_path)


@pytest.mark.slow
def test_only_the_process_that_compiles_reads_onnx() -> None:
    """A command that runs an engine looks up its target, and would wait for the import."""
    said = "import sys; from ingot.plugins.registry import targets; targets(); print('onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True, env=_environment())
    assert done.stdout == "False\n"


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
