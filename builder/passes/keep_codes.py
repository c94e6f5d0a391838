"""Products that keep their codes only apart from others, or with their columns in another order.

x ─ Matmul(W by order) ▶ y      x ─ GatherColumns(order) ─ Matmul(W) ▶ y

x ─ Matmul(Wq, Wk, Wv) ▶ qkv    x ┬ Matmul(Wq, Wk) ┬ JoinColumns ▶ qkv
                                  └ Matmul(Wv) ────┘

x ─ gated(Wg, Wu) ▶ y           x ┬ Matmul(Wg) ┬ Activation ▶ y
                                  └ Matmul(Wu) ┘

A checkpoint may have its columns in groups that are not neighbours (GPTQ's desc_act, actorder): then the weight's
columns stay in the order of the groups, and x is put in that order. Neighbours among q, k and v whose codes one format
holds stay one product; the others get their own, so that none takes a larger format for another's sake, or gives up
units that its scales count.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_graphsurgeon as gs

from ingot.builder.expressions import WeightReader
from ingot.builder.graph import Graph, is_op, optional_input, ours, producer, weight_shape
from ingot.builder.kept import kept_precision, rows_alike
from ingot.builder.node_kinds import attends, is_matmul, specs
from ingot.builder.passes.base import PassReport, Sweep
from ingot.builder.passes.insert_matmul import PLAIN
from ingot.builder.passes.split_sums import FOLLOWED
from ingot.dtypes import Precision
from ingot.plan import Plan, Step
from ingot.plugins.ops.gather_columns import OP as GATHER
from ingot.plugins.ops.join_columns import MOST
from ingot.plugins.ops.join_columns import OP as JOIN

Order = npt.NDArray[np.int64]
_Gathered = dict[tuple[int, bytes], gs.Tensor]  # (id of x, order) → x in that order
_GATED = "_activation"  # what its activation's name adds to that of a gated product


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Member:
    """Rows of a product that the checkpoint stores as one weight.

    weight  [rows, K], its columns in their stored order where that differs and the codes can be kept
    order   column of x that each of them takes; None: the same
    """

    weight: gs.Tensor
    bias: gs.Tensor | None
    order: Order | None

    def goes_with(self, others: Sequence["_Member"], *, units: int) -> bool:
        """Whether one product holds all of them as well as several do."""
        first = others[0]
        if self.order is None or first.order is None:
            same = self.order is first.order
        else:
            same = np.array_equal(self.order, first.order)
        if not same:
            return False
        alone = [kept_precision(each.weight, units=units) for each in (first, self)]
        together = kept_precision(*(each.weight for each in others), self.weight, units=units)
        found = [each for each in alone if each is not None]
        if len(found) < len(alone):
            return not found
        units_alone = any(each.dtype.has_units for each in found)
        if together is None or together.dtype.has_units != units_alone:
            return False
        return {_bits(together)} == {_bits(each) for each in found}

    def is_like(self, others: Sequence["_Member"]) -> bool:
        """Whether all rows are of one kind, wherever they are divided."""
        return rows_alike(*(each.weight for each in others), self.weight)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepCodes:
    """wanted: names of the products that keep codes where they can; takes: whether the target has a product of that
    precision.

    ordered  whether a product may get its columns in another order
    units    as in `kept_precision`
    alike    whether one product has rows of one kind alone: ranks divide rows anywhere
    wholes   gets the products that are taken apart: name of a part → name of the whole
    """

    reader: WeightReader
    wanted: Callable[[str], bool]
    takes: Callable[[Precision], bool]
    ordered: Callable[[gs.Node], bool] = lambda node: True
    units: int = 1
    alike: bool = False
    wholes: dict[str, str] = dataclasses.field(default_factory=dict)
    name: str = "keep_codes"

    def run(self, graph: Graph) -> PassReport:
        """Rewrite products, whose nodes have their names; new nodes get names too."""
        return Sweep(name=self.name, apply=self._apply).run(graph)

    def _apply(self, graph: Graph) -> int:
        gathered: _Gathered = {}
        taken = {node.name for node in graph.nodes}
        return sum(
            self._rewrite(graph, node, gathered, taken)
            for node in graph.nodes
            if ours(node, "Matmul") and self.wanted(node.name)
        )

    def _rewrite(self, graph: Graph, node: gs.Node, gathered: _Gathered, taken: set[str]) -> bool:
        members = self._members(node)
        runs = self._runs(members)
        precisions = [kept_precision(*(each.weight for each in run), units=self.units) for run in runs]
        if not any(each is not None and self.takes(each) for each in precisions):
            return False
        if len(runs) == 1:
            (run,) = runs
            if run[0].order is None:
                return False
            node.inputs[0] = self._in_order(graph, node.inputs[0], run[0].order, node.name, gathered)
            node.inputs[1] = _joined(graph, [each.weight for each in run])
            return True
        if len(runs) > MOST or optional_input(node, 3) is not None:
            return False
        self._split(graph, node, runs, gathered, taken)
        return True

    def _members(self, node: gs.Node) -> list[_Member]:
        weight, bias = node.inputs[1], optional_input(node, 2)
        made_by, bias_by = producer(weight), None if bias is None else producer(bias)
        weights, biases = [weight], [bias]
        if is_op(made_by, "Concat") and made_by.attrs["axis"] == 0:
            count = len(made_by.inputs)
            if bias is None or (is_op(bias_by, "Concat") and len(bias_by.inputs) == count):
                weights, biases = list(made_by.inputs), [None] * count if bias_by is None else list(bias_by.inputs)
        ordered = self.ordered(node)
        return [self._member(each, own, ordered=ordered) for each, own in zip(weights, biases, strict=True)]

    def _member(self, weight: gs.Tensor, bias: gs.Tensor | None, *, ordered: bool) -> _Member:
        node = producer(weight)
        if (
            ordered
            and is_op(node, "Gather")
            and node.attrs.get("axis", 0) in (1, -1)
            and len(weight_shape(weight)) == 2
        ):
            stored, places = node.inputs
            order = self._order(places, weight_shape(weight)[1])
            kept = None if order is None else kept_precision(stored, units=self.units)
            if kept is not None and self.takes(kept):
                return _Member(weight=stored, bias=bias, order=order)
        return _Member(weight=weight, bias=bias, order=None)

    def _runs(self, members: Sequence[_Member]) -> list[list[_Member]]:
        """Neighbours that stay one product."""
        runs: list[list[_Member]] = []
        for each in members:
            if runs and each.goes_with(runs[-1], units=self.units) and (not self.alike or each.is_like(runs[-1])):
                runs[-1].append(each)
            else:
                runs.append([each])
        return runs

    def _order(self, places: gs.Tensor, columns: int) -> Order | None:
        """From where each column lies; None where these are not the places of all columns."""
        if weight_shape(places) != (columns,):
            return None
        found = self.reader.read_numbers(places, 0, columns).astype(np.int64)
        order: Order = np.argsort(found, kind="stable")
        return order if np.array_equal(found[order], np.arange(columns)) else None

    def _split(
        self, graph: Graph, node: gs.Node, runs: Sequence[Sequence[_Member]], gathered: _Gathered, taken: set[str]
    ) -> None:
        gated = bool(node.attrs["gated"])
        names = [_free(name, taken) for name in _names(node.name, [len(run) for run in runs])]
        self.wholes.update(dict.fromkeys(names, node.name))
        made = []
        for run, name in zip(runs, names, strict=True):
            x = self._in_order(graph, node.inputs[0], run[0].order, name, gathered)
            inputs = [x, _joined(graph, [each.weight for each in run])]
            if run[0].bias is not None:
                inputs.append(_joined(graph, [each.bias for each in run if each.bias is not None]))
            made += graph.insert("Matmul", inputs, PLAIN if gated else node.attrs)
            made[-1].inputs[0].name = name
        name = node.name
        if gated:
            activation = {"activation": node.attrs["activation"]}
            graph.replace(node.outputs[0], "Activation", made, activation).name = name + _GATED
        else:
            graph.replace(node.outputs[0], "JoinColumns", made, {}).name = name

    @staticmethod
    def _in_order(graph: Graph, x: gs.Tensor, order: Order | None, name: str, gathered: _Gathered) -> gs.Tensor:
        """x with its columns in this order, which products of the same x share."""
        if order is None:
            return x
        what = id(x), order.tobytes()
        if what not in gathered:
            (made,) = graph.insert("GatherColumns", [x, graph.constant(order.astype(np.float32))], {})
            made.inputs[0].name = f"{name}_columns"
            gathered[what] = made
        return gathered[what]


def may_order(node: gs.Node, parts: int) -> bool:
    """Whether a product may get its columns in another order where sums have parts: ranks that divide its input must
    have equal shares of whole heads, which share key heads evenly, and put them together (`split_sums.py`)."""
    source = producer(node.inputs[0])
    while source is not None and any(op.name in FOLLOWED for op in specs(source)):
        source = producer(source.inputs[0])
    if source is None or not (attends(source) or ours(source, "Activation") or not is_plain(source)):
        return True
    unit = shared = 1
    if attends(source):
        heads, kv_heads, unit = (int(source.attrs[key]) for key in ("heads", "kv_heads", "head_dim"))
        shared = heads // kv_heads * unit
    own, rest = divmod(weight_shape(node.inputs[1])[-1], parts)
    return is_plain(node) and rest == own % unit == max(own, shared) % min(own, shared) == 0


def is_plain(node: gs.Node) -> bool:
    """False for a product that is gated or activated."""
    return not is_matmul(node) or (not node.attrs["gated"] and node.attrs["activation"] == "none")


def rearranged(plan: Plan) -> dict[str, bool]:
    """Names of the products that were rewritten so in an engine with this plan; whether columns are in another order in
    some of their parts."""
    writers: dict[str, Step] = {}

    def in_order(product: Step) -> bool:
        maker = writers.get(product.inputs[0])
        return maker is not None and maker.op == GATHER.name

    found = {}
    for step in plan.steps:
        if step.op == JOIN.name or step.name.endswith(_GATED):
            parts = [writers[each] for each in step.inputs if each in writers]
            found[step.name.removesuffix(_GATED)] = any(map(in_order, parts))
        elif in_order(step):
            found[step.name] = True
        writers |= dict.fromkeys(step.outputs, step)
    return found


def _bits(precision: Precision) -> int:
    described = precision.dtype.weight_format
    assert described is not None, "codes are kept"
    return described.bits


def _joined(graph: Graph, parts: Sequence[gs.Tensor]) -> gs.Tensor:
    return parts[0] if len(parts) == 1 else graph.insert("Concat", parts, {"axis": 0}, domain="")[0]


def _names(name: str, counts: Sequence[int]) -> list[str]:
    """layers.0/qkv becomes layers.0/qk and layers.0/v, gate_up.2 gate.2 and up.2; others get numbers."""
    path, slash, last = name.rpartition("/")
    last, dot, number = last.partition(".")
    parts = list(last) if last == "qkv" else last.split("_")
    if len(parts) != sum(counts):
        return [f"{name}.{place}" for place in range(1, len(counts) + 1)]
    begins = [sum(counts[:i]) for i in range(len(counts))]
    return [
        path + slash + "".join(parts[at : at + count]) + dot + number for at, count in zip(begins, counts, strict=True)
    ]


def _free(name: str, taken: set[str]) -> str:
    """The name, with a number where another step has it: a layer may have more than one `up`."""
    numbered = (f"{name}.{number}" for number in itertools.count(2))
    found = name if name not in taken else next(each for each in numbered if each not in taken)
    taken.add(found)
    return found
