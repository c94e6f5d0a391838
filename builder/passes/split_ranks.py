"""One rank's share of a program whose sums are made in parts (`--tp_size`): heads, columns of each MLP, vocabulary.

    every rank, whole            a rank's share                      together
    embedding, norms, residuals  qkv, attention (its heads)          attention_out: all_reduce
                                 gate_up, up (its columns of down)   down, moe_down: all_reduce
                                 moe_gate_up (of every expert)
                                 lm_head (its rows)                  logits: all_gather

Rows of a weight are quantised one by one, so that a share of them has the codes of the whole. Everything that decides
about precision has looked at the whole model before.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import onnx_graphsurgeon as gs

from ingot.builder.kept import panels_alike
from ingot.builder.lower import Lowering, ModelShape
from ingot.builder.memory import Value
from ingot.builder.pack import WeightUse
from ingot.builder.passes.base import PassReport
from ingot.builder.passes.split_sums import SplitSums, cut_along
from ingot.builder.program import Draft, Program
from ingot.builder.select import choose_kernel
from ingot.errors import BuildError
from ingot.plan import Attr
from ingot.plugins.ops import activation, all_gather, join_columns, rope_query, sigmoid_gate, take_columns
from ingot.plugins.registry import find_op
from ingot.weight_formats import KEPT, PANEL

NAME = "split_ranks"
OPTION = "--tp_size"
Range = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitRanks:
    """sums: the pass before this one, of the same rank. kv_heads: gets those of this rank, by layer: the first, the one
    behind the last, and how many the layer has."""

    sums: SplitSums
    kv_heads: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)

    def __call__(self, program: Program) -> tuple[Program, PassReport]:
        """Raises BuildError where a rank cannot have a share."""
        work = _Work(self, program)
        for value, share in self.sums.shares.items():
            work.divide(value, share)
        assert program.logits is not None, "stages are cut after this"
        work.divide_logits(program.logits)
        return work.program(program), PassReport(name=NAME, fired=work.count)


def own_heads(shape: ModelShape, ranks: Sequence[SplitRanks]) -> ModelShape:
    """A model's shape with the key heads of a rank. ranks: the passes that have run, if any."""
    layers = list(shape.layers)
    for each in ranks:
        for layer, (low, high, count) in each.kv_heads.items():
            layers[layer] = dataclasses.replace(
                layers[layer], kv_heads=high - low, heads_before=low, heads_behind=count - high
            )
    return dataclasses.replace(shape, layers=tuple(layers))


@dataclasses.dataclass(kw_only=True, slots=True)
class _Taken:
    """Rows of a weight in its place, of which they may be several steps': slopes are those of all layers.

    name     of these rows
    readers  steps that have them
    """

    ranges: list[Range]
    name: str
    readers: set[str] = dataclasses.field(default_factory=set)


