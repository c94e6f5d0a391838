"""Plan steps → launches of kernels and products, with every address known before the first step.

Activations lie in the plan's arena as float32, or in the products' type ("narrow") where the plan's buffer says so:
then nothing is converted in between.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ingot.dtypes import DType
from ingot.errors import REBUILD, EngineError
from ingot.plan import CacheGroup, Plan, Rows, Step
from ingot.plugins.cuda.attention import Scores, attention_launches, rope_table_launch, write_launch
from ingot.plugins.cuda.devices import devices_of
from ingot.plugins.cuda.epilogues import epilogue_launch, norm_block
from ingot.plugins.cuda.exchanges import gather_work, receive_work, reduce_work, send_work
from ingot.plugins.cuda.expert_steps import ExpertSteps
from ingot.plugins.cuda.experts import sum_launch
from ingot.plugins.cuda.own_products import OwnProduct
from ingot.plugins.cuda.plan_facts import LIBRARY, WIDE_CODE, takes_library, takes_wide
from ingot.plugins.cuda.plan_places import ROW_THREADS, STRIP
from ingot.plugins.cuda.shapes import prefill_parts, takes_warpgroups
from ingot.plugins.cuda.special_steps import SpecialSteps
from ingot.plugins.cuda.stored_types import check_types
from ingot.plugins.cuda.tilings import fp8_work, in_ranges, matmul_work
from ingot.plugins.cuda.work import Addresses, Bound, Launch, Work, integer, number, pointer, row_grid
from ingot.step_inputs import require_known_inputs

ACTIVATIONS = ("none", "silu", "gelu", "gelu_tanh", "relu", "relu2")  # in the order of the kernels' enum


def bind(plan: Plan, at: Addresses) -> list[Bound]:
    """The work of each step, in order."""
    return _Binder(plan, at).bind()


class _Binder(ExpertSteps, SpecialSteps):
    def bind(self) -> list[Bound]:
        bound = []
        require_known_inputs(self._plan)
        for step in self._plan.steps:
            how = _STEPS.get(step.op)
            if how is None:
                raise EngineError(f"cuda targets have no kernel for {step.op}", where=step.name, got=step.op)
            check_types(step, self._buffers, self._types.weight, narrow=how.narrow)
            narrow = bool(step.outputs) and self._narrow(step.outputs[0])
            bound.append(Bound(step=step, work=tuple(how.bind(self, step, narrow))))
        return bound

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
        return [Launch(kernel=kernel, grid=row_grid(Rows.TOKENS), threads=ROW_THREADS, shared=0, arguments=arguments)]

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
        grid, (threads, shared) = row_grid(buffer.rows), norm_block(hidden)
        return [Launch(kernel="residual_norm", grid=grid, threads=threads, shared=shared, arguments=arguments)]

    def matmul(self, step: Step, narrow: bool) -> list[Work]:
        own = self._product(step, *step.inputs, narrow=narrow)
        if takes_library(step) and own.dtype.is_quantised:
            raise EngineError(
                "cuBLASLt multiplies no codes",
                where=f"step {step.name}",
                expected=step.kernel.removesuffix(LIBRARY),
                got=step.kernel,
                hint=REBUILD,
            )
        return matmul_work(step, own, in_ranges(self._plan, step), self._at.sums)

    def fp8_matmul(self, step: Step, narrow: bool) -> list[Work]:
        codes, scales, *others = step.inputs
        own = self._product(step, codes, *others, narrow=narrow)
        return [*fp8_work(step, own, self._buffer(scales), in_ranges(self._plan, step), self._at.sums)]

    def _product(self, step: Step, x: str, name: str, bias: str, residual: str, *, narrow: bool) -> OwnProduct:
        weight, buffer = self._weights[name], self._buffers[step.outputs[0]]
        n, k = weight.shape
        return OwnProduct(
            y=self._buffer(buffer.name),
            x=self._buffer(x),
            weight=self._weight(name),
            bias=self._weight(bias),
            residual=self._any(residual),
            counts=self._counts(buffer.rows),
            n=n,
            k=k,
            gated=bool(step.attrs["gated"]),
            kind=ACTIVATIONS.index(str(step.attrs["activation"])),
            narrow=narrow,
            dtype=weight.dtype,
            group=int(str(step.attrs["group"])),
            rows=buffer.rows,
        )

    def moe_gate_up(self, step: Step, narrow: bool) -> list[Work]:
        x, ids, weight, bias, lists, *scales = step.inputs
        taken = self._sorted_rows(step, ids, lists, self._weights[weight].shape[0])
        product = dataclasses.replace(
            self._expert_product(step, x, weight, bias, scales),
            y=self._buffer(step.outputs[0]),
            each=taken.slots,
            gated=bool(step.attrs["gated"]),
            kind=ACTIVATIONS.index(str(step.attrs["activation"])),
            narrow=narrow,
            limit=float(step.attrs["limit"]),
            alpha=float(step.attrs["alpha"]),
        )
        return [*self._expert_launches(step, product, taken)]

    def moe_down(self, step: Step, narrow: bool) -> list[Work]:
        x, ids, weights, weight, bias, lists, *scales = step.inputs
        taken = self._sorted_rows(step, ids, lists, self._weights[weight].shape[0])
        product = dataclasses.replace(self._expert_product(step, x, weight, bias, scales), y=self._at.sums)
        y, rows = self._buffer(step.outputs[0]), self._buffers[x].rows
        added = sum_launch(y, self._at.sums, self._buffer(weights), cols=product.n, slots=taken.slots, rows=rows)
        return [*self._expert_launches(step, product, taken), added]

    def add_gated(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        y, a, b, gate = (pointer(self._buffer(name)) for name in (buffer.name, *step.inputs))
        grid, arguments = row_grid(buffer.rows, -(-cols // STRIP)), (y, a, b, gate, integer(cols))
        return [Launch(kernel="add_gated", grid=grid, threads=ROW_THREADS, shared=0, arguments=arguments)]

    def add(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        x, residual = (self._buffer(name) for name in step.inputs)
        y = self._buffer(buffer.name)
        return [epilogue_launch(y, x, cols=cols, rows=buffer.rows, kind=0, narrow=narrow, residual=residual)]

    def cast(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        y, x = self._buffer(buffer.name), self._buffer(step.inputs[0])
        return [epilogue_launch(y, x, cols=cols, rows=buffer.rows, kind=0, narrow=narrow)]

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
                value_norm=bool(step.attrs["value_norm"]),
                keys_as_values=bool(step.attrs["keys_as_values"]),
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
        places, kv = self._places(step, q=step.inputs[0])
        heads = int(step.attrs["heads"])
        launches = attention_launches(
            places,
            kv,
            scores,
            y=self._buffer(step.outputs[0]),
            heads=heads,
            window=int(step.attrs["window"]),
            scale=float(step.attrs["scale"]),
            narrow=narrow,
            parts=prefill_parts(self._tiles.prefill, heads // kv.kv_heads, kv.head_dim),
            exact=self._types.kv is DType.F32,
            multiprocessors=self._multiprocessors(step, kv),
        )
        return [*launches]

    def _multiprocessors(self, step: Step, kv: CacheGroup) -> int:
        """How many the largest GPU of the machine code has, where attention of prompts takes warpgroups; else 0."""
        if not takes_wide(step):
            return 0
        if not takes_warpgroups(WIDE_CODE, kv.dtype, kv.head_dim, kv.tokens_per_block):
            raise EngineError(
                "no warpgroups attend to prompts with such heads",
                where=f"kernel call {step.name}",
                got=f"heads of {kv.head_dim} dims, {kv.tokens_per_block} tokens a block in {kv.dtype.value}",
                hint=REBUILD,
            )
        return max(each.multiprocessors for each in devices_of(WIDE_CODE))

    def gather_rows(self, step: Step, narrow: bool) -> list[Work]:
        _, cols = self._shape(step)
        x, rows = step.inputs
        arguments = (pointer(self._buffer(step.outputs[0])), pointer(self._buffer(x)), self._table(rows), integer(cols))
        grid = row_grid(Rows.LOGITS)
        return [Launch(kernel="gather_rows", grid=grid, threads=ROW_THREADS, shared=0, arguments=arguments)]

    def softcap(self, step: Step, narrow: bool) -> list[Work]:
        return [self._by_number(step, "soft_cap", float(step.attrs["cap"]))]

    def scale(self, step: Step, narrow: bool) -> list[Work]:
        return [self._by_number(step, "scale_rows", float(step.attrs["factor"]))]

    def all_reduce(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        return reduce_work(
            y=self._buffer(buffer.name),
            x=self._buffer(step.inputs[0]),
            scratch=self._at.exchanged,
            counts=self._counts(buffer.rows),
            cols=cols,
            ranks=int(step.attrs["ranks"]),
            place=self._at.place,
            rows=buffer.rows,
        )

    def all_gather(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        return gather_work(
            y=self._buffer(buffer.name),
            x=self._buffer(step.inputs[0]),
            scratch=self._at.exchanged,
            cols=cols,
            ranks=int(step.attrs["ranks"]),
            place=self._at.place,
            rows=buffer.rows,
        )

    def send(self, step: Step, narrow: bool) -> list[Work]:
        buffer = self._buffers[step.inputs[0]]
        return [send_work(self._buffer(buffer.name), cols=buffer.cols, rows=buffer.rows)]

    def recv(self, step: Step, narrow: bool) -> list[Work]:
        buffer, cols = self._shape(step)
        return [receive_work(self._buffer(buffer.name), cols=cols, rows=buffer.rows)]


class _StepKernels(NamedTuple):
    """What launches the kernels of an op. narrow: they write their first output in the products' type where the plan's
    buffer says so; alone: TensorRT targets, which share the others, do not have the op."""

    bind: Callable[[_Binder, Step, bool], Sequence[Work]]
    narrow: bool = False
    alone: bool = False


_STEPS: dict[str, _StepKernels] = {
    "embedding": _StepKernels(_Binder.embedding),
    "rope_table": _StepKernels(_Binder.rope_table),
    "rms_norm": _StepKernels(_Binder.norm, narrow=True),
    "layer_norm": _StepKernels(_Binder.norm, narrow=True),
    "matmul": _StepKernels(_Binder.matmul, narrow=True),
    "fp8_matmul": _StepKernels(_Binder.fp8_matmul, narrow=True, alone=True),
    "round_to_fp8": _StepKernels(_Binder.round_to_fp8, alone=True),
    "round_slots_to_fp8": _StepKernels(_Binder.round_to_fp8, alone=True),
    "add": _StepKernels(_Binder.add, narrow=True),
    "cast": _StepKernels(_Binder.cast, narrow=True, alone=True),
    "activation": _StepKernels(_Binder.activation, narrow=True),
    "rope_kv_write": _StepKernels(_Binder.rope_kv_write),
    "paged_attention": _StepKernels(_Binder.paged_attention, narrow=True),
    "gather_rows": _StepKernels(_Binder.gather_rows),
    "softcap": _StepKernels(_Binder.softcap),
    "scale": _StepKernels(_Binder.scale),
    "moe_route": _StepKernels(_Binder.moe_route, alone=True),
    "sort_by_expert": _StepKernels(_Binder.sort_by_expert, alone=True),
    "moe_gate_up": _StepKernels(_Binder.moe_gate_up, narrow=True, alone=True),
    "moe_down": _StepKernels(_Binder.moe_down, alone=True),
    "fp8_moe_gate_up": _StepKernels(_Binder.moe_gate_up, narrow=True, alone=True),
    "fp8_moe_down": _StepKernels(_Binder.moe_down, alone=True),
    "add_gated": _StepKernels(_Binder.add_gated, alone=True),
    "sigmoid_gate": _StepKernels(_Binder.sigmoid_gate, narrow=True, alone=True),
    "latent_kv_write": _StepKernels(_Binder.latent_kv_write, alone=True),
    "latent_attention": _StepKernels(_Binder.latent_attention, narrow=True, alone=True),
    "head_matmul": _StepKernels(_Binder.head_matmul, narrow=True, alone=True),
    "rope_query": _StepKernels(_Binder.rope_query, alone=True),
    "take_columns": _StepKernels(_Binder.take_columns, alone=True),
    "gather_columns": _StepKernels(_Binder.gather_columns, narrow=True, alone=True),
    "join_columns": _StepKernels(_Binder.join_columns, alone=True),
    "mix_streams": _StepKernels(_Binder.mix_streams, alone=True),
    "add_to_streams": _StepKernels(_Binder.add_to_streams, alone=True),
    "match_magnitude": _StepKernels(_Binder.match_magnitude, alone=True),
    "cut_below": _StepKernels(_Binder.cut_below, alone=True),
    "causal_conv": _StepKernels(_Binder.causal_conv, alone=True),
    "linear_attention": _StepKernels(_Binder.linear_attention, alone=True),
    "gated_norm": _StepKernels(_Binder.gated_norm, narrow=True, alone=True),
    "all_reduce": _StepKernels(_Binder.all_reduce, alone=True),
    "all_gather": _StepKernels(_Binder.all_gather, alone=True),
    "send": _StepKernels(_Binder.send, alone=True),
    "recv": _StepKernels(_Binder.recv, alone=True),
}
OPS = tuple(_STEPS)
OPS_ALONE = frozenset(op for op, kernels in _STEPS.items() if kernels.alone)
NARROW = frozenset(op for op, kernels in _STEPS.items() if kernels.narrow)
