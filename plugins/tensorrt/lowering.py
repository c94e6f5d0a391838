"""Plan → ONNX: native ops for everything, and one node per layer for what its attention does with the paged cache.

    embedding ▶ norm ▶ product ▶ IngotAttention(qkv, keys, values, ...) ▶ product ▶ ...
                                 └ turns by angles of its own, writes into the pools in place, attends

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
from ingot.plan import Attr, Plan, Step
from ingot.plugins.cuda.bind import specialisation
from ingot.plugins.tensorrt.attention import DOMAIN, PLUGIN, Attention, plugin_inputs
from ingot.plugins.tensorrt.tensors import LOGITS, UPDATED, Dim, Tensor, outputs, pools, step_inputs, weights

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


def lower(plan: Plan) -> onnx.ModelProto:
    """The network of a plan. Raises BuildError for a step that TensorRT targets do not compute."""
    return _Lowering(plan).model()


class _Lowering:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._type = specialisation(plan).weight
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._inputs = {each.name: each for each in (*step_inputs(plan), *pools(plan), *weights(plan))}
        self._dtypes = {name: each.dtype for name, each in self._inputs.items()}
        self._now: dict[str, str] = {}  # buffer → the tensor that lies there
        self._cols = {buffer.name: buffer.cols for buffer in plan.buffers}
        self._casts: dict[tuple[str, DType], str] = {}
        self._tables: dict[str, Step] = {}  # buffer → the rope_table whose angles lie there
        self._writing: dict[int, tuple[Step | None, Step]] = {}  # layer → its angles, its rope_kv_write
        self._step = ""

    def model(self) -> onnx.ModelProto:
        for step in self._plan.steps:
            lowered = _STEPS.get(step.op)
            if lowered is None:
                raise BuildError("TensorRT targets do not compute a step", where=step.name, got=step.op)
            self._step = step.name
            made = lowered(self, step)
            self._now |= {name: tensor for name, tensor in zip(step.outputs, made, strict=False) if name}
        self._step = LOGITS
        self._node("Identity", [self._now[self._plan.logits]], LOGITS)
        graph = helper.make_graph(
            self._nodes,
            "ingot",
            [_value(each) for each in self._inputs.values()],
            [_value(each) for each in outputs(self._plan)],
            list(self._constants.values()),
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11, producer_name="ingot")

    # One method per op; each returns the tensors of the step's outputs.

    def embedding(self, step: Step) -> list[str]:
        table, positions = step.inputs
        y = self._wide(self._node("Gather", [table, "ids"], "rows"))
        if step.attrs["scale"] != 1:
            y = self._node("Mul", [y, self._number(step.attrs["scale"])], "scaled")
        if positions:
            y = self._node("Add", [y, self._wide(self._node("Gather", [positions, "positions"], "places"))], "placed")
        return [y]

    def rope_table(self, step: Step) -> list[str]:
        """Each attention computes it: native cosines need not be exact for angles of 100,000."""
        self._tables[step.outputs[0]] = step
        return []

    def norm(self, step: Step) -> list[str]:
        layer = step.op == "layer_norm"
        x, weight, bias, residual = step.inputs if layer else (*step.inputs[:2], "", step.inputs[2])
        total = self._activation(x)
        if residual:
            total = self._node("Add", [total, self._activation(residual)], "sum")
        given = [total, self._wide(weight), *([self._wide(bias)] if bias else [])]
        op = "LayerNormalization" if layer else "RMSNormalization"
        return [self._node(op, given, "norm", axis=-1, epsilon=float(step.attrs["eps"])), total]

    def matmul(self, step: Step) -> list[str]:
        x, weight, bias, residual = step.inputs
        if self._dtypes[weight] is not self._type or step.attrs["group"]:
            raise BuildError("products take weights of one type", where=step.name, got=self._dtypes[weight].value)
        y = self._wide(self._node("Gemm", [self._cast(self._now[x], self._type), weight], "product", transB=1))
        if bias:
            y = self._node("Add", [y, self._wide(bias)], "biased")
        kind = str(step.attrs["activation"])
        if step.attrs["gated"]:
            gate, up = self._split(y)
            y = self._node("Mul", [self._activate(kind, gate), up], "gated")
        else:
            y = self._activate(kind, y)
        return [self._node("Add", [y, self._activation(residual)], "total")] if residual else [y]

    def add(self, step: Step) -> list[str]:
        return [self._node("Add", [self._activation(name) for name in step.inputs], "total")]

    def activation(self, step: Step) -> list[str]:
        x, up = step.inputs
        y = self._activate(str(step.attrs["activation"]), self._activation(x))
        return [self._node("Mul", [y, self._activation(up)], "gated") if up else y]

    def rope_kv_write(self, step: Step) -> list[str]:
        """Waits for its attention, which is the same node."""
        cos_sin = step.inputs[1]
        self._writing[int(step.attrs["layer"])] = (self._tables[cos_sin] if cos_sin else None, step)
        return []

    def paged_attention(self, step: Step) -> list[str]:
        layer = int(step.attrs["layer"])
        table, write = self._writing.pop(layer)
        qkv, cos_sin, q_norm, k_norm = write.inputs
        rotary = self._cols[cos_sin] if cos_sin else 0
        attention = Attention.of(table, rotary, write, step, self._plan.kv, narrow=self._type is not DType.F32)
        known = {
            "qkv": self._activation(qkv),
            "keys": f"keys.{layer}",
            "values": f"values.{layer}",
            "inv_freq": "" if table is None else table.inputs[0],
            "q_norm": q_norm,
            "k_norm": k_norm,
        }
        names = [known.get(name, name) for name in plugin_inputs(attention)]
        made = [f"{step.name}/y", f"keys.{layer}{UPDATED}", f"values.{layer}{UPDATED}"]
        self._nodes.append(
            helper.make_node(PLUGIN, names, made, name=step.name, domain=DOMAIN, **attention.attributes())
        )
        self._dtypes[made[0]] = self._type
        return [made[0]]

    def gather_rows(self, step: Step) -> list[str]:
        x = self._now[step.inputs[0]]
        return [self._node("Gather", [x, "rows"], "wanted")]

    def softcap(self, step: Step) -> list[str]:
        cap = self._number(step.attrs["cap"])
        bent = self._node("Tanh", [self._node("Div", [self._activation(step.inputs[0]), cap], "scaled")], "bent")
        return [self._node("Mul", [bent, cap], "capped")]

    # Parts of several ops.

    def _activate(self, kind: str, x: str) -> str:
        if kind == "silu":
            return self._node("Mul", [x, self._node("Sigmoid", [x], "sigmoid")], "silu")
        if kind in ("gelu", "gelu_tanh"):
            return self._node("Gelu", [x], kind, approximate="tanh" if kind == "gelu_tanh" else "none")
        if kind == "relu":
            return self._node("Relu", [x], kind)
        assert kind == "none", kind
        return x

    def _split(self, x: str) -> tuple[str, str]:
        made = [f"{self._step}/gate", f"{self._step}/up"]
        self._nodes.append(helper.make_node("Split", [x], made, name=f"{self._step}/split", axis=1, num_outputs=2))
        self._dtypes |= dict.fromkeys(made, self._dtypes[x])
        return made[0], made[1]

    def _activation(self, buffer: str) -> str:
        """What lies in a buffer, as float32."""
        return self._wide(self._now[buffer])

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
        """One node with one output of the type of its first input; its name begins with the step's."""
        made = LOGITS if self._step == LOGITS else f"{self._step}/{suffix}"
        self._nodes.append(helper.make_node(op, list(inputs), [made], name=made, **attributes))
        self._dtypes[made] = self._dtypes[inputs[0]]
        return made


_STEPS: Mapping[str, Callable[[_Lowering, Step], list[str]]] = {
    "embedding": _Lowering.embedding,
    "rope_table": _Lowering.rope_table,
    "rms_norm": _Lowering.norm,
    "layer_norm": _Lowering.norm,
    "matmul": _Lowering.matmul,
    "add": _Lowering.add,
    "activation": _Lowering.activation,
    "rope_kv_write": _Lowering.rope_kv_write,
    "paged_attention": _Lowering.paged_attention,
    "gather_rows": _Lowering.gather_rows,
    "softcap": _Lowering.softcap,
}


def _value(tensor: Tensor) -> onnx.ValueInfoProto:
    shape = [each.value if isinstance(each, Dim) else each for each in tensor.shape]
    return helper.make_tensor_value_info(tensor.name, tensor.dtype.onnx, shape)
