"""auto activations: int8 per token for every product that loses little by it on the sample text."""

import dataclasses
import math
from collections.abc import Callable, Mapping

from ingot.builder.calibrate import activation_errors, sample_ids
from ingot.builder.expressions import WeightReader
from ingot.builder.float_plan import FloatModel, lower_float
from ingot.builder.graph import Graph, weight_shape
from ingot.builder.precision import ProductChoice, product_weight, products_of
from ingot.builder.select import kernel_dtype, plan_ops
from ingot.checkpoint import Checkpoint
from ingot.dtypes import DType
from ingot.plan import Limits, Plan
from ingot.plugins.quantised import MAX_K
from ingot.plugins.registry import find_op
from ingot.plugins.target import Target

Progress = Callable[[str, int, int], None]


class SampleErrors:
    """What int8 inputs cost every product on the sample text; measured once, when first asked for."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self._checkpoint, self._progress = checkpoint, progress
        self._errors: dict[str, float] | None = None

    def of(self, graph: Graph) -> dict[str, float]:
        """By product. Rewrites the precisions of `graph`, a graph of plugins; every other one of this checkpoint that
        has the same products has the same errors."""
        products = {node.name for node in products_of(graph)}
        if self._errors is None or not products <= self._errors.keys():
            model, plan, ids = _sample_plan(graph, self._checkpoint)
            uses = model.lowering.uses
            total, done = sum(use.nbytes for use in uses), 0

            def advance(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                if self._progress is not None:
                    self._progress("measuring int8 activations", min(done, total), total)

            with WeightReader(self._checkpoint) as reader:
                self._errors = activation_errors(plan, uses, reader, ids, advance)
        return self._errors


def choose_activations(
    graph: Graph, errors: SampleErrors, wanted: Mapping[str, ProductChoice], target: Target, notes: list[str]
) -> tuple[dict[str, ProductChoice], dict[str, float | None]]:
    """(choices without auto, error by product that had the choice). notes gets a sentence for what was decided."""
    products = {node.name: node for node in products_of(graph)}
    decided = {name: _by_kernels(choice, products[name].op, target, notes) for name, choice in wanted.items()}
    undecided = [name for name, choice in decided.items() if choice.activations == "auto"]
    if not undecided:
        return decided, {}
    measured = errors.of(graph)
    depths = {name: weight_shape(product_weight(node))[-1] for name, node in products.items()}
    fits = {
        name: measured[name] <= _tolerance(wanted[name].precision.dtype) and depths[name] <= MAX_K for name in undecided
    }
    for name, fit in fits.items():
        decided[name] = dataclasses.replace(decided[name], activations="int8" if fit else "bf16")
    others = [name for name, fit in fits.items() if not fit]
    worst = max(undecided, key=lambda name: math.inf if math.isnan(measured[name]) else measured[name])
    notes.append(
        f"int8 activations in {len(undecided) - len(others)} of {len(undecided)} matmuls; largest error on the sample "
        f"text: {measured[worst]:.2%} ({worst})" + (f"; not rounded: {', '.join(others)}" if others else "")
    )
    return decided, {name: _shortened(measured[name]) for name in undecided}


def _tolerance(dtype: DType) -> float:
    quantised = dtype.weight_format
    assert quantised is not None, "products of floats have no choice"
    return quantised.int8_tolerance


def _by_kernels(choice: ProductChoice, plugin: str, target: Target, notes: list[str]) -> ProductChoice:
    """auto becomes what the target has kernels for, where it has only one. plugin: Matmul, or a product of experts."""
    if choice.activations != "auto":
        return choice
    dtype, (op,) = choice.precision.dtype.value, plan_ops(plugin)
    has = {
        mode: any(name.startswith(f"{op}.{kernel_dtype(dtype, mode)}.") for name in target.kernels())
        for mode in ("int8", "bf16")
    }
    if all(has.values()) or not any(has.values()):  # no kernel at all is an error of choose_kernel
        return choice
    only = next(mode for mode, there in has.items() if there)
    of = f"products of experts ({op})" if find_op(op).experts else "products"
    note = f"activations {only} in {dtype} {of}: {target.name} has no kernels for anything else"
    if note not in notes:
        notes.append(note)
    return dataclasses.replace(choice, activations=only)


def _sample_plan(graph: Graph, checkpoint: Checkpoint) -> tuple[FloatModel, Plan, list[int]]:
    """The graph as a plan of float32 for one sequence: the sample text."""
    model = lower_float(graph, checkpoint)
    ids = sample_ids(checkpoint, model.shape.vocab_size, model.shape.positions)
    count = len(ids)
    limits = Limits(
        max_batch_size=1, max_input_len=count, max_seq_len=count + 1, max_num_tokens=count, max_logit_rows=count
    )
    return model, model.plan(limits, count), ids


def _shortened(error: float) -> float | None:
    return None if math.isnan(error) else float(f"{error:.3g}")
