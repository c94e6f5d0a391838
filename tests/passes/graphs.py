"""Small graphs by hand, and what a graph computes: standard ops by ONNX's evaluator, plugins by their references.

g = GraphMaker(hidden=8)
x = g.input()                                    ids → rows of a random table, so that every graph has token ids
y = g.node("RMSNormalization", x, g.weight(8))
graph = g.finish(y)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ingot.builder.graph import Graph
from ingot.builder.passes.base import Pass, PassReport
from ingot.builder.select import plan_ops
from ingot.dtypes import DType
from ingot.plan import CacheGroup
from ingot.plugins.op import Array, Call, KvCache
from ingot.plugins.registry import find_op
from ingot.step_io import StepBatch
from tests.plugins.ops.calls import with_arrays

VOCAB = 11
IDS = np.random.default_rng(5).integers(0, VOCAB, (2, 7))


class GraphMaker:
    """Appends nodes; every method returns the name of a value."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def weight(self, *shape: int) -> str:
        """A random float32 initialiser."""
        return self.constant(self._random.normal(0, 0.5, shape).astype(np.float32))

    def constant(self, values: npt.ArrayLike) -> str:
        name = f"c{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, op: str, *inputs: str, outputs: int = 1, **attrs: Any) -> str:
        """The first output; the others are called `<first>.1`, ..."""
        first = f"n{len(self._nodes)}"
        names = [first, *(f"{first}.{i}" for i in range(1, outputs))]
        self._nodes.append(helper.make_node(op, inputs, names, f"node {first}", None, None, None, **attrs))
        return first

    def input(self, hidden: int = 8) -> str:
        """Activations [batch, sequence, hidden] that depend on the token ids."""
        return self.node("Gather", self.weight(VOCAB, hidden), "ids", axis=0)

    def linear(self, x: str, size_in: int, size_out: int, *, bias: bool = False) -> str:
        y = self.node("MatMul", x, self.node("Transpose", self.weight(size_out, size_in), perm=[1, 0]))
        return self.node("Add", y, self.weight(size_out)) if bias else y

    def positions(self, limit: int = 64) -> str:
        """int64 [batch, sequence]"""
        shape = self.node("Shape", "ids")
        length = self.node("Gather", shape, self.constant(np.int64(1)), axis=0)
        counted = self.node("Range", self.constant(np.int64(0)), length, self.constant(np.int64(1)))
        bounded = self.node("Min", counted, self.constant(np.int64(limit - 1)))
        return self.node("Expand", self.node("Unsqueeze", bounded, self.constant([0])), shape)

    def window(self, size: int, *, limit: int | None = None, axes: tuple[int, int] = (1, 0)) -> str:
        """bool [sequence, sequence]: row - column < size. limit: clips the positions."""
        return self.node("Less", self.distance(limit=limit, axes=axes), self.constant(np.int64(size)))

    def distance(self, *, limit: int | None = None, axes: tuple[int, int] = (1, 0)) -> str:
        """int64 [sequence, sequence]: row - column."""
        length = self.node("Gather", self.node("Shape", "ids"), self.constant(np.int64(1)), axis=0)
        turns = self.node("Range", self.constant(np.int64(0)), length, self.constant(np.int64(1)))
        if limit is not None:
            turns = self.node("Min", turns, self.constant(np.int64(limit - 1)))
        row, column = (self.node("Unsqueeze", turns, self.constant([axis])) for axis in axes)
        return self.node("Sub", row, column)

    def angles(self, half: int, limit: int = 64, scale: float = 1.0) -> tuple[str, str]:
        """cos and sin, each [batch, sequence, half]"""
        turns = self.node("Cast", self.positions(limit), to=TensorProto.FLOAT)
        frequencies = self.constant((10.0 ** -np.arange(half)).astype(np.float32))
        angle = self.node("Mul", self.node("Unsqueeze", turns, self.constant([-1])), frequencies)
        both = [self.node(op, angle) for op in ("Cos", "Sin")]
        if scale != 1.0:
            both = [self.node("Mul", each, self.constant(np.float32(scale))) for each in both]
        return both[0], both[1]

    def heads(self, x: str, heads: int, dim: int) -> str:
        """[batch, sequence, heads * dim] → [batch, heads, sequence, dim]"""
        split = self.node("Reshape", x, self.constant([0, 0, heads, dim]))
        return self.node("Transpose", split, perm=[0, 2, 1, 3])

    def attention(self, sources: Sequence[str], heads: int, kv_heads: int, dim: int, **options: Any) -> str:
        """options: angles (cos, sin), attributes of RotaryEmbedding under `rotary`, norms ("head" or "width") of q and
        k, mask; the rest goes to Attention."""
        norms, mask = options.pop("norms", None), options.pop("mask", None)
        if norms == "width":
            normed = [
                self.node("RMSNormalization", x, self.weight(n * dim), axis=-1, epsilon=0.25)
                for x, n in zip(sources, (heads, kv_heads), strict=False)
            ]
            sources = [*normed, sources[2]]
        q, k, v = (self.heads(x, n, dim) for x, n in zip(sources, (heads, kv_heads, kv_heads), strict=True))
        if norms == "head":
            q, k = (self.node("RMSNormalization", x, self.weight(dim), axis=-1, epsilon=0.25) for x in (q, k))
        angles, rotary = options.pop("angles", None), options.pop("rotary", {})
        if angles is not None:
            q, k = (self.node("RotaryEmbedding", each, *angles, **rotary) for each in (q, k))
        mixed = self.node("Attention", q, k, v, *([mask] if mask else []), **{"is_causal": 1, **options})
        rows = self.node("Transpose", mixed, perm=[0, 2, 1, 3])
        return self.node("Reshape", rows, self.constant([0, 0, heads * dim]))

    def finish(self, output: str) -> Graph:
        """The graph whose logits are `output`."""
        graph = helper.make_graph(
            self._nodes,
            "handmade",
            [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", "sequence", None])],
            self._initializers,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
        return Graph(gs.import_onnx(model))


def evaluate(graph: Graph, ids: npt.NDArray[np.int64] = IDS) -> Array:
    """The logits of the graph as it is, [batch, sequence, vocab]."""
    return evaluate_model(gs.export_onnx(graph.surgeon, do_type_check=False), ids)


def evaluate_model(model: onnx.ModelProto, ids: npt.NDArray[np.int64]) -> Array:
    """The logits of a model whose nodes are standard ops or plugins."""
    used = sorted({node.op_type for node in model.graph.node if node.domain == "ingot"})
    evaluator = ReferenceEvaluator(model, new_ops=[_op_run(op, ids) for op in used])
    result: Array = evaluator.run(None, {model.graph.input[0].name: ids})[0]  # type: ignore[index]
    return result


def run_pass(each: Pass, graph: Graph) -> PassReport:
    """Run a pass and check that the graph computes what it did."""
    before = evaluate(graph)
    report = each.run(graph)
    np.testing.assert_allclose(evaluate(graph), before, rtol=1e-4, atol=1e-5)
    return report


def ops_of(graph: Graph) -> list[str]:
    """The ops in execution order, weight expressions left out."""
    return [node.op for node in graph.nodes if node.op not in ("Transpose", "Concat", "Cast")]


def _op_run(plugin: str, ids: npt.NDArray[np.int64]) -> type[OpRun]:
    """A class that computes one plugin for these token ids."""

    def run(self: OpRun, *inputs: npt.NDArray[Any] | None, **attrs: Any) -> tuple[Array, ...]:
        attrs = {each.name: helper.get_attribute_value(each) for each in self.onnx_node.attribute}
        attrs = {name: value.decode() if isinstance(value, bytes) else value for name, value in attrs.items()}
        results = _compute(plugin, inputs, attrs, ids)
        return tuple(results[: len(self.onnx_node.output)])

    return type(plugin, (OpRun,), {"op_domain": "ingot", "_run": run})


def _compute(
    plugin: str, inputs: Sequence[npt.NDArray[Any] | None], attrs: dict[str, Any], ids: npt.NDArray[np.int64]
) -> list[Array]:
    if plugin == "GatherRows":  # every row is wanted here
        assert inputs[0] is not None, "GatherRows has an input"
        return [inputs[0]]
    given = inputs[1:] if plugin == "Embedding" else inputs
    flat = [None if x is None else x.reshape(-1, x.shape[-1]) if x.shape[:2] == ids.shape else x for x in given]
    batch, kv = _batch(ids), _cache(attrs, ids)
    defaults = {"activations": "f32"} if any(find_op(each).packed is not None for each in plan_ops(plugin)) else {}
    for op_name in plan_ops(plugin):
        op = find_op(op_name)
        count = len(op.inputs) - len(op.batch_inputs)
        padded = [*flat, *[None] * (count - len(flat))][:count]
        usual = {name: value for name, value in op.attrs.items() if not isinstance(value, type)}
        known = {name: value for name, value in {**usual, **defaults, **attrs}.items() if name in op.attrs}
        operands = with_arrays(op, padded, batch)
        results = op.reference(Call(inputs=operands, attrs=known, batch=batch, kv=[kv]))
        flat = [results[0], *flat[count:]]
    of_any_shape = plugin in ("RmsNorm", "Activation")
    shape = inputs[0].shape[:-1] if inputs[0] is not None and of_any_shape else ids.shape
    return [result.reshape(*shape, -1) for result in results]


def _batch(ids: npt.NDArray[np.int64]) -> StepBatch:
    """Every row of ids is one sequence with one block of its own."""
    count, length = ids.shape
    return StepBatch(
        ids=ids.reshape(-1).astype(np.int32),
        query_starts=np.arange(count + 1, dtype=np.int32) * length,
        past_lengths=np.zeros(count, np.int32),
        block_tables=np.arange(count, dtype=np.int32)[None, :, None],
        logit_rows=np.arange(ids.size, dtype=np.int32),
        slots=np.full(count, -1, np.int32),
        draws=np.empty(0, np.int32),
    )


def _cache(attrs: dict[str, Any], ids: npt.NDArray[np.int64]) -> KvCache:
    layout = CacheGroup(
        layers=tuple(range(attrs.get("layer", 0) + 1)),
        kv_heads=attrs.get("kv_heads", 1),
        head_dim=attrs.get("head_dim", 4),
        tokens_per_block=16 * -(-ids.shape[1] // 16),
        dtype=DType.F32,
    )
    return KvCache(layout, num_blocks=len(ids))
