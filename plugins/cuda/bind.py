"""Plan steps → launches of kernels and products, with every address known before the first step.

Activations lie in the plan's arena as float32, or in the products' type ("narrow") where the plan's buffer says so:
then nothing is converted in between.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ingot.dtypes import DType
from ingot.errors import REBUILD, EngineError
from ingot.plan import Buffer, CacheGroup, Plan, Rows, Step, Weight
from ingot.plugins.cuda.attention import Places, Scores, attention_launches, rope_table_launch, write_launch
from ingot.plugins.cuda.compiler import Specialisation
from ingot.plugins.cuda.epilogues import epilogue_launch, library_work
from ingot.plugins.cuda.gpu import Argument
from ingot.plugins.cuda.own_products import FEW_ROWS, OwnProduct, product_launches
from ingot.plugins.cuda.shapes import MAX_GROUP, MAX_HEAD_DIM
from ingot.plugins.cuda.stored_types import check_types
from ingot.plugins.cuda.work import (
    Addresses,
    Bound,
    Launch,
    ScratchBytes,
    Work,
    cache_places,
    integer,
    number,
    pointer,
    row_grid,
)
from ingot.plugins.registry import find_op
from ingot.step_inputs import require_known_inputs

ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2")  # in the order of the kernels' enum
LIBRARY = ".cublaslt"  # ends the names of kernels that leave products of more than a few rows to cuBLASLt
CODE_LAYOUT = "cubin7."  # of the machine code among the weights; the number counts changes of kernels' parameters

# input of a plan → table of a step, see step_tables.py; attention's items hold query_starts and past_lengths
_TABLES = {
    "input_ids": "ids",
    "positions": "positions",
    "token_sequences": "sequences",
    "block_tables": "tables",
    "logit_rows": "rows",
}
_ROW_THREADS = 256
_WEIGHT_ALIGNMENT = 256  # bytes


def _typed_input(step: Step) -> int | None:
    """The input whose type kernels are compiled for: a packed weight, or the first table."""
    op = find_op(step.op)
    return op.packed if op.packed is not None else next(iter(op.tables), None)


def specialisation(plan: Plan) -> Specialisation:
    """What the plan's kernels are compiled for. Raises EngineError for what they cannot do."""
    typed = {step.inputs[at] for step in plan.steps if (at := _typed_input(step)) is not None}
    stored = {weight.dtype for weight in plan.weights if weight.name in typed}
    codes = any(each.is_quantised for each in stored)
    types = {DType.BF16 if each.is_quantised else each for each in stored}
    if len(types) > 1:
        raise EngineError(
            "the cuda kernels do not take weights of these types together",
            got=", ".join(sorted(each.value for each in stored)),
        )
    groups = {int(s.attrs["heads"]) // int(s.attrs["kv_heads"]) for s in plan.steps if find_op(s.op).reads_kv}
    kv, sizes = plan.caches[0], {(each.kv_heads, each.head_dim) for each in plan.caches}
    if kv.head_dim > MAX_HEAD_DIM or max(groups, default=1) > MAX_GROUP or len(groups) > 1 or len(sizes) > 1:
        raise EngineError(
            "attention with heads of these sizes is not supported on cuda targets",
            expected=f"at most {MAX_HEAD_DIM} dims and {MAX_GROUP} query heads per KV head, the same in all layers",
            got=f"KV heads and their dims {sorted(sizes)}, groups of {sorted(groups)}",
        )
    return Specialisation(
        weight=types.pop() if types else kv.dtype,
        kv=kv.dtype,
        head_dim=kv.head_dim,
        tokens_per_block=plan.tokens_per_block,
        codes=codes,
    )


def group_of(plan: Plan) -> int:
    """Query heads of one KV head."""
    step = next((step for step in plan.steps if find_op(step.op).reads_kv), None)
    return 1 if step is None else int(step.attrs["heads"]) // int(step.attrs["kv_heads"])


def scratch_bytes(plan: Plan) -> ScratchBytes:
    """For the largest step within the limits."""
    rows = {Rows.TOKENS: plan.limits.max_num_tokens, Rows.LOGITS: plan.limits.max_logit_rows}
    buffers = {buffer.name: buffer for buffer in plan.buffers}
    weights = {weight.name: weight for weight in plan.weights}
    products = [
        (rows[buffers[s.inputs[0]].rows], weights[s.inputs[1]]) for s in plan.steps if find_op(s.op).packed is not None
    ]
    return ScratchBytes(
        sums=max((4 * count * weight.shape[0] for count, weight in products), default=0),
        inputs=max((2 * count * weight.shape[1] for count, weight in products), default=0),
    )


def bind(plan: Plan, at: Addresses) -> list[Bound]:
    """The work of each step, in order."""
    return _Binder(plan, at).bind()


def needs_library(plan: Plan) -> bool:
    """Whether cuBLASLt computes products of the plan."""
    return any(_takes_library(step) for step in plan.steps)


def _takes_library(step: Step) -> bool:
    """Whether cuBLASLt computes a step's product where there are more than a few rows."""
    return step.kernel.endswith(LIBRARY)


class _Binder:
    def __init__(self, plan: Plan, at: Addresses) -> None:
        self._plan, self._at = plan, at
        self._types = specialisation(plan)
        self._buffers = {buffer.name: buffer for buffer in plan.buffers}
        self._weights = {weight.name: weight for weight in plan.weights}
        self._offsets, _ = weight_places(plan)

    def bind(self) -> list[Bound]:
        bound = []
        require_known_inputs(self._plan)
        for step in self._plan.steps:
            how = _STEPS.get(step.op)
            if how is None:
                raise EngineError(f"cuda targets have no kernel for {step.op}", where=step.name, got=step.op)
            check_types(step, self._buffers, self._types.weight, narrow=how.narrow)
            bound.append(Bound(step=step, work=tuple(how.bind(self, step, self._narrow(step.outputs[0])))))
        return bound

    def _narrow(self, name: str) -> bool:
        """Whether what lies in a buffer has the products' type."""
        return self._buffers[name].dtype is not DType.F32

    # Addresses and sizes.

    def _buffer(self, name: str) -> int:
        return self._at.arena + self._buffers[name].offset

    def _weight(self, name: str) -> int:
        """0 where the input is absent."""
        return self._at.weights + self._offsets[name] if name else 0

    def _any(self, name: str) -> int:
        return self._buffer(name) if name in self._buffers else self._weight(name)

    def _shape(self, step: Step) -> tuple[Buffer, int]:
        """The first output and its columns."""
        buffer = self._buffers[step.outputs[0]]
        return buffer, buffer.cols

    def _table(self, name: str) -> Argument:
        return pointer(self._table_at(name))

    def _table_at(self, name: str) -> int:
        """Where an input of the plan lies; the items of attention are made of the others."""
        return self._at.tables[_TABLES[name]]

    # One method per op; each returns the work of one step.

    def embedding(self, step: Step, narrow: bool) -> list[Work]:
        _, hidden = self._shape(step)
        arguments = (
            pointer(self._buffer(step.outputs[0])),
            pointer(self._weight(step.inputs[0])),
            pointer(self._weight(step.inputs[1])),
            self._table("input_ids"),
            pointer(self._at.drawn),
            self._table("positions"),
            integer(hidden),
            number(step.attrs["scale"]),
        )
        kernel = "embed_codes" if self._weights[step.inputs[0]].dtype.is_quantised else "embed"
        return [Launch(kernel=kernel, grid=row_grid(Rows.TOKENS), threads=_ROW_THREADS, shared=0, arguments=arguments)]

    def rope_table(self, step: Step, narrow: bool) -> list[Work]:
        _, cols = self._shape(step)
        return [
            rope_table_launch(
                self._buffer(step.outputs[0]),
                inv_freq=self._weight(step.inputs[0]),
                half=cols // 2,
                positions=self._table_at("positions"),
                scale=float(step.attrs["scale"]),
            )
        ]

    def norm(self, step: Step, narrow: bool) -> list[Work]:
        layer = step.op == "layer_norm"
        x, weight, bias, residual = step.inputs if layer else (*step.inputs[:2], "", step.inputs[2])
        buffer, hidden = self._shape(step)
        total = step.outputs[1] if len(step.outputs) > 1 else ""
        arguments = (
            pointer(self._buffer(step.outputs[0])),
            pointer(self._any(total)),
            pointer(self._buffer(x)),
            pointer(self._any(residual)),
            pointer(self._weight(weight)),
            pointer(self._weight(bias)),
            integer(hidden),
            number(step.attrs["eps"]),
            integer(layer),
            integer(narrow),
        )
        grid = row_grid(buffer.rows)
        return [Launch(kernel="residual_norm", grid=grid, threads=_ROW_THREADS, shared=4 * hidden, arguments=arguments)]

    def matmul(self, step: Step, narrow: bool) -> list[Work]:
        x, weight_name, bias, residual = step.inputs
        weight, buffer = self._weights[weight_name], self._buffers[step.outputs[0]]
        n, k = weight.shape
        work: list[Work] = []
        source = self._buffer(x)
        if self._types.weight is not DType.F32 and not self._narrow(x):
            rows = self._buffers[x].rows
            work.append(epilogue_launch(self._at.inputs, source, cols=k, rows=rows, kind=0, narrow=True))
            source = self._at.inputs
        own = OwnProduct(
            y=self._buffer(step.outputs[0]),
            x=source,
            weight=self._weight(weight_name),
            bias=self._weight(bias),
            residual=self._any(residual),
            counts=self._at.tables["counts"] + (0 if buffer.rows is Rows.TOKENS else 4),
            n=n,
            k=k,
            gated=bool(step.attrs["gated"]),
            kind=ACTIVATIONS.index(str(step.attrs["activation"])),
            narrow=narrow,
            dtype=weight.dtype,
            group=int(str(step.attrs["group"])),
            rows=buffer.rows,
        )
        if not _takes_library(step):
            return [*work, *product_launches(own)]
        if weight.dtype.is_quantised:
            raise EngineError(
                "cuBLASLt multiplies no codes",
                where=f"step {step.name}",
                expected=step.kernel.removesuffix(LIBRARY),
                got=step.kernel,
                hint=REBUILD,
            )
        return [*work, *product_launches(own, FEW_ROWS), *library_work(own, self._at.sums)]

    def add(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        x, residual = (self._buffer(name) for name in step.inputs)
        y = self._buffer(buffer.name)
        return [epilogue_launch(y, x, cols=cols, rows=buffer.rows, kind=0, narrow=narrow, residual=residual)]

    def activation(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        kind = ACTIVATIONS.index(str(step.attrs["activation"]))
        y, x, up = self._buffer(buffer.name), self._buffer(step.inputs[0]), self._any(step.inputs[1])
        return [epilogue_launch(y, x, cols=cols, rows=buffer.rows, kind=kind, narrow=narrow, up=up)]

    def rope_kv_write(self, step: Step, narrow: bool) -> list[Work]:
        qkv, cos_sin, q_norm, k_norm, positions, sequences, _ = step.inputs
        return [
            write_launch(
                *self._places(step, q=step.outputs[0]),
                qkv=self._buffer(qkv),
                cos_sin=self._any(cos_sin),
                q_norm=self._weight(q_norm),
                k_norm=self._weight(k_norm),
                positions=self._table_at(positions),
                sequences=self._table_at(sequences),
                heads=int(step.attrs["heads"]),
                rotary_dim=self._buffers[cos_sin].cols if cos_sin else 0,
                interleaved=bool(step.attrs["interleaved"]),
                wide_norm=bool(q_norm) and self._weights[q_norm].shape[0] != step.attrs["head_dim"],
                eps=float(step.attrs["norm_eps"]),
            )
        ]

    def paged_attention(self, step: Step, narrow: bool) -> list[Work]:
        scores = Scores(
            softcap=float(step.attrs["softcap"]),
            sinks=self._weight(step.inputs[1]),
            slopes=self._weight(step.inputs[2]),
            bf16_bias=bool(step.attrs["bf16_bias"]),
            growth=float(step.attrs["growth"]),
            growth_every=int(step.attrs["growth_every"]),
        )
        launches = attention_launches(
            *self._places(step, q=step.inputs[0]),
            scores,
            y=self._buffer(step.outputs[0]),
            heads=int(step.attrs["heads"]),
            window=int(step.attrs["window"]),
            scale=float(step.attrs["scale"]),
            narrow=narrow,
        )
        return [*launches]

    def gather_rows(self, step: Step, narrow: bool) -> list[Work]:
        _, cols = self._shape(step)
        x, rows = step.inputs
        arguments = (pointer(self._buffer(step.outputs[0])), pointer(self._buffer(x)), self._table(rows), integer(cols))
        grid = row_grid(Rows.LOGITS)
        return [Launch(kernel="gather_rows", grid=grid, threads=_ROW_THREADS, shared=0, arguments=arguments)]

    def softcap(self, step: Step, narrow: bool) -> list[Work]:
        return [self._by_number(step, "soft_cap", float(step.attrs["cap"]))]

    def scale(self, step: Step, narrow: bool) -> list[Work]:
        return [self._by_number(step, "scale_rows", float(step.attrs["factor"]))]

    # Parts of several ops.

    def _by_number(self, step: Step, kernel: str, value: float) -> Launch:
        """A kernel that computes each element of y from the same of x and a number."""
        buffer, cols = self._shape(step)
        arguments = (
            pointer(self._buffer(step.outputs[0])),
            pointer(self._buffer(step.inputs[0])),
            integer(cols),
            number(value),
        )
        grid = row_grid(buffer.rows, -(-cols // _ROW_THREADS))
        return Launch(kernel=kernel, grid=grid, threads=_ROW_THREADS, shared=0, arguments=arguments)

    def _places(self, step: Step, *, q: str) -> tuple[Places, CacheGroup]:
        layer, tables = int(step.attrs["layer"]), self._at.tables
        kv, keys, values = cache_places(self._plan.caches, self._at, layer)
        places = Places(
            keys=keys,
            values=values,
            tables=self._table_at("block_tables")
            + 4 * (self._at.table_width // len(self._plan.caches)) * self._plan.group_of(layer),
            width=self._at.table_width,
            q=self._buffer(q),
            decode=tables["decode"],
            prefill=tables["prefill"],
            partial=self._at.partial,
            stats=self._at.stats,
        )
        return places, kv


class _StepKernels(NamedTuple):
    """What launches the kernels of an op. narrow: they write their first output in the products' type where the plan's
    buffer says so."""

    bind: Callable[[_Binder, Step, bool], Sequence[Work]]
    narrow: bool = False


_STEPS: dict[str, _StepKernels] = {
    "embedding": _StepKernels(_Binder.embedding),
    "rope_table": _StepKernels(_Binder.rope_table),
    "rms_norm": _StepKernels(_Binder.norm, narrow=True),
    "layer_norm": _StepKernels(_Binder.norm, narrow=True),
    "matmul": _StepKernels(_Binder.matmul, narrow=True),
    "add": _StepKernels(_Binder.add, narrow=True),
    "activation": _StepKernels(_Binder.activation, narrow=True),
    "rope_kv_write": _StepKernels(_Binder.rope_kv_write),
    "paged_attention": _StepKernels(_Binder.paged_attention, narrow=True),
    "gather_rows": _StepKernels(_Binder.gather_rows),
    "softcap": _StepKernels(_Binder.softcap),
    "scale": _StepKernels(_Binder.scale),
}
OPS = tuple(_STEPS)
NARROW = frozenset(op for op, kernels in _STEPS.items() if kernels.narrow)


def weight_places(plan: Plan) -> tuple[dict[str, int], int]:
    """(where each weight begins on the device, bytes of all): as in the file, but pieces of one weight lie together."""
    if all(len(weight.pieces) == 1 for weight in plan.weights):
        return {weight.name: weight.pieces[0].offset for weight in plan.weights}, plan.weight_bytes
    places, end = {}, 0
    for weight in plan.weights:
        places[weight.name] = end
        end += -(-weight.nbytes // _WEIGHT_ALIGNMENT) * _WEIGHT_ALIGNMENT
    return places, end


def code_weight(plan: Plan) -> Weight:
    """The piece of the weights section that holds the machine code. Raises EngineError where there is none."""
    found = next((weight for weight in plan.weights if weight.layout.startswith(CODE_LAYOUT)), None)
    if found is None:
        raise EngineError("the engine holds no machine code that this version of ingot runs", hint="rebuild the engine")
    return found
