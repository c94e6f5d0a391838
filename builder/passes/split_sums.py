"""Products that ranks would divide along K are computed in parts, whose sums a fixed tree adds up (`--sum_parts`).

    x ─ matmul(W) ▶ y        x ┬ take_columns ─ matmul(W0) ▶ p0 ─────────┐
                               ├ take_columns ─ matmul(W1) + p0 ▶ p01 ───┴ add ▶ y
                               ├ take_columns ─ matmul(W2) ▶ p2 ─────────┐   │
                               └ take_columns ─ matmul(W3) + p2 ▶ p23 ───┴───┘

A part is a product of its own: with its own accumulator, its own scales of the weight, and its own rounding of its
inputs. So no kernel knows of parts. A rank that owns some of them computes what any other engine of as many parts
computes, and neighbours in the tree are neighbours among the ranks.

The columns of a weight that stay in the order of their groups (`keep_codes.py`), or whose input is normed inside an
MLP, are not divided: each rank has some of such a weight's rows, and all columns of its input.

    x (a rank's columns) ─ all_gather ─ gather_columns or norm ─ matmul(some rows of W) ─ all_gather ▶ y
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import onnx_graphsurgeon as gs

from ingot.builder.lower import Lowering
from ingot.builder.memory import Value
from ingot.builder.pack import WeightUse
from ingot.builder.passes.base import PassReport
from ingot.builder.program import Draft, Program
from ingot.builder.select import choose_kernel
from ingot.builder.sum_bounds import OPTION, Whole, part_bounds
from ingot.errors import BuildError, NoKernelError
from ingot.plan import Attr, Plan
from ingot.plugins.ops import add, all_gather, all_reduce, gather_columns, take_columns
from ingot.plugins.registry import find_op
from ingot.plugins.target import CompilesGraph, Target
from ingot.weight_formats import KEPT

NAME = "split_sums"
_PART = re.compile(r"\.part\d+$")  # behind the name of what has parts
FOLLOWED = ("gather_rows", "sigmoid_gate")  # what may lie between heads and the product that adds them up


def split_passes(
    lowering: Lowering,
    target: Target,
    parts: int,
    rank: int = 0,
    ranks: int = 1,
    groups: Mapping[str, int] = MappingProxyType({}),
) -> tuple["SplitSums", ...]:
    """The pass, where there is more than one part."""
    split = SplitSums(lowering=lowering, target=target, parts=parts, rank=rank, ranks=ranks, groups=groups)
    return (split,) if parts > 1 else ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitSums:
    """parts: a power of two, at least 2; lowering: gets the parts of the weights.

    rank, ranks  ranks divide the parts evenly; a program has those of one rank, and all of them add up what they have
    groups       product → columns that stay together in another program, whose parts are wanted here
    shares       gets the columns, first and last and one, that this rank has of each value that is added up
    gathered     gets those of these values that ranks put together again, and do not add up
    """

    lowering: Lowering
    target: Target
    parts: int
    rank: int = 0
    ranks: int = 1
    groups: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shares: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    gathered: set[int] = dataclasses.field(default_factory=set)

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """Raises BuildError where the model has nothing to cut, and where the target cannot."""
        _require_kernels(self.target)
        writers = {value: step for step in program.steps for value in step.outputs if value is not None}
        uncut = [step for step in program.steps if self._stays_whole(step, writers)]
        writers = {value: step for value, step in writers.items() if step not in uncut}
        made = _Parts(self, program.values)
        for step in program.steps:
            if (whole := _whole(step, writers)) is not None:
                made.cut(step, whole)
            elif _needs_all(step, writers):
                made.put_together(step)
            elif _reads_all(step, writers):
                made.cut_rows(step)
            else:
                made.steps.append(step)
        if not made.count:
            raise BuildError(
                f"{OPTION} is not supported for this model: it has no matmul whose sum can be split",
                where=OPTION,
                expected="a matmul after attention or after an activation function",
                hint=f"leave {OPTION} out",
            )
        read = {ref for step in made.steps for ref in step.inputs if isinstance(ref, str)}
        self.lowering.drop_weights({use.name for use in self.lowering.uses} - read)
        changed = dataclasses.replace(program, steps=tuple(made.steps), values=tuple(made.values), sum_parts=self.parts)
        uncut += [step for step in program.steps if _norms_heads(step, writers)]
        refused = {"a norm takes all heads of a token together": len(uncut)} if uncut else {}
        return changed, PassReport(name=NAME, fired=made.count, refused=refused)

    def _stays_whole(self, step: Draft, writers: Mapping[int, Draft]) -> bool:
        """Whether a step is attention of queries and keys that are normed over all heads: no part can have some."""
        query = step.inputs[0] if step.op == "paged_attention" else None
        if not isinstance(query, int):
            return False
        norms = [ref for ref in writers[query].inputs[2:4] if isinstance(ref, str)]
        return any(self.lowering.use(name).shape != (step.attrs["head_dim"],) for name in norms)


class _Parts:
    """Collects the steps and values of the program to be."""

    def __init__(self, split: SplitSums, values: tuple[Value, ...]) -> None:
        self.steps: list[Draft] = []
        self.values = list(values)
        self.count = 0
        self._split = split

    def cut(self, step: Draft, whole: Whole) -> None:
        """The steps that take the place of a product. whole: columns of its input that stay together."""
        parts, op = self._split.parts, find_op(step.op)
        use = self._split.lowering.use(_weight(step))
        k, weight_at = use.shape[-1], step.inputs.index(use.name)
        use = dataclasses.replace(use, group=_group_of(use, parts, whole.unit))
        attrs = {**step.attrs, "group": use.group} if use.group else step.attrs
        x, out = step.inputs[0], step.outputs[0]
        assert isinstance(x, int), "a product reads an activation"
        assert out is not None, "and writes one"
        residual = None if op.residual is None else step.inputs[op.residual]
        sums: list[int] = []
        each = parts // self._split.ranks
        bounds = part_bounds(step.name, k, parts, whole, self._split.groups.get(step.name, use.group))
        own = range(self._split.rank * each, (self._split.rank + 1) * each)
        low, high = bounds[own[0]][0], bounds[own[-1]][1]
        for part in own:
            begin, end = bounds[part]
            taken = x if each == 1 else self._taken(f"{step.name}.columns{part}", x, k, (low, high), (begin, end))
            weight = self._split.lowering.add_weight(_part_of(use, f"{step.name}.part{part}.weight", begin, end))
            inputs = [taken if i == 0 else weight if i == weight_at else ref for i, ref in enumerate(step.inputs)]
            for at in op.vectors if part else ():
                inputs[at] = None  # the first part adds the bias
            joins = op.residual is not None and each > 1 and part % 2 == 1
            if op.residual is not None:
                inputs[op.residual] = sums.pop() if joins else None
            sums.append(self._value(out))
            name = f"{step.name}.part{part}"
            part_step = dataclasses.replace(step, name=name, attrs=attrs, inputs=tuple(inputs), outputs=(sums[-1],))
            self.steps.append(part_step)
        self._add_up(step, sums, residual)
        self.steps[-1] = dataclasses.replace(self.steps[-1], outputs=(out,))
        if self._split.ranks > 1:
            self._split.shares[x] = low, high
        self.count += 1

    def put_together(self, step: Draft) -> None:
        """A step that needs all columns of a row gets those of all ranks."""
        x = step.inputs[0]
        assert isinstance(x, int), "it reads an activation"
        if self._split.ranks > 1:
            columns = self.values[x].cols
            self._split.shares[x] = _share(columns, self._split.rank, self._split.ranks)
            self._split.gathered.add(x)
            step = dataclasses.replace(step, inputs=(self._all_of(step.name, x, columns), *step.inputs[1:]))
        self.steps.append(step)

    def cut_rows(self, step: Draft) -> None:
        """The steps that take the place of a product behind such a step; what it added comes last."""
        out, op = step.outputs[0], find_op(step.op)
        assert out is not None, "a product writes an activation"
        residual = None if op.residual is None else step.inputs[op.residual]
        columns = self.values[out].cols
        begin, end = _share(columns, self._split.rank, self._split.ranks)
        inputs = list(step.inputs)
        if op.residual is not None:
            inputs[op.residual] = None
        for at in (step.inputs.index(_weight(step)), *op.vectors):
            name = inputs[at]
            if isinstance(name, str) and self._split.ranks > 1:
                inputs[at] = self._split.lowering.add_weight(_rows_of(self._split.lowering.use(name), begin, end))
        made = self._value(out, cols=end - begin)
        self.steps.append(dataclasses.replace(step, inputs=tuple(inputs), outputs=(made,)))
        if self._split.ranks > 1:
            made = self._all_of(step.name, made, columns)
        if residual is not None:
            self._made(f"{step.name}.sum0", add.OP.name, (made, residual), {})
        self.steps[-1] = dataclasses.replace(self.steps[-1], outputs=(out,))
        self.count += 1

    def _all_of(self, name: str, x: int, columns: int) -> int:
        """The columns of all ranks."""
        attrs: dict[str, Attr] = {"ranks": self._split.ranks, "columns": columns}
        return self._made(f"{name}.all_gather", all_gather.OP.name, (x,), attrs, cols=columns)

    def _taken(self, name: str, x: int, k: int, own: tuple[int, int], part: tuple[int, int]) -> int:
        """The columns of x that a part takes, of each k of them. own: those that the rank has."""
        begin, end = part
        taken = self._value(x, cols=self.values[x].cols // k * (end - begin))
        op = take_columns.OP.name
        attrs: dict[str, Attr] = {"of": own[1] - own[0], "first": begin - own[0], "count": end - begin}
        kernel = choose_kernel(self._split.target, op, "f32")
        self.steps.append(Draft(name=name, op=op, kernel=kernel, inputs=(x,), outputs=(taken,), attrs=attrs))
        return taken

    def _add_up(self, step: Draft, sums: list[int], residual: str | int | None) -> None:
        """Neighbours first, then their sums, and so on; then those of all ranks; what the product added comes last."""
        number = 0

        def added(a: int, b: str | int) -> int:
            nonlocal number
            number += 1
            return self._made(f"{step.name}.sum{number - 1}", add.OP.name, (a, b), {})

        while len(sums) > 1:
            sums = [added(sums[i], sums[i + 1]) for i in range(0, len(sums), 2)]
        if self._split.ranks > 1:
            attrs: dict[str, Attr] = {"ranks": self._split.ranks}
            sums = [self._made(f"{step.name}.all_reduce", all_reduce.OP.name, (sums[0],), attrs)]
        if residual is not None:
            added(sums[0], residual)

    def _made(
        self, name: str, op: str, inputs: tuple[int | str, ...], attrs: dict[str, Attr], cols: int | None = None
    ) -> int:
        """What a new step gives; without cols it is as wide as its first input."""
        first = inputs[0]
        assert isinstance(first, int), "an activation"
        to = self._value(first, cols)
        kernel = choose_kernel(self._split.target, op, "f32")
        self.steps.append(Draft(name=name, op=op, kernel=kernel, inputs=inputs, outputs=(to,), attrs=attrs))
        return to

    def _value(self, like: int, cols: int | None = None) -> int:
        known = self.values[like]
        self.values.append(Value(rows=known.rows, cols=known.cols if cols is None else cols, tensor=""))
        return len(self.values) - 1


def groups_of_parts(plan: Plan) -> dict[str, int]:
    """Product → columns of a group, which decide where the sums of this plan have parts."""
    parts = [step for step in plan.steps if _PART.search(step.name) and "group" in step.attrs]
    return {whole_name(step.name): int(step.attrs["group"]) for step in parts}


def whole_name(name: str) -> str:
    """The name of the product that a product of this name is a part of; the same where it is whole."""
    return _PART.sub("", name)


def _require_kernels(target: Target) -> None:
    try:
        if isinstance(target, CompilesGraph):
            raise NoKernelError("it compiles the graph itself")
        for op in (take_columns.OP, all_reduce.OP):  # sums have parts so that ranks can share them
            choose_kernel(target, op.name, "f32")
    except NoKernelError as error:
        raise BuildError(
            f"{OPTION} is not supported on {target.name}",
            where=OPTION,
            expected="a cpu or cuda target, or ref",
            got=error.what,
            hint=f"leave {OPTION} out, or build for the targets in two calls",
        ) from error


def _weight(step: Draft) -> str:
    at = find_op(step.op).packed
    assert at is not None, "it is a product"
    name = step.inputs[at]
    assert isinstance(name, str), "of a weight"
    return name


def _whole(step: Draft, writers: Mapping[int, Draft]) -> Whole | None:
    """Columns of a product's input that must stay together, where ranks would divide its sum; else None."""
    if step.op == "moe_down":
        return Whole()
    if not _is_plain(step):
        return None
    return _whole_behind(step, writers)


