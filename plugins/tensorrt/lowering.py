"""Graph → ONNX: native ops for everything, and one node per layer for what its attention does with the paged cache.

    embedding ▶ norm ▶ product ▶ IngotAttention(qkv, keys, values, ...) ▶ product ▶ ...
                                 └ rotates by angles of its own, writes into the pools in place, attends

Weights are inputs, so that the network is small and the file of weights serves several targets. Ops are few on purpose:
`OPS` is all that a builder which does not read ONNX has to know. Strongly typed: activations are float32, inputs of
products have the products' type, and what a product gives in 16 bits is widened at once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ingot.dtypes import DType
from ingot.errors import BuildError
from ingot.plan import Attr, Plan
from ingot.plugins.cuda.plan_facts import specialisation
from ingot.plugins.op_graph import IDS, OpGraph, OpNode
from ingot.plugins.tensorrt.attention import DOMAIN, PLUGIN, Attention, plugin_inputs
from ingot.plugins.tensorrt.tensors import (
    LOGITS,
    UPDATED,
    Dim,
    Tensor,
    outputs,
    pool_names,
    pools,
    step_inputs,
    weights,
)

OPSET = 23
OPS = (
    "Add",
    "Cast",
    "Div",
    "Gather",
    "Gelu",
    "Gemm",
    "LayerNormalization",
    "Mul",
    "RMSNormalization",
    "Identity",
    "Relu",
    "Sigmoid",
    "Split",
    "Tanh",
    PLUGIN,
)


def lower(graph: OpGraph, plan: Plan) -> onnx.ModelProto:
    """The network of a graph; the plan says what sessions give to it. Raises BuildError for an op that TensorRT targets
    do not compute."""
    return _Lowering(graph, plan).model()


class _Lowering:
    def __init__(self, graph: OpGraph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self._type = specialisation(plan).weight
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs = {each.name: each for each in (*step_inputs(plan), *pools(plan), *weights(plan))}
        self._dtypes = {name: each.dtype for name, each in self._inputs.items()}
        self._tensors = {IDS: "ids"}  # activation of the graph → tensor of the network
        self._casts: dict[tuple[str, DType], str] = {}
        self._tables: dict[str, OpNode] = {}  # activation → the RopeTable whose angles it holds
        self._place = ""  # what names of nodes begin with

    def model(self) -> onnx.ModelProto:
        for node in self._graph.nodes:
            lowered = _OPS.get(node.op)
            if lowered is None:
                raise BuildError(
                    f"TensorRT targets do not support {node.op}", where=node.name, hint="build for a cuda or CPU target"
                )
            self._place = node.name
            self._tensors |= dict(zip(node.outputs, lowered(self, node), strict=False))
        self._place = LOGITS
        self._node("Identity", [self._tensors[self._graph.logits]], LOGITS)
        graph = helper.make_graph(
            self._nodes,
            "ingot",
            [_value(each) for each in self._inputs.values()],
            [_value(each) for each in outputs(self._plan)],
            list(self._constants.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11, producer_name="ingot")

    # One method per op; each returns the tensors of the node's outputs.

    def embedding(self, node: OpNode) -> list[str]:
        ids, table, positions = node.inputs
        y = self._wide(self._node("Gather", [table, self._tensors[ids]], "rows"))
        if node.attrs["scale"] != 1:
            y = self._node("Mul", [y, self._number(node.attrs["scale"])], "scaled")
        if positions:
            y = self._node("Add", [y, self._wide(self._node("Gather", [positions, "positions"], "places"))], "placed")
        return [y]

    def rope_table(self, node: OpNode) -> list[str]:
        """Each attention computes it: native cosines need not be exact for angles of 100,000."""
        self._tables[node.outputs[0]] = node
        return []

    def norm(self, node: OpNode) -> list[str]:
        layer = node.op == "LayerNorm"
        x, weight, bias, residual = node.inputs if layer else (*node.inputs[:2], "", node.inputs[2])
        total = self._activation(x)
        if residual:
            total = self._node("Add", [total, self._activation(residual)], "sum")
        given = [total, self._wide(weight), *([self._wide(bias)] if bias else [])]
        op = "LayerNormalization" if layer else "RMSNormalization"
        return [self._node(op, given, "norm", axis=-1, epsilon=float(node.attrs["eps"])), total]

    def matmul(self, node: OpNode) -> list[str]:
        x, weight, bias, residual = node.inputs
        if self._dtypes[weight] is not self._type or node.attrs["group"]:
            raise BuildError(
                "TensorRT targets take weights of one type",
                where=node.name,
                got=self._dtypes[weight].value,
                hint="give --precision bf16 or f32 for all layers",
            )
        y = self._wide(self._node("Gemm", [self._cast(self._tensors[x], self._type), weight], "product", transB=1))
        if bias:
            y = self._node("Add", [y, self._wide(bias)], "biased")
        kind = str(node.attrs["activation"])
        if node.attrs["gated"]:
            gate, up = self._split(y)
            y = self._node("Mul", [self._activate(kind, gate), up], "gated")
        else:
            y = self._activate(kind, y)
        return [self._node("Add", [y, self._activation(residual)], "total")] if residual else [y]

    def add(self, node: OpNode) -> list[str]:
        return [self._node("Add", [self._activation(name) for name in node.inputs], "total")]

    def activation(self, node: OpNode) -> list[str]:
        x, up = node.inputs
        y = self._activate(str(node.attrs["activation"]), self._activation(x))
        return [self._node("Mul", [y, self._activation(up)], "gated") if up else y]

    def paged_attention(self, node: OpNode) -> list[str]:
        """One node, the plugin: rotating, writing to the cache and attending."""
        qkv, cos_sin, q_norm, k_norm = node.inputs
        table = self._tables[cos_sin] if cos_sin else None
        rotary = self._graph.activations[cos_sin].cols if cos_sin else 0
        attention = Attention.of(table, rotary, node, self._plan.caches[0], narrow=self._type is not DType.F32)
        keys, values = pool_names(attention.layer)
        known = {
            "qkv": self._activation(qkv),
            "keys": keys,
            "values": values,
            "inv_freq": "" if table is None else table.inputs[0],
            "q_norm": q_norm,
            "k_norm": k_norm,
        }
        names = [known.get(name, name) for name in plugin_inputs(attention)]
        made = [f"{node.name}/y", keys + UPDATED, values + UPDATED]
        self._nodes.append(
            helper.make_node(PLUGIN, names, made, name=node.name, domain=DOMAIN, **attention.attributes())
        )
        self._dtypes[made[0]] = self._type
        return [made[0]]

    def gather_rows(self, node: OpNode) -> list[str]:
        return [self._node("Gather", [self._tensors[node.inputs[0]], "rows"], "wanted")]

    def softcap(self, node: OpNode) -> list[str]:
        cap = self._number(node.attrs["cap"])
        bent = self._node("Tanh", [self._node("Div", [self._activation(node.inputs[0]), cap], "scaled")], "bent")
        return [self._node("Mul", [bent, cap], "capped")]

    def scale(self, node: OpNode) -> list[str]:
        return [self._node("Mul", [self._activation(node.inputs[0]), self._number(node.attrs["factor"])], "scaled")]

    # Parts of several ops.

    def _activate(self, kind: str, x: str) -> str:
        if kind == "silu":
            return self._node("Mul", [x, self._node("Sigmoid", [x], "sigmoid")], "silu")
        if kind in ("gelu", "gelu_tanh"):
            return self._node("Gelu", [x], kind, approximate="tanh" if kind == "gelu_tanh" else "none")
        if kind == "relu":
            return self._node("Relu", [x], kind)
        if kind == "relu2":
            kept = self._node("Relu", [x], "relu")
            return self._node("Mul", [kept, kept], kind)
        assert kind == "none", kind
        return x

    def _split(self, x: str) -> tuple[str, str]:
        made = [f"{self._place}/gate", f"{self._place}/up"]
        self._nodes.append(helper.make_node("Split", [x], made, name=f"{self._place}/split", axis=1, num_outputs=2))
        self._dtypes |= dict.fromkeys(made, self._dtypes[x])
        return made[0], made[1]

    def _activation(self, name: str) -> str:
        """An activation of the graph, as float32."""
        return self._wide(self._tensors[name])

    def _wide(self, name: str) -> str:
        return self._cast(name, DType.F32)

    def _cast(self, name: str, dtype: DType) -> str:
        if self._dtypes[name] is dtype:
            return name
        if (name, dtype) not in self._casts:
            made = f"{name}.{dtype.value}"
            self._nodes.append(helper.make_node("Cast", [name], [made], name=made, to=dtype.onnx))
            self._dtypes[made] = dtype
            self._casts[name, dtype] = made
        return self._casts[name, dtype]

    def _number(self, value: Attr) -> str:
        name = f"number.{value}"
        self._constants.setdefault(name, numpy_helper.from_array(np.asarray(value, np.float32), name))
        self._dtypes[name] = DType.F32
        return name

    def _node(self, op: str, inputs: Sequence[str], suffix: str, **attributes: Any) -> str:
        """One node with one output of the type of its first input; its name begins with that of the graph's node."""
        made = LOGITS if self._place == LOGITS else f"{self._place}/{suffix}"
        self._nodes.append(helper.make_node(op, list(inputs), [made], name=made, **attributes))
        self._dtypes[made] = self._dtypes[inputs[0]]
        return made


_OPS: Mapping[str, Callable[[_Lowering, OpNode], list[str]]] = {
    "Embedding": _Lowering.embedding,
    "RopeTable": _Lowering.rope_table,
    "RmsNorm": _Lowering.norm,
    "LayerNorm": _Lowering.norm,
    "Matmul": _Lowering.matmul,
    "Add": _Lowering.add,
    "Activation": _Lowering.activation,
    "PagedAttention": _Lowering.paged_attention,
    "GatherRows": _Lowering.gather_rows,
    "Softcap": _Lowering.softcap,
    "Scale": _Lowering.scale,
}


def _value(tensor: Tensor) -> onnx.ValueInfoProto:
    shape = [each.value if isinstance(each, Dim) else each for each in tensor.shape]
    return helper.make_tensor_value_info(tensor.name, tensor.dtype.onnx, shape)