class _Work:
    """Steps and values while they change."""

    def __init__(self, split: SplitRanks, program: Program) -> None:
        self.count = 0
        self._split, self._sums = split, split.sums
        self._steps = {step.name: step for step in program.steps}
        self._values = list(program.values)
        self._writers = {value: step.name for step in program.steps for value in step.outputs if value is not None}
        self._readers = Counter(ref for step in program.steps for ref in step.inputs)
        self._before: dict[str, list[Draft]] = {}  # step → those that come right before it
        self._after: dict[str, Draft] = {}  # step → one that comes right behind it
        self._taken: dict[str, _Taken] = {}  # by the name of a weight

    def program(self, whole: Program) -> Program:
        """What has become of the whole."""
        _require_no_others(self._taken, self._readers)
        steps: list[Draft] = []
        for step in whole.steps:
            steps += [*self._before.get(step.name, ()), self._steps[step.name]]
            if step.name in self._after:
                steps.append(self._after[step.name])
        return dataclasses.replace(whole, steps=tuple(steps), values=tuple(self._values))

    def divide(self, value: int, share: Range) -> None:
        """The step that makes a value makes these columns alone."""
        self._require_readers(value, 1 if value in self._sums.gathered else self._sums.parts // self._sums.ranks)
        self._divide(value, share)

    def _divide(self, value: int, share: Range) -> None:
        step, cols = self._steps[self._writers[value]], self._values[value].cols
        self._narrow(value, share[1] - share[0])
        op = find_op(step.op)
        if op.copies_rows:
            source = step.inputs[0]
            assert isinstance(source, int), "it takes rows of an activation"
            self._require_readers(source, 1)
            self._divide(source, share)
        elif op.reads_kv and not op.latent:
            self._divide_heads(step, share)
        elif op in (activation.OP, sigmoid_gate.OP):  # of a gate, and an up beside it; of heads, and their gate
            self._divide_operands(step, share)
        elif op.is_matmul and (op.residual is None or step.inputs[op.residual] is None):
            rows = _rows(share, self._weight(step).shape[0], gated=op.gated(step.attrs))
            self._take_rows(step, 1, rows)
            self._take_rows(step, 2, rows)
        elif op.experts and op.packed is not None and "activation" in op.attrs:  # their first half
            (experts, n, _), gated = self._weight(step, op.packed).shape, op.gated(step.attrs)
            slots = cols // (n // 2 if gated else n)  # experts that a row takes
            self._narrow(value, slots * (share[1] - share[0]))
            rows = _rows(share, n, gated=gated)
            self._take_rows(step, op.packed, rows)
            of_experts = [(i * n + low, i * n + high) for i in range(experts) for low, high in rows]
            self._take_rows(step, op.packed + 1, of_experts)
        else:
            raise _refused(step.name, f"what is added up comes from {step.op}")
        self.count += 1

    def _divide_operands(self, step: Draft, share: Range) -> None:
        """What cannot be divided, such as a number that depends on all columns of a row, is computed by every rank,
        which takes its columns."""
        for at, ref in enumerate(step.inputs):
            if not isinstance(ref, int):
                continue
            if self._divides(ref):
                self._divide(ref, share)
            else:
                self._take_columns(step, at, ref, share)

    def _divides(self, value: int) -> bool:
        """Whether a rank can make columns of a value that only one step reads."""
        step = self._steps[self._writers[value]]
        op, source = find_op(step.op), step.inputs[0]
        if self._readers[value] != 1:
            return False
        if op.is_matmul:
            return op.residual is None or step.inputs[op.residual] is None
        if op.copies_rows:
            return isinstance(source, int) and self._divides(source)
        return op is activation.OP or (op.reads_kv and not op.latent)

    def _take_columns(self, step: Draft, at: int, ref: int, share: Range) -> None:
        """Right before a step, whose input `at` has these columns from now on."""
        whole, (begin, end) = self._values[ref], share
        self._values.append(dataclasses.replace(whole, cols=end - begin, tensor=""))
        taken, op = len(self._values) - 1, take_columns.OP.name
        attrs: dict[str, Attr] = {"of": whole.cols, "first": begin, "count": end - begin}
        kernel = choose_kernel(self._sums.target, op, "f32")
        name = f"{step.name}.columns{at}"
        draft = Draft(name=name, op=op, kernel=kernel, inputs=(ref,), outputs=(taken,), attrs=attrs)
        self._before.setdefault(step.name, []).append(draft)
        given = list(self._steps[step.name].inputs)
        given[at] = taken
        self._steps[step.name] = dataclasses.replace(self._steps[step.name], inputs=tuple(given))

    def _require_readers(self, value: int, count: int) -> None:
        """Nobody else may read what is divided."""
        if self._readers[value] != count:
            raise _refused(self._writers[value], "another kernel call reads what is added up")

    def _divide_heads(self, attention: Draft, share: Range) -> None:
        """Attention, the step that writes its keys and values, and the product of all three."""
        heads, kv_heads, dim = (int(attention.attrs[key]) for key in ("heads", "kv_heads", "head_dim"))
        begin, end = share[0] // dim, share[1] // dim
        low, high = begin * kv_heads // heads, -(-end * kv_heads // heads)
        own, keys, group = end - begin, high - low, heads // kv_heads
        shares = {min(end, (key + 1) * group) - max(begin, key * group) for key in range(low, high)}
        if len(shares) > 1:
            raise _refused(
                attention.name,
                f"{heads} query heads of {kv_heads} key heads: a rank would have heads {begin} to {end}, which share "
                f"their {keys} key heads unevenly",
                "leave --sum_parts out, or give a smaller quantisation group",
            )
        query = attention.inputs[0]
        assert isinstance(query, int), "attention reads queries"
        write = self._steps[self._writers[query]]
        writes = find_op(write.op).writes_kv
        if not writes and find_op(write.op) is not rope_query.OP:
            raise _refused(attention.name, f"its queries come from {write.op}")
        self._require_readers(query, 1)
        norms = [self._sums.lowering.use(ref).shape for ref in write.inputs[2:4] if isinstance(ref, str)]
        if any(shape != (dim,) for shape in norms):
            raise _refused(attention.name, "a norm takes all heads of a token together")
        qkv = write.inputs[0]
        assert isinstance(qkv, int), "of an activation"
        self._require_readers(qkv, 1)
        count = 0 if not writes else 1 if write.attrs.get("keys_as_values") else 2
        ranges = [(begin, end), *((start + low, start + high) for start in (heads, heads + kv_heads)[:count])]
        self._divide_joined(qkv, [(first * dim, last * dim) for first, last in ranges], attention.name)
        for at in (1, 2):  # its sinks and slopes
            self._take_rows(attention, at, [(begin, end)])
        self._narrow(query, own * dim)
        for step in (attention, write):
            attrs = {**step.attrs, "heads": own, **({"kv_heads": keys} if "kv_heads" in step.attrs else {})}
            self._steps[step.name] = dataclasses.replace(self._steps[step.name], attrs=attrs)
        held = self._split.kv_heads.setdefault(int(attention.attrs["layer"]), (low, high, kv_heads))
        if held != (low, high, kv_heads):
            raise _refused(attention.name, "a rank would need other key heads of this layer than of the layer it reads")

    def _divide_joined(self, value: int, ranges: list[Range], attention: str) -> None:
        """Queries, keys and values, which one product makes, or several side by side."""
        step, begin = self._steps[self._writers[value]], 0
        made = step.inputs if find_op(step.op) is join_columns.OP else (value,)
        for part in (ref for ref in made if isinstance(ref, int)):
            product, cols = self._steps[self._writers[part]], self._values[part].cols
            if not find_op(product.op).is_matmul or product.attrs["gated"] or product.attrs["activation"] != "none":
                raise _refused(attention, "queries, keys and values are not one matmul")
            self._require_readers(part, 1)
            both = ((max(first - begin, 0), min(last - begin, cols)) for first, last in ranges)
            own = [each for each in both if each[0] < each[1]]
            for at in (1, 2):
                self._take_rows(product, at, own)
            self._narrow(part, sum(last - first for first, last in own))
            begin += cols
        self._narrow(value, sum(last - first for first, last in ranges))

    def divide_logits(self, logits: int) -> None:
        """lm_head makes the logits of a part of the vocabulary, and the ranks put theirs together."""
        step = self._steps[self._writers[logits]]
        while find_op(step.op).monotone:
            logits = next(ref for ref in step.inputs if isinstance(ref, int))
            step = self._steps[self._writers[logits]]
        if not find_op(step.op).is_matmul or step.attrs["gated"] or step.inputs[3] is not None:
            raise _refused(step.name, f"the logits come from {step.op}")
        vocab, ranks, rank = self._weight(step).shape[0], self._sums.ranks, self._sums.rank
        begin, end = (vocab * each // ranks for each in (rank, rank + 1))
        if vocab < ranks:
            raise _refused(step.name, f"a vocabulary of {vocab}")
        for at in (1, 2):
            self._take_rows(step, at, [(begin, end)])
        own = dataclasses.replace(self._values[logits], cols=end - begin, tensor="")
        self._values.append(own)
        made = len(self._values) - 1
        self._steps[step.name] = dataclasses.replace(self._steps[step.name], outputs=(made,))
        op = all_gather.OP.name
        attrs: dict[str, Attr] = {"ranks": ranks, "columns": vocab}
        kernel = choose_kernel(self._sums.target, op, "f32")
        self._after[step.name] = Draft(
            name=f"{step.name}.{op}", op=op, kernel=kernel, inputs=(made,), outputs=(logits,), attrs=attrs
        )
        self.count += 1

    def _narrow(self, value: int, cols: int) -> None:
        """An activation that only a rank's own steps read has fewer columns, and no name in the graph any more."""
        self._values[value] = Value(rows=self._values[value].rows, cols=cols, tensor="")

    def _take_rows(self, step: Draft, at: int, ranges: list[Range]) -> None:
        """Rows of a step's weight, or numbers of a vector, where input `at` is there."""
        given = list(self._steps[step.name].inputs)
        name = given[at]
        if not isinstance(name, str):
            return
        if name not in self._taken:
            self._taken[name] = _Taken(ranges=ranges, name=rows_of(self._sums.lowering, name, ranges))
        taken = self._taken[name]
        if taken.ranges != ranges:
            raise _refused(step.name, f"weight {name} is also another kernel call's, which needs other rows of it")
        taken.readers.add(step.name)
        given[at] = taken.name
        self._steps[step.name] = dataclasses.replace(self._steps[step.name], inputs=tuple(given))

    def _weight(self, step: Draft, at: int = 1) -> WeightUse:
        name = step.inputs[at]
        assert isinstance(name, str), "of a weight"
        return self._sums.lowering.use(name)


def _require_no_others(divided: Mapping[str, _Taken], readers: Mapping[str | int | None, int]) -> None:
    """Nobody may read all rows of a weight that is divided."""
    for name, taken in divided.items():
        if len(taken.readers) < readers[name]:
            raise _refused(min(taken.readers), f"weight {name} is also another kernel call's, which needs all of it")


def _rows(share: Range, n: int, *, gated: bool) -> list[Range]:
    """Rows of a weight with n of them that make columns of a product: of gates and of ups, where it is gated."""
    return [share, (n // 2 + share[0], n // 2 + share[1])] if gated else [share]


def rows_of(lowering: Lowering, name: str, ranges: list[Range]) -> str:
    """A weight of these rows of another one, or of each of its matrices, takes its place; its name."""
    use = lowering.use(name)
    axis = max(0, len(use.shape) - 2)
    parts = [cut_along(use.tensor, f"{name}.rows{i}", *each, axis) for i, each in enumerate(ranges)]
    made = parts[0]
    if len(parts) > 1:
        made = gs.Variable(f"{name}.rows")
        gs.Node(op="Concat", name=made.name, attrs={"axis": axis}, inputs=parts, outputs=[made])
    count = sum(end - begin for begin, end in ranges)
    if str(use.precision) in KEPT and not panels_alike(made):
        raise _refused(
            name,
            "rows with different tables or formats (q, k, v or gate, up of a quantised checkpoint), and the cut between"
            f" two ranks is not at a multiple of {PANEL} rows",
        )
    lowering.drop_weights({name})
    return lowering.add_weight(
        dataclasses.replace(use, tensor=made, shape=(*use.shape[:axis], count, *use.shape[axis + 1 :]))
    )


def _refused(where: str, got: str, hint: str = f"try another {OPTION}") -> BuildError:
    return BuildError(
        f"{OPTION} is not supported for a layer of this model",
        where=f"{OPTION}: {where}",
        got=got,
        hint=f"leave {OPTION} out, since an engine of one rank can be built of every model; or {hint}",
    )