def _is_plain(step: Draft) -> bool:
    return step.op == "matmul" and not step.attrs["gated"] and step.attrs["activation"] == "none"


def _needs_all(step: Draft, writers: Mapping[int, Draft]) -> bool:
    """Whether a step puts columns in order that ranks divide, or norms them: those of an MLP, since the heads of a rank
    are not as many as every other rank's, which `all_gather` asks for."""
    if step.op == gather_columns.OP.name:
        return _whole_behind(step, writers) is not None
    source = _source(step, writers)
    return find_op(step.op).norms and source is not None and source.op == "matmul" and _is_narrow(source)


def _norms_heads(step: Draft, writers: Mapping[int, Draft]) -> bool:
    """Whether a step norms what attention gives."""
    source = _source(step, writers)
    return find_op(step.op).norms and source is not None and source.op == "paged_attention"


def _reads_all(step: Draft, writers: Mapping[int, Draft]) -> bool:
    """Whether a step is a product of such columns."""
    source = _source(step, writers) if _is_plain(step) else None
    return source is not None and _needs_all(source, writers)


def _whole_behind(step: Draft, writers: Mapping[int, Draft]) -> Whole | None:
    """Columns that stay together of the heads or activated numbers that a step reads; None where it reads others."""
    source = _source(step, writers)
    if source is None:
        return None
    if source.op == "paged_attention":
        heads, kv_heads, dim = (int(source.attrs[key]) for key in ("heads", "kv_heads", "head_dim"))
        return Whole(unit=dim, shared=heads // kv_heads * dim)
    narrow = source.op == "matmul" and _is_narrow(source)
    return Whole() if narrow or source.op == "activation" else None


def _is_narrow(product: Draft) -> bool:
    """Whether a product makes what an MLP has between its matrices."""
    return bool(product.attrs["gated"]) or product.attrs["activation"] != "none"


def _source(step: Draft, writers: Mapping[int, Draft]) -> Draft | None:
    """The step that makes a step's first input, whatever rows are taken out of that or gated."""
    ref = step.inputs[0]
    source = writers.get(ref) if isinstance(ref, int) else None
    return _source(source, writers) if source is not None and source.op in FOLLOWED else source


def _group_of(use: WeightUse, parts: int, unit: int) -> int:
    """Columns of a group, so few that each part can have whole groups: what a checkpoint's codes share may be repeated
    for smaller groups, which changes no value."""
    described = use.dtype.weight_format
    if described is None or str(use.precision) not in KEPT:
        return use.group
    smaller = (group for group in described.groups if group <= use.group)  # descending
    fitting = (group for group in smaller if -(-use.shape[-1] // math.lcm(unit, group)) >= parts)
    return next(fitting, use.group)


def _share(columns: int, rank: int, ranks: int) -> tuple[int, int]:
    """Those of a rank, as all_gather puts them side by side."""
    return columns * rank // ranks, columns * (rank + 1) // ranks


def _rows_of(use: WeightUse, begin: int, end: int) -> WeightUse:
    """Rows of a weight, or numbers of a vector, as a weight."""
    name = f"{use.name}.rows"
    return dataclasses.replace(
        use, name=name, tensor=cut_along(use.tensor, name, begin, end, 0), shape=(end - begin, *use.shape[1:])
    )


def _part_of(use: WeightUse, name: str, begin: int, end: int) -> WeightUse:
    """Columns of a weight as a weight."""
    made = cut_along(use.tensor, name, begin, end, len(use.shape) - 1)
    return dataclasses.replace(use, name=name, tensor=made, shape=(*use.shape[:-1], end - begin))


def cut_along(tensor: gs.Tensor, name: str, begin: int, end: int, axis: int) -> gs.Tensor:
    """A range of a weight expression."""
    made = gs.Variable(f"{name}.range")
    ends = [np.array([each], np.int64) for each in (begin, end, axis)]
    given = [tensor, *(gs.Constant(f"{name}.{i}", values=each) for i, each in enumerate(ends))]
    gs.Node(op="Slice", name=name, inputs=given, outputs=[made])
    return made
