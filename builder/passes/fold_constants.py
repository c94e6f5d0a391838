"""Computes what depends on small inline constants alone, and drops Identity.

Uses ONNX's own reference evaluator, so that every standard op folds. Weights are not inline constants: they stay
expressions and are evaluated when they are packed.
"""

import numpy as np
import onnx_graphsurgeon as gs
from onnx.reference import ReferenceEvaluator

from ingot.builder.graph import SMALL, Graph, small_value
from ingot.builder.passes.base import Sweep

_KINDS = "fib"  # float, int, bool
# their results may be far larger than their inputs
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"})


def apply(graph: Graph) -> int:
    """Fold in execution order, so that a folded node makes its users foldable."""
    folded = 0
    for node in graph.nodes:
        if node.domain not in (None, "", "ai.onnx") or len(node.outputs) != 1 or node.outputs[0] is graph.logits:
            continue
        if node.op in ("Identity", "Dropout"):
            value = node.inputs[0]
        elif node.op == "Constant" and isinstance(node.attrs.get("value"), gs.Constant):
            value = node.attrs["value"]
            value.name = f"{node.outputs[0].name}.value"
        else:
            value = _evaluate(graph, node)
        if value is not None:
            graph.redirect(node.outputs[0], value)
            folded += 1
    return folded


def _evaluate(graph: Graph, node: gs.Node) -> gs.Constant | None:
    inputs = [small_value(tensor) for tensor in node.inputs if not tensor.is_empty()]
    if any(value is None or value.dtype.kind not in _KINDS for value in inputs):
        return None
    if node.op in _GROWING or (not inputs and node.op != "Constant"):  # no inputs: e.g. a random generator
        return None
    result = _run(graph, node)
    if not isinstance(result, np.ndarray | np.generic) or result.size > SMALL or result.dtype.kind not in _KINDS:
        return None
    return graph.constant(np.asarray(result))


def _run(graph: Graph, node: gs.Node) -> object:
    tensors = [tensor for tensor in node.inputs if not tensor.is_empty()]
    copy = gs.Graph(nodes=[], inputs=[], outputs=[], opset=graph.surgeon.opset)
    feeds = {f"x{i}": np.asarray(small_value(tensor)) for i, tensor in enumerate(tensors)}
    names = iter(feeds)
    inputs = [gs.Variable.empty() if tensor.is_empty() else gs.Variable(next(names)) for tensor in node.inputs]
    copy.inputs = [tensor for tensor in inputs if not tensor.is_empty()]
    copy.outputs = [gs.Variable("y")]
    copy.nodes = [gs.Node(op=node.op, attrs=dict(node.attrs), inputs=inputs, outputs=copy.outputs)]
    for tensor, value in zip(copy.inputs, feeds.values(), strict=True):
        tensor.dtype = value.dtype
    model = gs.export_onnx(copy, do_type_check=False)
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(model).run(None, feeds)
    return next(iter(results))


PASS = Sweep(name="fold_constants", apply=apply)
