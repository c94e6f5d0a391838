"""Computes the Graph of a Checkpoint in float64, node by node: what an engine's numbers are compared with.

Takes the graph as `convert` wrote it, before any pass, so that a pass that changes the model is found out. Weights are
read from the Checkpoint a block at a time on each thread; values are forgotten after their last use.

What a token does not see, and experts that it does not take, add nothing to it, even where they hold NaN or infinities.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_graphsurgeon as gs
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ingot.builder.expressions import WeightReader, leaves, matrix_shape
from ingot.builder.graph import Graph, describe, is_op, is_weight, producer, weight_shape
from ingot.builder.parallel_map import parallel_map
from ingot.builder.router_pattern import read_choice
from ingot.dtypes import DType, from_float32, to_float32
from ingot.errors import CheckpointError

BLOCK_BYTES = 4 << 20  # of a weight in float32
_FLOATS = {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


class Evaluation:
    """One pass over the graph for `ids`, int64 [batch, sequence]. `value` gives the tensors named in `wanted`.

    A node is computed when a tensor that needs it is asked for, not before: until then `replace` may change its inputs.
    experts  router's logits → int64 [batch, sequence, taken], the experts that a token takes; -1 in all of them: those
             of its largest logits. `choice` tells how much smaller the shares of the given ones are
    by_rows  initialisers that are NaN in all of a row which holds NaN or an infinity, as quantised ones become
    """

    def __init__(
        self,
        graph: Graph,
        reader: WeightReader,
        ids: npt.NDArray[np.int64],
        wanted: Collection[str],
        threads: int = 1,
        experts: Mapping[str, npt.NDArray[np.int64]] = MappingProxyType({}),
        by_rows: Collection[str] = (),
    ) -> None:
        self._by_rows = frozenset(by_rows)
        self._graph, self._reader, self._threads, self._experts = graph, reader, threads, experts
        self._opset = graph.surgeon.opset
        self._ran: set[int] = set()
        self._lost: dict[str, Float64] = {}  # by router's logits
        self._makers = {each.name: node for node in graph.nodes for each in node.outputs if each.name in set(wanted)}
        self._tensors = {each.name: each for node in self._makers.values() for each in node.outputs}
        self._uses = Counter(id(each) for node in graph.nodes for each in node.inputs)
        self._values: dict[int, Array] = {id(graph.ids): ids}
        self._done: dict[str, Float64] = {}

    def value(self, name: str) -> Float64:
        """The tensor `name`; may be asked for once."""
        if name in self._makers:
            self._run_with_inputs(self._makers[name])
        if name not in self._done:
            raise CheckpointError("the graph does not compute a tensor", where=name, hint="convert the model again")
        return self._done.pop(name)

    def choice(self, logits: str) -> Float64:
        """What a token loses by the experts that it was given: the largest difference between one of their shares and
        the share of the expert that the graph would have taken, [batch, sequence]."""
        makers = (node for node in self._graph.nodes if is_op(node, "TopK") and _router_logits(node) == logits)
        self._run_with_inputs(next(makers))
        return self._lost.pop(logits)

    def replace(self, name: str, first: int, values: npt.NDArray[np.floating]) -> None:
        """From here on the tensor `name`, which `value` has given, has these values from row `first` of the batch."""
        place = id(self._tensors[name])
        if place in self._values:  # else nothing needs it any more
            changed = self._values[place].copy()
            changed[first:] = values.reshape(-1, *changed.shape[1:])
            self._values[place] = changed

    def _run_with_inputs(self, node: gs.Node) -> None:
        """Compute a node and, before it, what it needs."""
        waiting = [node]
        while waiting:
            makers = (producer(each) for each in waiting[-1].inputs if not is_weight(each))
            missing = [maker for maker in makers if maker is not None and id(maker) not in self._ran]
            if missing:
                waiting.extend(missing)
            elif id(node := waiting.pop()) not in self._ran:
                self._ran.add(id(node))
                self._run(node)

    def _run(self, node: gs.Node) -> None:
        results = self._compute(node)
        for tensor, result in zip(node.outputs, results, strict=False):
            if tensor.name in self._tensors:
                self._done[tensor.name] = np.asarray(result, np.float64)
            if self._uses[id(tensor)]:
                value = np.asarray(result)
                self._values[id(tensor)] = value.astype(np.float64) if value.dtype.kind == "f" else value
        for tensor in node.inputs:
            self._uses[id(tensor)] -= 1
            if not self._uses[id(tensor)]:
                self._values.pop(id(tensor), None)

    def _compute(self, node: gs.Node) -> tuple[Array, ...]:
        """Products and tables read their weight in pieces; casts change nothing, but those that round to bf16."""
        if is_op(node, "MatMul") and is_weight(node.inputs[1]):
            x, ndim = self._input(node.inputs[0]), len(weight_shape(node.inputs[1]))
            if ndim == 2:
                return (self._product(x, node.inputs[1]),)
            if ndim == 3 and (stack := _stored(node.inputs[1], [0, 2, 1])) is not None:
                return (self._expert_products(x, stack),)
        if is_op(node, "Gather") and is_weight(node.inputs[0]) and len(weight_shape(node.inputs[0])) == 2:
            return (self._rows(node.inputs[0], self._input(node.inputs[1]), node),)
        inputs = [None if tensor.is_empty() else self._input(tensor) for tensor in node.inputs]
        if is_op(node, "Cast") and node.attrs["to"] == onnx.TensorProto.BFLOAT16:
            narrow = from_float32(np.asarray(inputs[0], np.float32), DType.BF16)
            return (to_float32(narrow, DType.BF16).astype(np.float64),)
        if is_op(node, "Cast") and node.attrs["to"] in _FLOATS:
            return (np.asarray(inputs[0], np.float64),)
        if is_op(node, "Scan"):
            return self._scan(node, [value for value in inputs if value is not None])
        if is_op(node, "Conv") and node.attrs.get("group", 1) == weight_shape(node.inputs[1])[0]:
            return (_causal_conv(node, inputs),)
        if is_op(node, "Attention") and len(node.inputs) <= 4:
            return (_attention(node, inputs),)
        if is_op(node, "TopK") and (experts := self._experts.get(_router_logits(node))) is not None:
            return self._take_experts(node, inputs, experts)
        if is_op(node, "Mul") and (shares := _experts_shares(node)) is not None:
            x, weight = self._input(node.inputs[1 - shares]), self._input(node.inputs[shares])
            return (np.where(weight == 0, 0, x * weight),)
        return self._standard(node, inputs)

    def _scan(self, node: gs.Node, inputs: list[Array]) -> tuple[Array, ...]:
        """The reference implementation of the standard scans first axes alone."""
        count, outer = int(node.attrs["num_scan_inputs"]), dict(node.attrs)
        axes = [0] * (len(inputs) - count) + outer.pop("scan_input_axes", [0] * count)
        moved = [np.moveaxis(value, axis, 0) for value, axis in zip(inputs, axes, strict=True)]
        back = [0] * (len(inputs) - count) + outer.pop("scan_output_axes", [0] * len(node.outputs))
        outer["body"] = gs.export_onnx(outer["body"], do_type_check=False).graph
        results = self._standard(gs.Node(op=node.op, attrs=outer, inputs=node.inputs, outputs=node.outputs), moved)
        return tuple(np.moveaxis(value, 0, axis) for value, axis in zip(results, back, strict=False))

    def _standard(self, node: gs.Node, inputs: Sequence[Array | None]) -> tuple[Array, ...]:
        """By the reference implementation of the ONNX standard, which keeps float64."""
        given = {f"in{index}": value for index, value in enumerate(inputs) if value is not None}
        outputs = [f"out{index}" for index in range(len(node.outputs))]
        names = [f"in{index}" if value is not None else "" for index, value in enumerate(inputs)]
        try:
            graph = helper.make_graph(
                [helper.make_node(node.op, names, outputs, domain=node.domain or "", **_attributes(node))],
                "node",
                [helper.make_tensor_value_info(name, _onnx_type(value), value.shape) for name, value in given.items()],
                [onnx.ValueInfoProto(name=name) for name in outputs],
            )
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self._opset)])
            return tuple(ReferenceEvaluator(model).run(None, given))
        except Exception as error:  # the library raises whatever an op stumbles over
            raise CheckpointError(
                "a node of the graph cannot be computed in numpy",
                where=describe(node),
                got=f"{type(error).__name__}: {str(error)[:300]}",
            ) from error

    def _take_experts(self, node: gs.Node, inputs: list[Array | None], experts: Array) -> tuple[Array, Array]:
        """Results of TopK: the keys of the given experts, and their numbers. An expert of a group that the graph leaves
        out has the key -infinity, so that the choice loses as much."""
        (keys, _), (largest, own) = inputs, self._standard(node, inputs)
        assert keys is not None, "TopK takes the largest of something"
        taken = np.where(experts < 0, own, experts)
        found = np.take_along_axis(keys, taken, axis=-1)
        self._lost[_router_logits(node)] = np.abs(np.sort(largest) - np.sort(found)).max(axis=-1)
        return found, taken

    def _input(self, tensor: gs.Tensor) -> Array:
        if not is_weight(tensor):
            return self._values[id(tensor)]
        if isinstance(tensor, gs.Constant) and tensor.data_location != onnx.TensorProto.EXTERNAL:
            values: Array = tensor.values
            return values.astype(np.float64) if values.dtype.kind == "f" else values
        rows, _ = matrix_shape(tensor)
        return self._reader.read_rows(tensor, 0, rows).astype(np.float64).reshape(weight_shape(tensor))

    def _product(self, x: Array, weight: gs.Tensor) -> Float64:
        """x @ weight, for a weight [K, N] that is most often the transpose of what is stored."""
        size_out = weight_shape(weight)[1]
        flat = x.reshape(-1, x.shape[-1])
        out = np.zeros((len(flat), size_out))
        stored = _stored(weight, [1, 0])
        if stored is None:  # its rows are columns of the product's weight
            blocks, spoils = _blocks(weight, 0, matrix_shape(weight)[0]), not self._by_rows.isdisjoint(leaves(weight))

            def part(at: tuple[int, int]) -> Float64:
                values = self._reader.read_rows(weight, *at).astype(np.float64)
                bad = ~np.isfinite(values).all(axis=0)
                result: Float64 = flat[:, at[0] : at[1]] @ values
                result[:, bad & spoils] = np.nan
                return result

            for each in parallel_map(part, blocks, self._threads):
                out += each
        else:
            self._multiply(flat, stored, 0, out)
        return out.reshape(*x.shape[:-1], size_out)

    def _expert_products(self, x: Array, stack: gs.Tensor) -> Float64:
        """x [batch, experts or 1, sequence, in] times each matrix of a stack [experts, out, in]."""
        experts, size_out, _ = weight_shape(stack)
        x = np.broadcast_to(x, (x.shape[0], experts, *x.shape[2:]))
        out = np.empty((*x.shape[:-1], size_out))
        for expert in range(experts):
            one = np.empty((x.shape[0] * x.shape[2], size_out))
            self._multiply(x[:, expert].reshape(len(one), -1), stack, expert * size_out, one)
            out[:, expert] = one.reshape(x.shape[0], x.shape[2], size_out)
        return out

    def _multiply(self, x: Array, weight: gs.Tensor, first: int, out: Float64) -> None:
        """out [rows, N] = x [rows, K] @ W.T, W: N rows of a weight from `first`."""
        blocks = _blocks(weight, first, first + out.shape[1])
        column = 0
        for part in parallel_map(lambda at: x @ self._weight(weight, at).T, blocks, self._threads):
            out[:, column : column + part.shape[1]] = part
            column += part.shape[1]

    def _weight(self, weight: gs.Tensor, at: tuple[int, int]) -> Float64:
        """Rows [begin, end)."""
        values = self._reader.read_rows(weight, *at).astype(np.float64)
        if not self._by_rows.isdisjoint(leaves(weight)):
            values[~np.isfinite(values).all(axis=1)] = np.nan
        return values

    def _rows(self, table: gs.Tensor, numbers: Array, node: gs.Node) -> Float64:
        """Rows of a table; only those that are asked for are read."""
        if node.attrs.get("axis", 0) != 0:
            raise CheckpointError(
                "the graph gathers from a table along another axis than its rows",
                where=describe(node),
                expected="axis 0",
                got=f"axis {node.attrs['axis']}",
                hint="convert the model again",
            )
        distinct, places = np.unique(numbers, return_inverse=True)
        found = np.concatenate([self._weight(table, (int(number), int(number) + 1)) for number in distinct])
        return found[places.reshape(-1)].reshape(*numbers.shape, -1)


def _stored(weight: gs.Tensor, perm: list[int]) -> gs.Tensor | None:
    """What a weight is the transpose of, if it is one."""
    node = producer(weight)
    reverse = list(range(len(perm)))[::-1]
    if node is None or not is_op(node, "Transpose") or list(node.attrs.get("perm", reverse)) != perm:
        return None
    return node.inputs[0]


def _blocks(weight: gs.Tensor, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Rows [first, end) of a weight, a few at a time."""
    step = max(1, BLOCK_BYTES // (4 * matrix_shape(weight)[1]))
    for begin in range(first, end, step):
        yield begin, min(begin + step, end)


def _onnx_type(values: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(values.dtype))


def _causal_conv(node: gs.Node, inputs: list[Array | None]) -> Float64:
    """Conv of the standard on [batch, channels, sequence], where each channel sees its own last numbers alone: the
    reference implementation takes the channels one by one."""
    x, weight, *biases = inputs
    assert x is not None, "Conv has an input"
    assert weight is not None, "Conv has a weight"
    width, length = weight.shape[-1], x.shape[-1]
    if list(node.attrs.get("pads", ())) != [width - 1, 0] or weight.shape[1:-1] != (1,):
        raise CheckpointError(
            "a convolution does not run over the last tokens",
            where=describe(node),
            expected=f"pads [{width - 1}, 0], and one channel in each group",
            got=f"pads {list(node.attrs.get('pads', ()))}, a weight {list(weight.shape)}",
            hint="convert the model again",
        )
    padded = np.pad(x, ((0, 0), (0, 0), (width - 1, 0)))
    total = sum((weight[:, 0, j, None] * padded[..., j : j + length] for j in range(width)), np.zeros_like(x))
    result: Float64 = total if not biases or biases[0] is None else total + biases[0][:, None]
    return result


def _attention(node: gs.Node, inputs: list[Array | None]) -> Float64:
    """Attention of the standard on [batch, heads, sequence, head_dim], without a cache."""
    q, k, v, *masks = inputs
    assert q is not None, "Attention has queries"
    assert k is not None, "Attention has keys"
    assert v is not None, "Attention has values"
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ np.swapaxes(k, -1, -2) * node.attrs.get("scale", q.shape[-1] ** -0.5)
    if cap := node.attrs.get("softcap", 0.0):
        scores = cap * np.tanh(scores / cap)
    if masks and masks[0] is not None:
        mask = masks[0]
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    if node.attrs.get("is_causal", 0):
        scores = np.where(np.tri(*scores.shape[-2:], dtype=np.bool_), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return _sum_of_seen(weights / weights.sum(axis=-1, keepdims=True), v, scores > -np.inf)


def _sum_of_seen(weights: Float64, v: Array, seen: npt.NDArray[np.bool_]) -> Float64:
    """weights @ v; a value that a query does not see may be NaN or infinite. NaN where one that it sees is."""
    finite = np.isfinite(v)
    result: Float64 = weights @ np.where(finite, v, 0)
    if not finite.all():
        result[(seen | np.isnan(weights)).astype(np.float64) @ ~finite > 0] = np.nan
    return result


def _attributes(node: gs.Node) -> dict[str, Any]:
    """As onnx takes them, numbers in a tensor too."""
    tensors = {key: each.values for key, each in node.attrs.items() if isinstance(each, gs.Constant)}
    return {**node.attrs, **{key: numpy_helper.from_array(values) for key, values in tensors.items()}}


def _router_logits(node: gs.Node) -> str:
    """Name of the logits that a TopK takes experts by, "" where it takes something else."""
    choice = read_choice(node)
    return "" if isinstance(choice, str) else str(choice.logits.name)


def _experts_shares(node: gs.Node) -> int | None:
    """Which input of a product tells what each expert weighs: zero for those that a token does not take."""
    for index, tensor in enumerate(node.inputs):
        maker = producer(tensor)
        for op in ("Unsqueeze", "Transpose"):
            maker = producer(maker.inputs[0]) if maker is not None and is_op(maker, op) else None
        if is_op(maker, "ScatterElements"):
            return index
    return None
